"""The CPU backend against Hugging Face `generate`, and its promise of batch invariance."""

import random
from pathlib import Path

import pytest
import torch
from backend_kit import decode, make_request, opened, prefill, random_prompt
from transformers import AutoModelForCausalLM

from neuron_di.core import PrefillChunk
from neuron_di.errors import CheckpointError, LocalProtocolError
from neuron_di.request import Request
from neuron_di_bindings import cpu_kernels

PROMPT_LENGTHS = (1, 15, 16, 17, 300, 700)
NUM_TOKENS = 32

needs_kernels = pytest.mark.skipif(
    not cpu_kernels.is_available(), reason="the compiled kernels are not built"
)
both_paths = pytest.mark.parametrize(
    "use_kernels", [pytest.param(True, marks=needs_kernels), False], ids=["kernels", "torch"]
)


def hf_greedy(folder: Path, prompt_ids: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt_ids])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
    )
    tokens: list[int] = out[0, len(prompt_ids) :].tolist()
    return tokens


def requests_of(lengths: tuple[int, ...]) -> list[Request]:
    """Requests with blocks of their own, scattered over a pool of 100 blocks."""
    free = random.Random(5).sample(range(100), 100)
    requests = []
    for seed, length in enumerate(lengths):
        num_blocks = -(-(length + NUM_TOKENS) // 16)
        blocks, free = free[:num_blocks], free[num_blocks:]
        requests.append(make_request(random_prompt(length, seed), blocks))
    return requests


@both_paths
def test_greedy_tokens_equal_transformers(family_folder: Path, use_kernels: bool) -> None:
    requests = requests_of(PROMPT_LENGTHS)
    with opened(family_folder, use_kernels=use_kernels) as backend:
        for request in requests:
            prefill(backend, request)
        while len(requests[0].generated) < NUM_TOKENS:
            decode(backend, *requests)
    for request in requests:
        assert request.generated == hf_greedy(family_folder, request.prompt_ids)


@both_paths
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_do_not_depend_on_the_batch(
    family_folder: Path, use_kernels: bool, dtype: str
) -> None:
    def logits_of(batches: list[tuple[int, ...]]) -> dict[int, list[torch.Tensor]]:
        """Each request's logits step by step, when run in these batches, one after the other."""
        requests = requests_of((1, 15, 300, 16, 40, 17, 100, 33, 270))
        rows: dict[int, list[torch.Tensor]] = {number: [] for number in range(len(requests))}
        with opened(family_folder, use_kernels=use_kernels, dtype=dtype) as backend:
            for request in requests:
                prefill(backend, request)
            for batch in batches:
                for _ in range(4):
                    logits = decode(backend, *(requests[number] for number in batch))
                    for number, row in zip(batch, logits, strict=True):
                        rows[number].append(row)
        return rows

    alone = logits_of([(number,) for number in range(9)])
    together = logits_of([tuple(range(9))])
    mixed = logits_of([(8, 2), (0, 1, 3), (7, 6, 5, 4)])
    for number, rows in alone.items():
        for step, row in enumerate(rows):
            assert torch.equal(row, together[number][step]), (number, step)
            assert torch.equal(row, mixed[number][step]), (number, step)


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kernels_and_torch_agree(family_folder: Path, dtype: str) -> None:
    rows = []
    for use_kernels in (True, False):
        request = make_request(random_prompt(290), list(range(30)))
        with opened(family_folder, use_kernels=use_kernels, dtype=dtype) as backend:
            prefill(backend, request)
            rows.append(decode(backend, request)[0])
    tolerance = {"float32": 2e-4, "float16": 0.1, "bfloat16": 1.5}[dtype]
    torch.testing.assert_close(rows[0], rows[1], atol=tolerance, rtol=0)


def test_logits_only_for_the_last_chunk(llama_folder: Path) -> None:
    request = make_request(random_prompt(40), [3, 1, 2])
    with opened(llama_folder) as backend:
        assert backend.prefill(PrefillChunk(request, 0, 20)) is None
        request.num_computed = 20
        logits = backend.prefill(PrefillChunk(request, 20, 40))
        assert logits is not None
        assert logits.shape == (backend.num_vocab,)
        assert logits.dtype == torch.float32


@both_paths
def test_decode_writes_its_own_position_only(llama_folder: Path, use_kernels: bool) -> None:
    request = make_request(random_prompt(18), [4, 7])
    with opened(llama_folder, use_kernels=use_kernels) as backend:
        prefill(backend, request)
        pool = backend.pool.tensor()
        before = pool.clone()
        decode(backend, request)
        changed = (pool != before) & ~(pool.isnan() & before.isnan())
        expected = torch.zeros_like(changed)
        expected[7, :, :, :, 2] = True
        assert torch.equal(changed, expected)


@needs_kernels
def test_a_row_that_goes_on_behind_its_blocks_is_refused_beside_a_longer_one(
    llama_folder: Path,
) -> None:
    """The table is as wide as the longest row's: what pads the others is a block, too."""
    with opened(llama_folder) as backend:
        short = make_request(random_prompt(15), [3])
        long = make_request(random_prompt(40), [4, 5, 6])
        other = make_request(random_prompt(10), [0])
        for request in (short, long, other):
            prefill(backend, request)
        decode(backend, short, long)  # its block is full now
        before = backend.pool.tensor()[0].clone()
        with pytest.raises(LocalProtocolError, match="behind its last block"):
            decode(backend, short, long)
        assert torch.equal(backend.pool.tensor()[0].nan_to_num(), before.nan_to_num())


def test_a_damaged_checkpoint_frees_the_pool(tmp_path: Path, llama_folder: Path) -> None:
    for path in llama_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"")
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"), opened(tmp_path):
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open
