"""The CUDA backend against the CPU's: the same tokens in float32, and rows that keep to themselves.

On a GPU where there is one, else in Triton's interpreter and on a simulator of the CUDA runtime.
"""

import pytest

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

import torch
from backend_kit import decode, make_request, opened, prefill, random_prompt
from cuda_backend_kit import NUM_BLOCKS, NUM_VOCAB, opened_cuda, pool_of, write_small

from neuron_di.backends import cuda_model
from neuron_di.backends.cuda_kernels import write_kv_
from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.errors import LocalProtocolError
from neuron_di.types import Incarnation

CHUNK = 20  # of a prompt: no multiple of a block


def small_prompt(length, seed=0):
    """For models of any vocabulary, also of the small one."""
    return [token % NUM_VOCAB for token in random_prompt(length, seed)]


def three_requests():
    """Of a batch of three, in a bucket of four. Their blocks lie in no order."""
    return [
        make_request(small_prompt(37), [9, 3, 17, 1]),
        make_request(small_prompt(5, seed=1), [2, 20]),
        make_request(small_prompt(16, seed=2), [11, 6]),
    ]


def tokens_of(backend, num_steps=4):
    requests = three_requests()
    for request in requests:
        prefill(backend, request, CHUNK)
    for _ in range(num_steps):
        decode(backend, *requests)
    return [request.generated for request in requests]


@pytest.mark.minutes  # test_cuda_answers.py has smaller models
def test_float32_tokens_are_the_cpus(family_folder):
    with opened(family_folder) as cpu:
        expected = tokens_of(cpu)
    with opened_cuda(family_folder) as cuda:
        assert tokens_of(cuda) == expected


def test_16_bits_stay_close_to_the_cpus(llama_folder):
    """Largest difference of logits, relative to their spread: below 2 %."""
    logits = []
    for open_one in (opened, opened_cuda):
        with open_one(llama_folder, dtype="bfloat16") as backend:
            request = make_request(random_prompt(37), [9, 3, 17, 1])
            prefill(backend, request, CHUNK)
            request.generated[-1] = 77  # the same, whatever each had chosen
            logits.append(decode(backend, request)[0].clone().cpu())
    spread = logits[0].max() - logits[0].min()
    assert (logits[0] - logits[1]).abs().max() < 0.02 * spread


def test_the_logits_of_all_positions(llama_folder):
    """Read in pieces, of every chunk, in order; the last row is what the next token is drawn of."""
    read = {}
    for name, open_one in (("cpu", opened), ("cuda", opened_cuda)):
        with open_one(llama_folder) as backend:
            request = make_request(random_prompt(37), [9, 3, 17, 1])
            rows = []
            while request.num_computed < request.num_prompt:
                chunk = PrefillChunk.next_of(request, CHUNK)

                def keep(start, logits_TV, rows=rows):
                    assert start == sum(map(len, rows))
                    rows.append(logits_TV.clone())

                last_V = backend.prefill(chunk, read_logits=keep)
                chunk.mark_computed()
            read[name] = torch.cat(rows)
            torch.testing.assert_close(read[name][-1], last_V.cpu(), rtol=1e-4, atol=1e-4)
    assert read["cuda"].shape == read["cpu"].shape
    torch.testing.assert_close(read["cuda"], read["cpu"], rtol=1e-4, atol=1e-4)


def test_invariant_rows_do_not_depend_on_the_batch(tmp_path):
    folder = write_small(tmp_path)
    with opened_cuda(folder, is_invariant=True) as backend:
        together = three_requests()
        for request in together:
            prefill(backend, request, CHUNK)
        in_company = decode(backend, *together).clone()
    for row, request in enumerate(three_requests()):
        with opened_cuda(folder, is_invariant=True) as backend:
            prefill(backend, request, CHUNK)
            assert torch.equal(decode(backend, request)[0], in_company[row])


def test_a_replay_is_what_decode_gave_bit_for_bit(tmp_path):
    folder = write_small(tmp_path)
    with opened_cuda(folder, is_invariant=True) as backend:
        first = make_request(small_prompt(37), [9, 3, 17, 1])
        prefill(backend, first, CHUNK)
        other = make_request(small_prompt(5, seed=1), [2, 20])
        prefill(backend, other, CHUNK)
        for _ in range(3):
            logits = decode(backend, first, other)[0].clone()
        kv = pool_of(backend)[[9, 3, 17]].clone()
    with opened_cuda(folder, is_invariant=True) as backend:
        again = make_request(small_prompt(37), [9, 3, 17, 1], given=first.generated[:-1])
        again.generated = list(again.given)
        last_V = None
        while again.num_computed < again.num_prefilled:
            chunk = PrefillChunk.next_of(again, CHUNK)
            last_V = backend.prefill(chunk)
            chunk.mark_computed()
        assert torch.equal(last_V, logits)
        # Bits, as NaN is no number's equal.
        assert torch.equal(pool_of(backend)[[9, 3, 17]].view(torch.int32), kv.view(torch.int32))


def test_only_the_requests_own_positions_are_written(llama_folder):
    """By a bucket with a filler, too: its row of the table names block 0, or another's blocks."""
    with opened_cuda(llama_folder) as backend:
        requests = three_requests()
        for request in requests:
            prefill(backend, request, CHUNK)
        before = pool_of(backend).clone()
        decode(backend, *requests)
        is_changed = pool_of(backend).view(torch.int32) != before.view(torch.int32)
        changed = {
            (block, slot) for block, slot in is_changed.any(dim=(1, 2, 3, 5)).nonzero().tolist()
        }
    assert changed == {(17, 37 - 32), (2, 5), (6, 0)}


def test_layers_are_told_in_order(llama_folder):
    with opened_cuda(llama_folder) as backend:
        request = make_request(random_prompt(37), [9, 3, 17, 1])
        chunk = PrefillChunk.next_of(request, CHUNK)
        told = []
        backend.prefill(chunk, after_layer=lambda layer, written: told.append((layer, written)))
    num_layers = backend.layout.num_layers
    assert told == [(layer, request.block_ids[:2]) for layer in range(num_layers)]


def test_kv_that_nobody_brought_is_not_read(llama_folder):
    with opened_cuda(llama_folder) as backend:
        request = make_request(random_prompt(5), [4])
        request.num_computed = 5
        request.generated.append(7)
        with pytest.raises(LocalProtocolError, match="block 4"):
            backend.decode(DecodeBatch((request,)))


def test_another_pool_on_the_same_weights(tmp_path):
    with opened_cuda(write_small(tmp_path)) as backend:
        expected = tokens_of(backend, 2)
        backend.close_pool()
        backend.open_pool(NUM_BLOCKS, Incarnation("c" * 32))
        pool_of(backend).fill_(float("nan"))
        assert tokens_of(backend, 2) == expected


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 24), (1, 1), (2, 1)])
def test_its_warm_up_keeps_to_the_table_of_blocks(tmp_path, monkeypatch, block_size, num_blocks):
    """A kernel takes what lies behind the table for one more block, and writes there."""
    read = []

    def watched(qkv_THD, pool, layer, table_TN, position_T, *arguments, **options):
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not is_captured:  # then nothing can be read
            read.append((int(position_T.max()) // block_size, table_TN.shape[1]))
            assert read[-1][0] < read[-1][1], "no such block"
        return write_kv_(qkv_THD, pool, layer, table_TN, position_T, *arguments, **options)

    monkeypatch.setattr(cuda_model, "write_kv_", watched)
    folder = write_small(tmp_path)
    with opened_cuda(folder, block_size=block_size, num_blocks=num_blocks, decode_batch=1):
        assert read
