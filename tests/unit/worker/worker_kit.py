"""Whole workers in one process: real model, real links over loopback, real shared memory."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from neuron_di.clock import now_s
from neuron_di.config import EngineOptions, HandOverOptions, WorkerOptions
from neuron_di.errors import NeuronDiError
from neuron_di.kv import KvPool
from neuron_di.transfer import Receive, Send, ShmEngine, TransferToken
from neuron_di.types import Incarnation, RequestId, Role
from neuron_di.wire import DecodeLeg, LegEvent, PrefillLeg, SamplingParams, Token
from neuron_di.worker import Worker, WorkerParts, load_model

WAIT_S = 30.0
PROMPT = list(range(100, 140))


def make_worker(
    folder: Path, role: Role, *, parts: WorkerParts | None = None, **fields: object
) -> Worker:
    """`fields` are options of the worker or limits of its hand-overs, or its block size."""
    block_size = fields.pop("block_size", 4)
    names = {field.name for field in dataclasses.fields(HandOverOptions)}
    limits = {name: fields.pop(name) for name in names & set(fields)}
    engine = EngineOptions(
        block_size=block_size,
        num_blocks=1024 // block_size,
        threads=1,
        chunk_tokens=16,
        prefill_batch=4,
        decode_batch=4,
    )
    options = WorkerOptions(
        **{"model": str(folder), "role": role, "worker_id": f"{role}-0"} | fields,
        engine=engine,
        hand_over=HandOverOptions(**limits),
    )
    worker = Worker(options, load_model(str(folder), None, role, engine), parts)
    worker.set_state("ready")
    return worker


def prefill_leg(
    name: str,
    prompt: object = PROMPT,
    *,
    attempt: int = 0,
    timeout_s: float = WAIT_S,
    emitted: Sequence[int] = (),
    **sampling: object,
) -> PrefillLeg:
    return PrefillLeg(
        request_id=RequestId(name),
        attempt=attempt,
        endpoint="completions",
        prompt=msgspec.Raw(json.dumps(prompt).encode()),
        sampling=make_sampling(**sampling),
        timeout_s=timeout_s,
        emitted=tuple(emitted),
    )


def decode_leg(
    name: str,
    prefill: Worker,
    *,
    attempt: int = 0,
    timeout_s: float = WAIT_S,
    num_emitted: int = 0,
    **sampling: object,
) -> DecodeLeg:
    return DecodeLeg(
        request_id=RequestId(name),
        attempt=attempt,
        sampling=make_sampling(**sampling),
        prefill=prefill.record().peer_address(),
        timeout_s=timeout_s,
        num_emitted=num_emitted,
    )


def make_sampling(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **fields})


async def outcome(task: Awaitable[list[LegEvent]]) -> list[LegEvent] | NeuronDiError:
    """How a leg ended: its events, or its error. That it ends is part of every test."""
    async with asyncio.timeout(WAIT_S):
        try:
            return await task
        except NeuronDiError as error:
            return error


async def until(condition: Callable[[], object]) -> None:
    """Come back when it holds."""
    end_s = now_s() + WAIT_S
    while not condition():
        assert now_s() < end_s, "it never came to hold"
        await asyncio.sleep(0.005)


def is_at_rest(worker: Worker) -> bool:
    """No leg, no request, no parked KV, every block free."""
    status = worker.status()
    buffer = worker.prefill._send_buffer if worker.prefill is not None else None
    return (
        status.num_blocks_free + status.num_blocks_cached == status.num_blocks
        and status.num_waiting == status.num_running == status.num_transferring == 0
        and len(worker.legs) == 0
        and (buffer is None or not any(e.ready for e in buffer.lookup_dict.values()))
        and (worker.decode is None or worker.decode._incoming == {})
    )


async def collect(events: object) -> list[LegEvent]:
    return [event async for event in events]


def token_ids(events: list[LegEvent]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, Token)]


class HeldCopies(ShmEngine):
    """Copies that end when `let_go` is called; before that, once `is_holding` is set."""

    is_holding = False

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool)
        self.held: list[Callable[[], None]] = []

    def post_receive(self, peer: Incarnation, receive: Receive) -> TransferToken:
        token = TransferToken()
        copied = super().post_receive(peer, receive)

        def end(done: TransferToken) -> None:
            token.kv_bytes, token.transfer_s = done.kv_bytes, done.transfer_s
            token.complete(done.error())

        if self.is_holding:
            self.held.append(lambda: copied.on_done(end))
        else:
            copied.on_done(end)
        return token

    def let_go(self) -> None:
        held, self.held = self.held, []
        for end in held:
            end()


class HeldSends(ShmEngine):
    """As if a send were posted for each pull, each running until `let_go`."""

    is_holding = False
    held: TransferToken  # of the last send

    def post_send(self, peer: Incarnation, send: Send) -> TransferToken:
        if not self.is_holding:
            return super().post_send(peer, send)
        self.held = TransferToken()
        return self.held
