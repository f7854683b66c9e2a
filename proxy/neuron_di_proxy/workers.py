"""What the proxy needs of workers: to open legs there, and to ask them how they are.

`worker_client.WorkerClient` does it over TCP. Everything that decides (launch, recovery,
health, self test) knows these two protocols only, so a simulation can stand in for the network.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import msgspec

from neuron_di.registry.vanished import Process as Process
from neuron_di.registry.vanished import process_of as process_of
from neuron_di.types import WorkerId
from neuron_di.wire import Finished, Parked, Released, Token, WorkerRecord, WorkerStatus
from neuron_di.wire.leg_link import LegKind as LegKind
from neuron_di_proxy.token_lane import Lane

STATUS_TIMEOUT_S = 1.0

Progress = Token | Parked | Released | Finished


# What a leg says: an event, or the error that ended it.
Said = Progress | Exception
Hear = Callable[[Said], None]


class Leg(Protocol):
    """One leg at one worker."""

    worker_id: WorkerId

    def open(self, hear: Hear) -> None:
        """Send the leg. Called once, on the event loop; returns at once and never raises.

        `hear` gets each event the moment it arrives, in order, on the event loop, never from
        within `open`. The last thing it gets is `Finished`, `Released` or an exception:
        LegFailed when the worker says that the leg failed, CapacityError when it refuses without
        words, PeerGone when it cannot be reached or hangs up, PeerTimeout when it is silent for
        too long, RemoteProtocolError when it cannot be understood, TooLarge when the leg was not
        sent because no worker takes so much. `hear` does not raise.
        """
        ...

    def relay(self, lane: Lane) -> None:
        """Give the leg's plain tokens to `lane` from now on. What it takes is not heard.

        Called between `open` and `close`. A lane that is closed takes nothing.
        """
        ...

    def close(self) -> None:
        """Cancel the leg if it is still open: nothing is heard of it from now on.

        At once; may be called twice, or before `open`; never raises.
        """
        ...


class Workers(Protocol):
    """All workers, by their records."""

    def open_leg(self, record: WorkerRecord, kind: LegKind, leg: msgspec.Struct) -> Leg:
        """Prepare a leg. Nothing is sent before its `open`."""
        ...

    async def status(
        self, record: WorkerRecord, timeout_s: float = STATUS_TIMEOUT_S
    ) -> WorkerStatus:
        """Ask a worker how it is. Raises a PeerError when it does not say in time."""
        ...


# A word of a process, by its record. None: its link has ended.
OnWord = Callable[[WorkerRecord, WorkerStatus | None], None]


@runtime_checkable
class TalkingWorkers(Protocol):
    """Workers that say how they are without being asked."""

    def on_word(self, hear: OnWord) -> None:
        """Have each word told to `hear`, on the event loop."""

    def forget(self, record: WorkerRecord) -> None:
        """Nobody watches this process any more: end its link, unless legs are open there."""


def place_of(record: WorkerRecord) -> tuple[str, int]:
    """Where that process listens."""
    return record.host, record.api_port
