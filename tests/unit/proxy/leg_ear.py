"""One leg at a scripted worker, and everything that is heard of it."""

import asyncio

from scripted_worker import ScriptedWorker, SeenLeg, make_record

from neuron_di.types import RequestId
from neuron_di.wire import DecodeLeg, Finished, Released, SamplingParams
from neuron_di_proxy.worker_client import LinkedLeg, WorkerClient

MESSAGE = DecodeLeg(
    request_id=RequestId("r1"),
    attempt=0,
    sampling=SamplingParams(),
    prefill=make_record("p1", "prefill").peer_address(),
    timeout_s=60.0,
)


class Ear:
    """Hears one leg. Fails whoever tells it more after the last word."""

    def __init__(self) -> None:
        self.said = asyncio.Queue()
        self.is_over = False

    def __call__(self, said) -> None:
        assert not self.is_over, "nothing follows the last word"
        self.is_over = isinstance(said, Exception | Finished | Released)
        self.said.put_nowait(said)

    async def next(self):
        async with asyncio.timeout(10):
            return await self.said.get()


async def open_leg(client: WorkerClient, worker: ScriptedWorker) -> tuple[LinkedLeg, Ear, SeenLeg]:
    """An open leg, its ear, and the same leg as the worker sees it."""
    ear = Ear()
    leg = client.open_leg(worker.record, "decode", MESSAGE)
    leg.open(ear)
    return leg, ear, await worker.next_leg()


async def closed(seen: SeenLeg) -> None:
    """Wait until the worker knows that the proxy ended this leg."""
    async with asyncio.timeout(10):
        await seen.closed.wait()
