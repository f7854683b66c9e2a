"""What a RecvBuffer keeps of one hand-over, and what an event brings along for it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from neuron_di.errors import NeuronDiError
from neuron_di.transfer.landing import Ask, Room
from neuron_di.transfer.transfer_engine import Receive, TransferToken
from neuron_di.types import BlockId, RequestId
from neuron_di.wire import KvForm, Ready
from neuron_di.wire.handoff import ReceiverState

Key = tuple[RequestId, int]
# Called at most once per request, between its Ready and its arrival: it will not arrive.
OnFail = Callable[[Key, NeuronDiError], None]


class Arrival(TransferToken):
    """What became of a pull: beside its outcome, which engine brought the KV, why, and how."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = ""
        self.engine_reason = ""  # as the lane has it
        self.form: KvForm = "direct"


@dataclass(slots=True)
class Entry:
    """Where a hand-over stands."""

    promise: asyncio.Future[Ready]
    on_fail: OnFail
    state: ReceiverState = ReceiverState.UNKNOWN
    ready: Ready | None = None
    block_ids: Sequence[BlockId] = ()  # all of the request's that hold its KV
    streams: bool = False  # its layers may come while the prefill computes
    is_streamed: bool = False  # they all have, into its room
    num_held: int = 0  # blocks of Ready that are here already
    ask: Ask | None = None  # while it waits for room to land
    room: Room | None = None
    receive: Receive | None = None
    arrived: Arrival = field(default_factory=Arrival)  # what the engine polls
    late: asyncio.TimerHandle | None = None
    num_bytes: int = 0  # that are in flight for it


@dataclass(frozen=True, slots=True)
class Cause:
    """What an event brings along for the actions that it sets off."""

    error: NeuronDiError | None = None
    reason: str = ""
    ready: Ready | None = None
