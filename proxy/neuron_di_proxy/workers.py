"""What the proxy needs of workers: to open legs there, and to ask them how they are.

`worker_client.WorkerClient` does it over HTTP. Everything that decides (launch, recovery,
health, self test) knows these two protocols only, so a simulation can stand in for the network.
"""

from typing import Literal, NamedTuple, Protocol

import msgspec

from neuron_di.types import Incarnation, WorkerId
from neuron_di.wire import Finished, Parked, Released, Token, WorkerRecord, WorkerStatus

STATUS_TIMEOUT_S = 1.0

LegKind = Literal["prefill", "decode", "whole"]
Progress = Token | Parked | Released | Finished


class Process(NamedTuple):
    """One life of a worker. After a restart it is another process."""

    worker_id: WorkerId
    incarnation: Incarnation


class Leg(Protocol):
    """One leg at one worker. The first `next` opens it; `close` cancels it there."""

    worker_id: WorkerId

    async def next(self) -> Progress:
        """Wait for the leg's next event. Awaited by one task at a time.

        Raises LegFailed when the worker says that the leg failed, CapacityError when it refuses
        without words, PeerGone when it cannot be reached or hangs up, PeerTimeout when it is
        silent for too long, RemoteProtocolError when it cannot be understood. Once it raised,
        or returned `Finished` or `Released`, only `close` may follow.
        """
        ...

    def close(self) -> None:
        """Cancel the leg if it is still open. At once; may be called twice; never raises."""
        ...


class Workers(Protocol):
    """All workers, by their records."""

    def open_leg(self, record: WorkerRecord, kind: LegKind, leg: msgspec.Struct) -> Leg:
        """Prepare a leg. Nothing is sent before its first `next`."""
        ...

    async def status(
        self, record: WorkerRecord, timeout_s: float = STATUS_TIMEOUT_S
    ) -> WorkerStatus:
        """Ask a worker how it is. Raises a PeerError when it does not say in time."""
        ...


def process_of(record: WorkerRecord) -> Process:
    """The process that a record describes."""
    return Process(record.worker_id, record.incarnation)
