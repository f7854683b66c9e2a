"""Blocks that are copied on the device: in order with the steps, and in no memory besides."""

import pytest

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

import torch
from backend_kit import decode, make_request, random_prompt
from cuda_backend_kit import BLOCK_SIZE, NUM_VOCAB, blocks, opened_cuda, pool_of, write_small
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neuron_di.core import PrefillChunk
from neuron_di.errors import BackendLost

CHUNK = 2 * BLOCK_SIZE  # and a piece
PROMPT = [token % NUM_VOCAB for token in random_prompt(2 * CHUNK + 5)]
FIRST, SECOND = [9, 3, 17, 1, 4], [2, 20, 11, 6, 8]
KEPT = [12, 13, 15, 14]


def run(backend, block_ids, num_reused=0, *, is_kept=False):
    """The request, and the logits of its first tokens. So many pieces are copied."""
    request = make_request(PROMPT, block_ids)
    logits_V = None
    while request.num_computed < request.num_prompt:
        piece = request.num_computed // CHUNK
        own, kept = (ids[2 * piece : 2 * piece + 2] for ids in (request.block_ids, blocks(*KEPT)))
        chunk = PrefillChunk.next_of(request, CHUNK)
        if piece < num_reused:
            backend.copy_blocks(kept, own)
        else:
            logits_V = backend.prefill(chunk)
            if is_kept and kept:
                backend.copy_blocks(own, kept)
        chunk.mark_computed()
    logits = [logits_V.clone()]
    request.generated.append(int(logits_V.argmax()))
    return request, [*logits, decode(backend, request)[0].clone()]


def kv_of(backend, request):
    """[positions, L, 2, K, D]"""
    positions = torch.arange(request.num_computed)
    ids = torch.tensor(request.block_ids)[positions // BLOCK_SIZE]
    return pool_of(backend).cpu().permute(0, 4, 1, 2, 3, 5)[ids, positions % BLOCK_SIZE]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 21])
def test_what_was_copied_is_as_if_it_was_computed(tmp_path, dtype, window):
    family, config = ("llama", {}) if window is None else ("mistral", {"sliding_window": window})
    folder = write_small(tmp_path, family, **config)
    with opened_cuda(folder, dtype=dtype) as backend:
        whole, expected = run(backend, FIRST, is_kept=True)
        kv = kv_of(backend, whole)
        assert not kv.isnan().any()
        pool_of(backend)[FIRST] = float("nan")
        for num_reused in (1, 2):
            pool_of(backend)[SECOND] = float("nan")
            request, logits = run(backend, SECOND, num_reused)
            assert torch.equal(kv_of(backend, request), kv)
            assert all(map(torch.equal, logits, expected))


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([3], [7]),
        ([3, 4, 9], [7, 8, 2]),
        ([3, 4, 5], [8, 7, 6]),
        ([0, 2], [22, 23]),
        ([6, 6], [1, 9]),
    ],
)
def test_copies_write_their_targets_only(tmp_path, sources, targets):
    with opened_cuda(write_small(tmp_path)) as backend:
        pool = pool_of(backend)
        pool.copy_(torch.randn(pool.shape))
        expected = pool.clone()
        expected[targets] = expected[sources]
        backend.copy_blocks(blocks(*sources), blocks(*targets))
        assert torch.equal(pool, expected)


def test_what_was_copied_is_on_the_device(tmp_path):
    """Transfers and steps take it from there, and not from the mirror."""
    with opened_cuda(write_small(tmp_path)) as backend:
        run(backend, FIRST)
        backend.pool.retire(blocks(*SECOND))
        assert not backend.pool.is_on_device(blocks(20)[0])
        backend.copy_blocks(blocks(9, 3), blocks(2, 20))
        assert all(backend.pool.is_on_device(block_id) for block_id in blocks(2, 20))
        assert not backend.pool.is_on_device(blocks(11)[0])


def test_a_lost_device_copies_nothing(tmp_path):
    with opened_cuda(write_small(tmp_path)) as backend:
        backend.pool.lose(BackendLost("the GPU fell off the bus"))
        with pytest.raises(BackendLost):
            backend.copy_blocks(blocks(1), blocks(2))


class Made(TorchDispatchMode):
    """The sizes of the tensors that are made within it."""

    def __init__(self, pool):
        super().__init__()
        self._pool = pool.untyped_storage().data_ptr()
        self.num_bytes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() != self._pool:
                self.num_bytes.append(each.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("targets", [[16, 17, 18, 19], [19, 12, 21, 14]])
def test_a_copy_takes_no_memory_of_its_size(tmp_path, targets):
    """A piece can be a gigabyte, for which the plan of the GPU's memory has no room."""
    with opened_cuda(write_small(tmp_path)) as backend, Made(pool_of(backend)) as made:
        backend.copy_blocks(blocks(1, 2, 3, 4), blocks(*targets))
    assert max(made.num_bytes, default=0) < backend.layout.block_bytes
