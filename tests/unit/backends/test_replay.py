"""Replay: the KV and logits of tokens that are known already, bit for bit as decode made them."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from backend_kit import BLOCK_SIZE, decode, make_request, opened, random_prompt
from torch import Tensor

from neuron_di.backends import Backend
from neuron_di.core import PrefillChunk
from neuron_di.request import Request
from neuron_di.testing import write_random_checkpoint
from neuron_di_bindings import cpu_kernels

NUM_PROMPT = 40
NUM_TOKENS = 72  # a replay of all is more than one call of the kernels
BLOCKS = [9, 2, 11, 3, 7, 0, 5]
OTHER_BLOCKS = [1, 4, 6, 8, 10, 12, 13]
WINDOW = 21  # neither the prompt nor the answer fits

needs_kernels = pytest.mark.skipif(
    not cpu_kernels.is_available(), reason="the compiled kernels are not built"
)
paths = pytest.mark.parametrize(
    ("use_kernels", "num_threads"),
    [
        pytest.param(True, 1, marks=needs_kernels),
        pytest.param(True, 2, marks=needs_kernels),
        (False, 1),
        (False, 2),
    ],
    ids=["kernels-1", "kernels-2", "torch-1", "torch-2"],
)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(scope="module")
def window_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that sees a few positions back only. Do not change it."""
    folder = tmp_path_factory.mktemp("checkpoints") / "window"
    write_random_checkpoint(folder, "mistral", config={"sliding_window": WINDOW})
    return folder


@dataclass(frozen=True)
class Undisturbed:
    """One request's whole run: `logits[i]` chose token i."""

    prompt_ids: list[int]
    token_ids: list[int]
    logits: list[Tensor]
    kv: Tensor


def prefill(backend: Backend, request: Request, chunk_tokens: int) -> Tensor:
    """Compute what a prefill computes. The next token's logits."""
    logits = None
    while request.num_computed < request.num_prefilled:
        chunk = PrefillChunk.next_of(request, chunk_tokens)
        logits = backend.prefill(chunk)
        assert (logits is None) == (not chunk.is_last)
        chunk.mark_computed()
    assert logits is not None
    return logits


def kv_of(backend: Backend, request: Request, num_positions: int) -> Tensor:
    """KV by position: [positions, layers, 2, K, D]."""
    positions = torch.arange(num_positions)
    block_ids = torch.tensor(request.block_ids)[positions // BLOCK_SIZE]
    pool_NSLCKD = backend.pool.tensor().permute(0, 4, 1, 2, 3, 5)
    return pool_NSLCKD[block_ids, positions % BLOCK_SIZE].clone()


def run(backend: Backend, chunk_tokens: int) -> Undisturbed:
    request = make_request(random_prompt(NUM_PROMPT), BLOCKS, max_tokens=NUM_TOKENS)
    logits = [prefill(backend, request, chunk_tokens)]
    request.generated.append(int(logits[0].argmax()))
    while len(request.generated) < NUM_TOKENS:
        logits.append(decode(backend, request)[0])
    kv = kv_of(backend, request, request.num_computed)
    return Undisturbed(request.prompt_ids, request.generated, logits, kv)


def continued(whole: Undisturbed, num_given: int) -> Request:
    """The same request on another worker, when the client has some of the tokens."""
    given = whole.token_ids[:num_given]
    request = make_request(whole.prompt_ids, OTHER_BLOCKS, max_tokens=NUM_TOKENS, given=given)
    request.generated += given  # as the engine does
    return request


def check_split(backend: Backend, whole: Undisturbed, num_given: int, chunk_tokens: int) -> Request:
    request = continued(whole, num_given)
    backend.pool.tensor()[OTHER_BLOCKS] = float("nan")
    logits = prefill(backend, request, chunk_tokens)
    assert torch.equal(logits, whole.logits[num_given]), num_given
    num_positions = NUM_PROMPT + num_given
    assert torch.equal(kv_of(backend, request, num_positions), whole.kv[:num_positions]), num_given
    return request


@paths
@dtypes
@pytest.mark.parametrize("chunk_tokens", [256, 17])
@pytest.mark.parametrize("has_window", [False, True], ids=["full", "window"])
def test_every_split_of_an_answer_gives_the_same_bits(
    llama_folder: Path,
    window_folder: Path,
    use_kernels: bool,
    num_threads: int,
    dtype: str,
    chunk_tokens: int,
    has_window: bool,
) -> None:
    folder = window_folder if has_window else llama_folder
    with opened(
        folder, num_blocks=14, dtype=dtype, use_kernels=use_kernels, num_threads=num_threads
    ) as backend:
        whole = run(backend, chunk_tokens)
        # Threads that outnumber free cores wait for each other: every split in two cases is enough.
        is_quick = num_threads == 1 or not has_window
        every = use_kernels and chunk_tokens == 256 and is_quick
        for num_given in range(0, NUM_TOKENS, 1 if every else 7):
            check_split(backend, whole, num_given, chunk_tokens)


@needs_kernels
@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_family_goes_on_as_if_nothing_had_happened(
    family_folder: Path, num_threads: int
) -> None:
    with opened(family_folder, num_blocks=14, num_threads=num_threads) as backend:
        whole = run(backend, 256)
        request = check_split(backend, whole, 33, 256)
        request.generated.append(int(whole.logits[33].argmax()))
        while len(request.generated) < NUM_TOKENS:
            decode(backend, request)
        assert request.generated == whole.token_ids
        assert torch.equal(kv_of(backend, request, len(whole.kv)), whole.kv)


@needs_kernels
def test_decode_computes_other_bits_than_prefill(llama_folder: Path) -> None:
    """Why a replay exists. Should this ever fail, prefill could do it, and faster."""
    with opened(llama_folder, num_blocks=14) as backend:
        whole = run(backend, 256)
        ids = whole.prompt_ids + whole.token_ids[:33]
        prefill(backend, request := make_request(ids, OTHER_BLOCKS), 256)
        assert not torch.equal(kv_of(backend, request, len(ids)), whole.kv[: len(ids)])


@pytest.mark.parametrize("use_kernels", [pytest.param(True, marks=needs_kernels), False])
def test_a_replay_writes_its_own_positions_only(llama_folder: Path, use_kernels: bool) -> None:
    with opened(llama_folder, num_blocks=14, use_kernels=use_kernels) as backend:
        whole = run(backend, 256)
        request = continued(whole, 30)
        prefill(backend, request, 256)
        request.num_computed = NUM_PROMPT + 5
        pool = backend.pool.tensor()
        pool[OTHER_BLOCKS[2], :, :, :, 13:] = float("nan")
        pool[OTHER_BLOCKS[3]] = float("nan")
        before = pool.clone()
        chunk = PrefillChunk.next_of(request, 7)  # positions 45 to 51
        hooks: list[tuple[int, list[int]]] = []
        backend.prefill(chunk, lambda layer, blocks: hooks.append((layer, list(blocks))))
        changed = (pool != before) & ~(pool.isnan() & before.isnan())
        expected = torch.zeros_like(changed)
        expected[OTHER_BLOCKS[2], :, :, :, 13:] = True
        expected[OTHER_BLOCKS[3], :, :, :, :4] = True
        assert torch.equal(changed, expected)
        written = OTHER_BLOCKS[2:4]
        assert hooks == [(layer, written) for layer in range(backend.layout.num_layers)]
