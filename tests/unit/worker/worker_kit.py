"""Whole workers in one process: real model, real links over loopback, real shared memory."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from neuron_di.clock import now_s
from neuron_di.config import EngineOptions, WorkerOptions
from neuron_di.types import RequestId, Role
from neuron_di.wire import DecodeLeg, LegEvent, PrefillLeg, SamplingParams, Token
from neuron_di.worker import Worker, load_model

WAIT_S = 30.0
PROMPT = list(range(100, 140))


def make_worker(folder: Path, role: Role, **fields: object) -> Worker:
    engine = EngineOptions(
        block_size=4, num_blocks=256, threads=1, chunk_tokens=16, prefill_batch=4, decode_batch=4
    )
    options = WorkerOptions(
        model=str(folder), role=role, worker_id=f"{role}-0", engine=engine, **fields
    )
    worker = Worker(options, load_model(str(folder), None, role, engine))
    worker.set_state("ready")
    return worker


def prefill_leg(name: str, prompt: object = PROMPT, **sampling: object) -> PrefillLeg:
    return PrefillLeg(
        request_id=RequestId(name),
        attempt=0,
        endpoint="completions",
        prompt=msgspec.Raw(json.dumps(prompt).encode()),
        sampling=make_sampling(**sampling),
    )


def decode_leg(name: str, prefill: Worker, **sampling: object) -> DecodeLeg:
    return DecodeLeg(
        request_id=RequestId(name),
        attempt=0,
        sampling=make_sampling(**sampling),
        prefill=prefill.record().peer_address(),
    )


def make_sampling(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **fields})


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
        status.num_blocks_free == status.num_blocks
        and status.num_waiting == status.num_running == status.num_transferring == 0
        and len(worker.legs) == 0
        and (buffer is None or not any(e.ready for e in buffer.lookup_dict.values()))
        and (worker.decode is None or worker.decode._incoming == {})
    )


async def collect(events: object) -> list[LegEvent]:
    return [event async for event in events]


def token_ids(events: list[LegEvent]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, Token)]
