"""What a SendBuffer keeps of one hand-over, and what an event brings along for it."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from neuron_di.clock import Deadline
from neuron_di.errors import NeuronDiError
from neuron_di.transfer.send_peers import Identity, Peer
from neuron_di.transfer.transfer_engine import TransferToken
from neuron_di.types import RequestId
from neuron_di.wire import Done, Never, Pull, Ready
from neuron_di.wire.handoff import SenderState
from neuron_di.wire.signal import REASON_CHARS_MAX

Key = tuple[RequestId, int]


@dataclass(slots=True)
class Entry:
    """Where a hand-over stands, who may read its blocks, and until when they are kept."""

    state: SenderState = SenderState.UNKNOWN
    reader: Identity | None = None
    lease: Deadline | None = None  # None: the prefill is ours and runs under its own deadline
    lease_max: Deadline | None = None
    ready: Ready | None = None
    send: TransferToken | None = None  # of a two-sided engine; done at once in a one-sided one
    quarantine: TransferToken | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """What an event brings along for the actions that it sets off."""

    identity: Identity | None = None
    peer: Peer | None = None
    pull: Pull | None = None
    reason: str = ""
    error: NeuronDiError | None = None
    done: Done | None = None


def never(key: Key, reason: str) -> Never:
    return Never(request_id=key[0], attempt=key[1], reason=reason[:REASON_CHARS_MAX])


def unless_done(token: TransferToken | None) -> TransferToken | None:
    return None if token is None or token.is_done() else token


def gives_way(
    entries: Mapping[Key, Entry], asker: Identity, early_max: int
) -> Collection[Key] | None:
    """What makes room for one more look-up whose prefill leg has not come: nothing, or the first of
    the worker that has most of them. None: there is no room, for that is the asker."""
    if len(entries) < early_max:
        return ()  # few of any kind: no need to count
    early = {key: e.reader for key, e in entries.items() if e.state is SenderState.ASKED}
    if len(early) < early_max:
        return ()
    counts = Counter(early.values())
    most = max(counts.values())
    if counts[asker] == most:
        return None
    return (next(key for key, reader in early.items() if counts[reader] == most),)
