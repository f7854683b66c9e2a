"""One rank's part of a model: which heads and columns are its own, and how the parts join.

Queries, keys and values are divided by heads, gate and up by columns, and the matrices that
follow them by the same rows, so that each rank ends with a summand of the layer's output: two
sums per layer. Where there are more ranks than KV heads, neighbours hold the same head.
Embedding and lm_head are divided by tokens of the vocabulary. Norms are whole everywhere, and so
are the biases that are added once, after the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neuron_di.errors import ConfigError
from neuron_di.models.spec import ModelSpec

# What each rank passes, all of one shape and dtype, in the order of the ranks.
Gather = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Part:
    """A range of one dimension of a tensor of the checkpoint."""

    dim: int
    own: range
    whole: int  # what the stored tensor has in that dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank of several computes with."""

    model: ModelSpec
    num_ranks: int
    rank: int

    @property
    def vocab(self) -> range:
        """Rows of the embedding and of lm_head."""
        return self.vocab_of(self.rank)

    def vocab_of(self, rank: int) -> range:
        num_vocab = self.model.num_vocab
        return range(num_vocab * rank // self.num_ranks, num_vocab * (rank + 1) // self.num_ranks)

    @property
    def kv_heads(self) -> range:
        """As the KV pool has them."""
        layout = self.model.kv_layout(block_size=1, dtype="float32", num_ranks=self.num_ranks)
        return layout.heads_of(self.rank)

    @property
    def spec(self) -> ModelSpec:
        """The part as a model of its own, whose sizes are those of the rank's weights."""
        return replace(
            self.model,
            num_vocab=len(self.vocab),
            num_heads=self.model.num_heads // self.num_ranks,
            num_kv_heads=len(self.kv_heads),
            intermediate=self.model.intermediate // self.num_ranks,
        )

    def part_of(self, name: str) -> Part | None:
        """What is this rank's of a stored tensor; None: all of it."""
        model, rank, count = self.model, self.rank, self.num_ranks
        head_dim, kv_heads = model.head_dim, self.kv_heads
        module, _, kind = name.rpartition(".")
        columns = model.intermediate // count
        query = model.num_heads // count * head_dim
        by_columns = range(rank * columns, (rank + 1) * columns)
        by_heads = range(rank * query, (rank + 1) * query)
        by_kv_heads = range(kv_heads.start * head_dim, kv_heads.stop * head_dim)
        match module.rpartition(".")[2]:
            case "embed_tokens" | "lm_head":
                return Part(0, self.vocab, model.num_vocab)
            case "q_proj":
                return Part(0, by_heads, model.num_heads * head_dim)
            case "k_proj" | "v_proj":
                return Part(0, by_kv_heads, model.num_kv_heads * head_dim)
            case "gate_proj" | "up_proj":
                return Part(0, by_columns, model.intermediate)
            case "o_proj" if kind == "weight":
                return Part(1, by_heads, model.num_heads * head_dim)
            case "down_proj" if kind == "weight":
                return Part(1, by_columns, model.intermediate)
        return None


def require_divisible(model: ModelSpec, num_ranks: int) -> None:
    """Raise ConfigError, which names what it is, where the model cannot be divided so."""
    for count, name in (
        (model.num_heads, "attention heads"),
        (model.intermediate, "intermediate columns"),
    ):
        if count % num_ranks:
            raise ConfigError(f"--tp {num_ranks} does not divide the model's {count} {name}")
    if model.num_kv_heads % num_ranks and num_ranks % model.num_kv_heads:
        raise ConfigError(
            f"--tp {num_ranks} neither divides the model's {model.num_kv_heads} KV heads nor is a "
            "multiple of them"
        )
    if num_ranks > model.num_vocab:
        raise ConfigError(f"--tp {num_ranks} is more than the model's {model.num_vocab} tokens")


class JointRank:
    """A rank among the others. All call the same methods in the same order."""

    def __init__(self, shard: Shard, gather: Gather) -> None:
        self._shard = shard
        self._gather = gather

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks: the same bits at each of them.

        It is added up in float32 and in the order of the ranks, so it does not depend on what
        else is in the tensor either.
        """
        first, *others = self._gather(x)
        total = first.float()
        for other in others:
            total += other.float()
        return total.to(x.dtype)

    def embed(self, token_ids: Tensor, own_rows: Tensor) -> Tensor:
        """Rows [T, E] of an embedding of which each rank has its own rows."""
        vocab = self._shard.vocab
        is_other = (token_ids < vocab.start) | (token_ids >= vocab.stop)
        rows = (token_ids - vocab.start).masked_fill_(is_other, 0)
        return self.sum(own_rows[rows].masked_fill_(is_other[:, None], 0))

    def join_vocab(self, logits: Tensor) -> Tensor:
        """Logits [..., V] from those of each rank's part of the vocabulary."""
        sizes = [len(self._shard.vocab_of(rank)) for rank in range(self._shard.num_ranks)]
        padded = torch.nn.functional.pad(logits, (0, max(sizes) - logits.shape[-1]))
        parts = self._gather(padded)
        return torch.cat(
            [part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1
        )
