"""Buckets, and what of a step is copied to the device. No graph is captured without a GPU."""

import pytest

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

import torch
from backend_kit import decode, make_request, prefill, random_prompt
from cuda_backend_kit import opened_cuda

from neuron_di.backends.cuda_graphs import buckets_up_to


@pytest.mark.parametrize(
    ("rows_max", "buckets"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (16, (1, 2, 4, 8, 16)),
        (40, (1, 2, 4, 8, 16, 24, 32, 40)),
        (256, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)),
    ],
)
def test_buckets(rows_max, buckets):
    assert buckets_up_to(rows_max) == buckets


def test_a_row_of_the_table_is_copied_when_it_changes_only(llama_folder, monkeypatch):
    with opened_cuda(llama_folder) as backend:
        requests = [make_request(random_prompt(5, seed), [seed]) for seed in (1, 2)]
        for request in requests:
            prefill(backend, request)
        copied = []
        place = backend._computing.steps._place

        def watched(row, block_ids):
            before = backend._computing.steps._table_BN.clone()
            place(row, block_ids)
            if not torch.equal(before, backend._computing.steps._table_BN):
                copied.append((row, list(block_ids)))

        monkeypatch.setattr(backend._computing.steps, "_place", watched)
        decode(backend, *requests)
        decode(backend, *requests)
        decode(backend, requests[1])
        assert copied == [(0, [1]), (1, [2]), (0, [2])]
        assert backend._computing.steps._number_2B[1].tolist()[:1] == [requests[1].num_computed - 1]
