"""A prompt of which pieces were copied, bit for bit as one that was computed: KV and logits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from backend_kit import BLOCK_SIZE, decode, make_request, opened, random_prompt
from torch import Tensor

from neuron_di.backends import Backend
from neuron_di.core import PrefillChunk
from neuron_di.request import Request
from neuron_di.testing import write_random_checkpoint
from neuron_di.types import BlockId
from neuron_di_bindings import cpu_kernels

CHUNK = 2 * BLOCK_SIZE  # and a piece
NUM_PIECES = 3
PROMPT = random_prompt(NUM_PIECES * CHUNK + 7)
NUM_TOKENS = 6
WINDOW = 21  # less than a chunk
FIRST, SECOND = [9, 2, 11, 3, 7, 0, 5], [1, 4, 6, 8, 10, 12, 13]
KEPT = [25, 14, 22, 15, 17, 16]

needs_kernels = pytest.mark.skipif(
    not cpu_kernels.is_available(), reason="the compiled kernels are not built"
)
devices = pytest.mark.parametrize(
    ("use_kernels", "num_ranks"),
    [pytest.param(True, 1, marks=needs_kernels), (False, 1), (False, 2)],
    ids=["kernels", "torch", "two ranks"],
)


@pytest.fixture(scope="module")
def window_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that sees a few positions back only. Do not change it."""
    folder = tmp_path_factory.mktemp("checkpoints") / "window"
    write_random_checkpoint(folder, "mistral", config={"sliding_window": WINDOW})
    return folder


@contextmanager
def opened_for(
    folder: Path, use_kernels: bool, num_ranks: int, dtype: str = "float32"
) -> Iterator[Backend]:
    options = {"use_kernels": use_kernels, "num_ranks": num_ranks, "dtype": dtype}
    with opened(folder, num_blocks=26, num_threads=num_ranks, **options) as backend:
        yield backend


def kept_of(piece: int) -> list[BlockId]:
    return [BlockId(block_id) for block_id in KEPT[2 * piece : 2 * piece + 2]]


def blocks_of(request: Request, piece: int) -> list[BlockId]:
    return request.block_ids[2 * piece : 2 * piece + 2]


def run(
    backend: Backend, block_ids: list[int], reused: Sequence[int] = (), is_kept: bool = False
) -> tuple[Request, list[Tensor]]:
    """Compute but for these pieces, which are copied. The request, and the logits of each token."""
    request = make_request(PROMPT, block_ids, max_tokens=NUM_TOKENS)
    logits_V = None
    while request.num_computed < request.num_prompt:
        piece = request.num_computed // CHUNK
        chunk = PrefillChunk.next_of(request, CHUNK)
        if piece in reused:
            backend.copy_blocks(kept_of(piece), blocks_of(request, piece))
        else:
            logits_V = backend.prefill(chunk)
            if is_kept and piece < NUM_PIECES:
                backend.copy_blocks(blocks_of(request, piece), kept_of(piece))
        chunk.mark_computed()
    assert logits_V is not None
    logits = [logits_V.clone()]
    request.generated.append(int(logits_V.argmax()))
    while len(request.generated) < NUM_TOKENS:
        logits.append(decode(backend, request)[0].clone())
    return request, logits


def kv_of(backend: Backend, request: Request) -> Tensor:
    """KV of all positions, at every rank: [R, positions, L, 2, K, D]."""
    positions = torch.arange(request.num_computed)
    blocks = torch.tensor(request.block_ids)[positions // BLOCK_SIZE]
    return torch.stack(
        [
            backend.pool.tensor(rank).permute(0, 4, 1, 2, 3, 5)[blocks, positions % BLOCK_SIZE]
            for rank in range(backend.layout.num_ranks)
        ]
    )


def spoil(backend: Backend, block_ids: Sequence[int]) -> None:
    for rank in range(backend.layout.num_ranks):
        backend.pool.tensor(rank)[list(block_ids)] = float("nan")


@devices
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_window", [False, True], ids=["full", "window"])
def test_what_was_copied_is_as_if_it_was_computed(
    llama_folder: Path,
    window_folder: Path,
    use_kernels: bool,
    num_ranks: int,
    dtype: str,
    has_window: bool,
) -> None:
    folder = window_folder if has_window else llama_folder
    with opened_for(folder, use_kernels, num_ranks, dtype) as backend:
        whole, expected = run(backend, FIRST, is_kept=True)
        kv = kv_of(backend, whole)
        assert not kv.isnan().any()
        spoil(backend, FIRST)
        for reused in [(0,), (0, 1), (0, 1, 2), (1, 2), (0, 2)]:  # also behind a hole
            spoil(backend, SECOND)
            request, logits = run(backend, SECOND, reused)
            assert request.generated == whole.generated
            assert torch.equal(kv_of(backend, request), kv), reused
            for step, row in enumerate(logits):
                assert torch.equal(row, expected[step]), (reused, step)


@needs_kernels
def test_of_every_family(family_folder: Path) -> None:
    with opened_for(family_folder, use_kernels=True, num_ranks=1) as backend:
        whole, expected = run(backend, FIRST, is_kept=True)
        kv = kv_of(backend, whole)
        spoil(backend, FIRST)
        request, logits = run(backend, SECOND, (0, 1, 2))
        assert torch.equal(kv_of(backend, request), kv)
        assert all(map(torch.equal, logits, expected))


@devices
def test_it_is_read_from_the_copies(llama_folder: Path, use_kernels: bool, num_ranks: int) -> None:
    """Or the tests above would prove nothing: another piece's KV changes all that comes after."""
    with opened_for(llama_folder, use_kernels, num_ranks) as backend:
        _, expected = run(backend, FIRST, is_kept=True)
        for rank in range(num_ranks):
            backend.pool.tensor(rank)[KEPT[:2]] = backend.pool.tensor(rank)[KEPT[2:4]].clone()
            _, logits = run(backend, SECOND, (0, 1))
            assert not torch.equal(logits[0], expected[0]), rank


@devices
def test_copies_write_their_targets_only(
    llama_folder: Path, use_kernels: bool, num_ranks: int
) -> None:
    with opened_for(llama_folder, use_kernels, num_ranks) as backend:
        for rank in range(num_ranks):
            backend.pool.tensor(rank).copy_(torch.randn(backend.pool.tensor(rank).shape))
        before = [backend.pool.tensor(rank).clone() for rank in range(num_ranks)]
        sources, targets = [3, 4, 9], [7, 8, 2]
        backend.copy_blocks(list(map(BlockId, sources)), list(map(BlockId, targets)))
        for rank, old in enumerate(before):
            old[targets] = old[sources]
            assert torch.equal(backend.pool.tensor(rank), old)


def test_a_prompt_that_is_cut_elsewhere_has_other_bits(llama_folder: Path) -> None:
    """Why pieces end where chunks end. Should this ever fail, they could end anywhere."""
    with opened_for(llama_folder, use_kernels=False, num_ranks=1, dtype="bfloat16") as backend:
        whole, _ = run(backend, FIRST)
        request = make_request(PROMPT, SECOND)
        while request.num_computed < request.num_prompt:
            chunk = PrefillChunk.next_of(request, BLOCK_SIZE - 3)
            backend.prefill(chunk)
            chunk.mark_computed()
        num_prompt = len(PROMPT)
        assert not torch.equal(kv_of(backend, request), kv_of(backend, whole)[:, :num_prompt])
