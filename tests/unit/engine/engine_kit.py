"""An engine that a test turns by hand, over a real backend and a real scheduler."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuron_di.backends import BackendOptions
from neuron_di.backends.cpu import CpuBackend
from neuron_di.core import (
    BlockPool,
    CombinedScheduler,
    DecodeBatch,
    DecodeScheduler,
    PrefillChunk,
    PrefillScheduler,
    PrefixCache,
    Scheduler,
)
from neuron_di.engine import Emitted, Engine, EngineEvent, Key
from neuron_di.models import ModelSpec
from neuron_di.request import OutputText, Request, Tokenizer, TokenRuleMaker
from neuron_di.transfer import TransferToken
from neuron_di.types import BlockId, Incarnation, RequestId
from neuron_di.wire import SamplingParams

BLOCK_SIZE = 4
NUM_BLOCKS = 32
LIMITS = {"block_size": BLOCK_SIZE, "waiting_max": 8}


class Backend(CpuBackend):
    """The CPU's; it fails or gives unusable logits when a test says so.

    `culprits`: requests with which no decode step, and nothing drawn, succeeds.
    """

    failures: list[Exception]
    spoilt_rows: list[int]
    culprits: set[str]
    batches: list[list[str]]  # that were tried
    copy_failures: list[Exception | None]  # of the next copies of blocks, the last first
    copies: list[tuple[list[BlockId], list[BlockId]]]
    computed: list[tuple[str, int, int]]  # chunks, by request and span

    def __init__(self, folder: Path) -> None:
        spec = ModelSpec.from_folder(folder)
        super().__init__(
            BackendOptions(
                folder=folder,
                spec=spec,
                layout=spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32"),
                num_blocks=NUM_BLOCKS,
                incarnation=Incarnation("ab" * 16),
                num_threads=1,
            )
        )
        self.failures, self.spoilt_rows, self.culprits, self.batches = [], [], set(), []
        self.copy_failures, self.copies, self.computed = [], [], []
        self.pool.tensor().fill_(float("nan"))  # what was never written must never be read

    def prefill(self, chunk: PrefillChunk, *args: Any, **fields: Any) -> Any:
        if self.failures:
            raise self.failures.pop()
        self.computed.append((chunk.request.request_id, chunk.start, chunk.end))
        return super().prefill(chunk, *args, **fields)

    def copy_blocks(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        if self.copy_failures and (failure := self.copy_failures.pop()) is not None:
            raise failure
        self.copies.append((list(sources), list(targets)))
        super().copy_blocks(sources, targets)

    def decode(self, batch: DecodeBatch) -> Any:
        self.batches.append([request.request_id for request in batch.requests])
        if self.failures:
            raise self.failures.pop()
        self._check(batch.requests)
        logits_BV = super().decode(batch)
        while self.spoilt_rows:
            logits_BV[self.spoilt_rows.pop()] = float("nan")
        return logits_BV

    def draw(self, logits_BV: Any, requests: Sequence[Request]) -> list[int | None]:
        self._check(requests)
        return super().draw(logits_BV, requests)

    def _check(self, requests: Sequence[Request]) -> None:
        if self.culprits.intersection(request.request_id for request in requests):
            raise RuntimeError("out of luck")


class Rig:
    """`events` holds all that the engine said. `transfers` are the test's to complete."""

    def __init__(
        self,
        folder: Path,
        role: str,
        *,
        batch_size: int = 4,
        chunk: int = 8,
        reserve: int = 128,
        num_blocks: int = NUM_BLOCKS,
        eos_token_ids: tuple[int, ...] = (),
        keeps_prefixes: bool = False,
    ) -> None:
        self.backend = Backend(folder)
        self.tokenizer = Tokenizer.load(folder)
        self.rules = TokenRuleMaker(
            self.tokenizer, num_vocab=self.backend.num_vocab, eos_token_ids=eos_token_ids
        )
        self.blocks = BlockPool(num_blocks)
        self.prefixes = None
        if keeps_prefixes:
            self.prefixes = PrefixCache(self.blocks, block_size=BLOCK_SIZE, chunk_tokens=chunk)
        self.scheduler = _scheduler(role, self.blocks, batch_size, chunk, reserve, self.prefixes)
        self.events: list[EngineEvent] = []
        self.transfers: dict[str, tuple[list[BlockId], TransferToken]] = {}
        self.engine = Engine(
            self.backend,
            self.scheduler,
            self.tokenizer,
            eos_token_ids,
            sink=self.events.extend,
            start_transfer=self._start_transfer,
        )

    def request(
        self,
        name: str,
        prompt_ids: Sequence[int] = range(100, 111),
        attempt: int = 0,
        given: Sequence[int] = (),
        num_prefilled: int | None = None,
        in_reasoning: bool = False,
        age_order: float = 0.0,
        **fields: Any,
    ) -> Request:
        sampling = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **fields})
        assert sampling.max_tokens is not None
        return Request(
            RequestId(name),
            attempt,
            prompt_ids=list(prompt_ids),
            sampling=sampling,
            max_tokens=sampling.max_tokens,
            output=OutputText(
                self.tokenizer,
                stop=tuple(sampling.stop),
                skip_special_tokens=True,
                min_tokens=sampling.min_tokens,
                include_stop=sampling.include_stop_str_in_output,
            ),
            given=given,
            num_prefilled=num_prefilled,
            rules=self.rules.rules_of(sampling),
            begins_in_reasoning=in_reasoning,
            age_order=age_order,
        )

    def received(
        self,
        name: str,
        *given: int,
        prompt_ids: Sequence[int] = range(100, 111),
        **fields: Any,
    ) -> Request:
        """As a decode worker submits it: by default with token 5 as its first."""
        ids = given or (5,)
        num_prefilled = len(prompt_ids) + len(ids) - 1
        return self.request(name, prompt_ids, given=ids, num_prefilled=num_prefilled, **fields)

    def turn(self, times: int = 1) -> list[EngineEvent]:
        """What the engine's thread does, once or more often. The events of these turns."""
        before = len(self.events)
        for _ in range(times):
            self.engine.wake()
            self.engine.turn(block=False)
            self.engine.blocks.check()
            self.scheduler.check_integrity()
        return self.events[before:]

    def turn_until_idle(self) -> list[EngineEvent]:
        before = len(self.events)
        for _ in range(200):
            self.turn()
            if self.scheduler.is_idle():
                assert self.blocks.num_free == self.blocks.num_blocks
                return self.events[before:]
        raise AssertionError("the engine does not come to rest")

    def complete(self, name: str, error: Any = None) -> None:
        """The KV arrives (as zeros), or will not come."""
        block_ids, token = self.transfers.pop(name)
        self.backend.pool.tensor()[block_ids] = 0.0
        token.complete(error)

    def _start_transfer(self, request: Request) -> TransferToken:
        token = TransferToken()
        self.transfers[request.request_id] = (list(request.block_ids), token)
        return token


def _scheduler(
    role: str,
    blocks: BlockPool,
    batch_size: int,
    chunk: int,
    reserve: int,
    prefixes: PrefixCache | None,
) -> Scheduler:
    if role == "decode":
        return DecodeScheduler(blocks, batch_size=batch_size, reserve_tokens=reserve, **LIMITS)
    sizes: dict[str, Any] = {"batch_size": batch_size, "chunk_tokens": chunk, **LIMITS}
    if role == "prefill":
        return PrefillScheduler(blocks, **sizes, prefixes=prefixes)
    return CombinedScheduler(blocks, **sizes, reserve_tokens=reserve, prefixes=prefixes)


def key(name: str, attempt: int = 0) -> Key:
    return RequestId(name), attempt


def of(events: Sequence[EngineEvent], name: str) -> list[EngineEvent]:
    return [event for event in events if event.key == key(name)]


def indices(events: Sequence[EngineEvent]) -> list[int]:
    return [event.token.index for event in events if isinstance(event, Emitted)]


def token_ids(events: Sequence[EngineEvent]) -> list[int]:
    return [event.token.token_id for event in events if isinstance(event, Emitted)]
