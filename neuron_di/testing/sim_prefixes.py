"""KV of prompts in a simulation: the real prefix cache, counted, so that a swarm knows what it
tried; and how much of a prompt may have been found.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from neuron_di.config import EngineOptions
from neuron_di.core import BlockPool, PrefillChunk, PrefixCache
from neuron_di.request import Request
from neuron_di.testing.sim_client import Client
from neuron_di.testing.workload import Wanted
from neuron_di.worker import LoadedModel
from neuron_di_proxy.receipts import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SimModel(LoadedModel):
    """A LoadedModel whose prefix caches are counted in `counts`."""

    counts: Counter[str]

    def prefix_cache(self, options: EngineOptions, pool: BlockPool) -> PrefixCache | None:
        if LoadedModel.prefix_cache(self, options, pool) is None:
            return None
        own_ids = frozenset(self.backend.pool.block_ids())
        return CountedPrefixCache(pool, options, self.counts, own_ids)


class CountedPrefixCache(PrefixCache):
    """`own_ids` are the blocks that are the worker's from the start: others come by exchange."""

    def __init__(
        self, pool: BlockPool, options: EngineOptions, counts: Counter[str], own_ids: frozenset[int]
    ) -> None:
        super().__init__(pool, block_size=options.block_size, chunk_tokens=options.chunk)
        self._counts = counts
        self._own_ids = own_ids

    def next_of(self, request: Request) -> PrefillChunk | None:
        chunk = super().next_of(request)
        if chunk is not None:
            self._counts["found"] += 1
            self._counts["found by a continuation"] += bool(request.given)
            blocks = (*chunk.reused, *request.block_ids)
            self._counts["found, blocks changed owner"] += not self._own_ids.issuperset(blocks)
        return chunk

    def _make_room(self, own: list[bytes]) -> bool:
        num_before = len(self._pieces)
        has_room = super()._make_room(own)
        self._counts["gave way to a piece"] += num_before - len(self._pieces)
        return has_room

    def _forget(self, num_blocks: int) -> None:
        num_before = len(self._pieces)
        super()._forget(num_blocks)
        self._counts["gave way to a request"] += num_before - len(self._pieces)


def found_too_much(
    clients: Sequence[Client], records: Mapping[str, RequestRecord]
) -> Iterator[tuple[str, str]]:
    """Who was told of KV that nobody can have kept, as (request, words): of its own tenant's
    prompts, or of its own earlier attempts."""
    wants = [client.wanted for client in clients]
    for client in clients:
        record = records.get(client.name)
        for attempt in () if record is None else record.attempts:
            num_max = len(client.wanted.prompt_ids)
            if not attempt.number:
                num_max = min(num_max - 1, _num_alike(client.wanted, wants))
            if attempt.num_cached > (num_max if client.may_find_kv else 0):
                words = f"attempt {attempt.number} found {attempt.num_cached} tokens"
                yield client.name, f"{words}, of {num_max} at most"


def _num_alike(want: Wanted, others: Sequence[Wanted]) -> int:
    """Ids with which its prompt begins, and another one of its tenant, too."""
    longest = 0
    for other in others:
        if other is not want and other.tenant == want.tenant:
            pairs = zip(want.prompt_ids, other.prompt_ids, strict=False)
            differs = (place for place, (one, two) in enumerate(pairs) if one != two)
            num_both = min(len(want.prompt_ids), len(other.prompt_ids))
            longest = max(longest, next(differs, num_both))
    return longest
