"""What a SendBuffer keeps of one hand-over, and what an event brings along for it."""

from dataclasses import dataclass

from neuron_di.clock import Deadline
from neuron_di.errors import NeuronDiError
from neuron_di.transfer.send_peers import Identity
from neuron_di.transfer.transfer_engine import TransferToken
from neuron_di.types import Incarnation
from neuron_di.wire import Done, Ready
from neuron_di.wire.handoff import SenderState


@dataclass(slots=True)
class Entry:
    """Where a hand-over stands, who may read its blocks, and until when they are kept."""

    state: SenderState = SenderState.UNKNOWN
    reader: Identity | None = None
    reader_incarnation: Incarnation | None = None
    lease: Deadline | None = None  # None: the prefill is ours and runs under its own deadline
    lease_max: Deadline | None = None
    ready: Ready | None = None
    send: TransferToken | None = None  # of a two-sided engine; done at once in a one-sided one
    quarantine: TransferToken | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """What an event brings along for the actions that it sets off."""

    peer: Identity | None = None
    incarnation: Incarnation | None = None
    reason: str = ""
    error: NeuronDiError | None = None
    done: Done | None = None
