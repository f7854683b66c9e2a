"""A model divided among ranks computes what the whole one computes, up to rounding."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from neuron_di.errors import CheckpointError, ConfigError
from neuron_di.kv import KvLayout
from neuron_di.models import (
    Gather,
    JointRank,
    ModelSpec,
    Shard,
    TorchAttention,
    Transformer,
    load_weights,
    require_divisible,
)
from neuron_di.models.spec import read_json_object
from neuron_di.testing import write_random_checkpoint
from neuron_di.types import BlockId

NUM_BLOCKS, BLOCK_SIZE = 24, 16
BLOCK_IDS = [BlockId(5 * n % NUM_BLOCKS) for n in range(20)]
TOLERANCE = 1e-4  # of logits of std 3, in float32


class Meeting:
    """Where threads stand in for ranks: each puts its tensor down and takes all of them."""

    def __init__(self, num_ranks: int) -> None:
        self._tensors: list[Tensor | None] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=60)

    def gather_of(self, rank: int) -> Gather:
        def gather(x: Tensor) -> list[Tensor]:
            self._tensors[rank] = x
            self._barrier.wait()
            taken = [each.clone() for each in self._tensors if each is not None]
            self._barrier.wait()
            return taken

        return gather

    def abort(self) -> None:
        self._barrier.abort()


def make_pool(layout: KvLayout) -> Tensor:
    """Each block with the parts of all ranks, as in a worker: [N, R, L, C, K, S, D]."""
    shape = (NUM_BLOCKS, layout.num_ranks, *layout.rank_shape)
    return torch.full(shape, float("nan"), dtype=getattr(torch, layout.dtype))


def transformer_of(
    folder: Path, pool: Tensor, dtype: str, shard: Shard | None = None, gather: Gather | None = None
) -> Transformer:
    spec = ModelSpec.from_folder(folder) if shard is None else shard.spec
    own = pool[:, 0 if shard is None else shard.rank]
    joint = None if shard is None or gather is None else JointRank(shard, gather)
    return Transformer(
        spec,
        load_weights(folder, spec, dtype=dtype, shard=shard),
        spec.rope.angle_tables(spec.head_dim, len(BLOCK_IDS) * BLOCK_SIZE),
        own,
        TorchAttention(own, spec.sliding_window),
        joint,
    )


def run(transformer: Transformer, token_ids: list[int]) -> Tensor:
    """In two chunks and a token. Logits of every position."""
    rows: list[Tensor] = []
    for start, end in ((0, 100), (100, len(token_ids) - 1), (len(token_ids) - 1, len(token_ids))):
        last = transformer.run_chunk(
            token_ids[start:end],
            start=start,
            block_ids=BLOCK_IDS,
            with_logits=True,
            read_logits=lambda _, logits: rows.append(logits.clone()),
        )
        assert last is not None
        rows[-1] = torch.cat([rows[-1][:-1], last[None]])
    return torch.cat(rows)


def run_ranks(
    folder: Path, num_ranks: int, token_ids: list[int], dtype: str = "float32"
) -> tuple[list[Tensor], Tensor]:
    """What each rank makes of the prompt, and their pool."""
    spec = ModelSpec.from_folder(folder)
    meeting = Meeting(num_ranks)
    pool = make_pool(spec.kv_layout(block_size=BLOCK_SIZE, dtype=dtype, num_ranks=num_ranks))

    def rank(number: int) -> Tensor:
        try:
            shard = Shard(model=spec, num_ranks=num_ranks, rank=number)
            gather = meeting.gather_of(number)
            return run(transformer_of(folder, pool, dtype, shard, gather), token_ids)
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(rank, range(num_ranks))), pool


def check_equal(folder: Path, num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(1)
    token_ids: list[int] = torch.randint(3, 2048, (290,), generator=generator).tolist()
    spec = ModelSpec.from_folder(folder)
    whole_pool = make_pool(spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32"))
    expected = run(transformer_of(folder, whole_pool, "float32"), token_ids)
    ranks, pool = run_ranks(folder, num_ranks, token_ids)
    for logits in ranks:
        assert torch.equal(logits, ranks[0]), "the ranks differ"
    torch.testing.assert_close(ranks[0], expected, atol=TOLERANCE, rtol=0)
    layout = spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32", num_ranks=num_ranks)
    for rank in range(num_ranks):
        own = whole_pool[:, 0, :, :, list(layout.heads_of(rank))]
        torch.testing.assert_close(pool[:, rank], own, atol=1e-4, rtol=0, equal_nan=True)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_compute_what_one_process_computes(family_folder: Path, num_ranks: int) -> None:
    """Two KV heads: with four ranks, two of them have the same one."""
    check_equal(family_folder, num_ranks)


@pytest.mark.parametrize(
    "config",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"vocab_size": 2051, "tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
    ],
    ids=["biases", "uneven-vocabulary", "one-kv-head", "no-sharing"],
)
def test_variants_do_too(tmp_path: Path, config: dict[str, object]) -> None:
    tied = bool(config.get("tie_word_embeddings"))
    write_random_checkpoint(tmp_path, "llama", tied=tied, config=config)
    check_equal(tmp_path, 4)


def test_half_precision_stays_close(llama_folder: Path) -> None:
    token_ids = list(range(40, 240))
    spec = ModelSpec.from_folder(llama_folder)
    pool = make_pool(spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32"))
    expected = run(transformer_of(llama_folder, pool, "float32"), token_ids)
    (logits, other), _ = run_ranks(llama_folder, 2, token_ids, "bfloat16")
    assert torch.equal(logits, other)
    assert (torch.cosine_similarity(logits, expected, dim=-1) > 0.99).all()


def test_a_rank_loads_no_more_than_its_part(llama_folder: Path) -> None:
    spec = ModelSpec.from_folder(llama_folder)
    whole = spec.num_parameters()
    loaded: list[int] = []
    for rank in range(2):
        shard = Shard(model=spec, num_ranks=2, rank=rank)
        sizes: list[int] = []
        load_weights(
            llama_folder,
            shard.spec,
            dtype="float32",
            shard=shard,
            on_progress=lambda _, total, sizes=sizes: sizes.append(total),  # type: ignore[misc]
        )
        loaded.append(sizes[-1] // 4)
        assert loaded[-1] == shard.spec.num_parameters()
    norms = (2 * spec.num_layers + 1) * spec.hidden
    assert sum(loaded) == whole + norms


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "llama")
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace('"intermediate_size": 384', '"intermediate_size": 768')
    )
    spec = ModelSpec.from_folder(tmp_path)
    shard = Shard(model=spec, num_ranks=2, rank=1)
    with pytest.raises(CheckpointError, match=r"mlp.*has shape .*384.*implies .*768"):
        load_weights(tmp_path, shard.spec, dtype="float32", shard=shard)


@pytest.mark.parametrize(
    ("num_ranks", "config", "words"),
    [
        (3, {}, r"--tp 3 does not divide the model's 4 attention heads"),
        (8, {}, r"--tp 8 does not divide the model's 4 attention heads"),
        (4, {"intermediate_size": 386}, r"--tp 4 does not divide .* 386 intermediate columns"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, r"--tp 4 neither .* 6 KV heads"),
    ],
)
def test_what_cannot_be_divided_is_named(
    llama_folder: Path,
    num_ranks: int,
    config: dict[str, object],
    words: str,
) -> None:
    fields = read_json_object(llama_folder / "config.json") | config
    spec = ModelSpec.from_config(fields, eos_token_id=0, source="config.json")
    with pytest.raises(ConfigError, match=words):
        require_divisible(spec, num_ranks)
