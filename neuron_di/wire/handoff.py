"""The life of a hand-over as tables: (state, event) -> (next state, actions). No I/O, no clock.

Three parties keep one state per (request id, attempt) and move it by these tables only:

    SENDER      the prefill worker's SendBuffer: whose KV is here, who may read it, until when
    RECEIVER    the decode worker's RecvBuffer: asked, promised, being copied, here
    LAUNCH      the proxy's two legs: which tokens may go to the client, and when it is over

What is not in a table is forbidden. An event that a peer caused is then its protocol error,
which harms nobody but that peer; any other is a bug of ours. "Not yet" (it will come), "never"
(it will not) and "unknown" (nothing was heard of it) are different states with different
answers. docs/handoff.md draws the tables; `make handoff-diagram` makes it from here.
"""

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import NamedTuple, NoReturn

from neuron_di.errors import LocalProtocolError, RemoteProtocolError


class SenderState(Enum):
    UNKNOWN = "unknown"  # nothing was heard of it
    ASKED = "asked"  # a decode worker asked, the prefill leg has not come yet
    PREFILLING = "prefilling"  # the leg is here, the KV is not complete
    PARKED = "parked"  # complete, under a KvLease
    PULLING = "pulling"  # the decode worker may be reading, or a posted send runs
    RECALLED = "recalled"  # given up while it may be read: its blocks are quarantined
    OVER = "over"  # remembered for a while, so that the answer is "never", not "not yet"


class SenderEvent(Enum):
    EXPECT = "Expect"  # a prefill leg was accepted
    PARK = "Park"  # its KV is complete
    DROP = "Drop"  # the leg ended here: failed, cancelled, or complete with its first token
    LEASE_ENDED = "LeaseEnded"
    READER_LOST = "ReaderLost"  # the decode worker that asked is silent, or was replaced
    LOOKUP = "LookupAll"
    HOLD = "Hold"
    PULL = "Pull"
    DONE = "Done"
    ABORT = "Abort"


class SenderAction(Enum):
    START_LEASE = "start lease"
    RENEW_LEASE = "renew lease"
    STOP_LEASE = "stop lease"  # the prefill is ours, under its own deadline
    NAME_READER = "name reader"
    FORGET_READER = "forget reader"
    SAY_NOT_YET = "say NotYet"
    SAY_NEVER = "say Never"
    SAY_READY = "say Ready"
    POST_SEND = "post send"
    RELEASE = "release"  # handed over: the blocks are free, the leg says Released
    GIVE_UP = "give up"  # the blocks are free, the leg fails
    QUARANTINE = "quarantine"  # slot free, leg failed; the blocks wait for the reader, if any
    LET_GO = "let go"  # quarantined blocks are free
    REFUSE = "refuse"  # the leg: its attempt is here already, or over
    COUNT_STALE = "count stale"  # too late, or twice: no effect but a counter


class ReceiverState(Enum):
    UNKNOWN = "unknown"  # nobody here asked for it
    ASKING = "asking"  # waiting for Ready
    HELD = "held"  # promised; a slot is not free yet, Hold keeps the lease
    PULLING = "pulling"  # our blocks are being written
    DRAINING = "draining"  # nobody wants it any more, but a copy still writes to our blocks
    OVER = "over"  # it is here and delivered, or will never be


class ReceiverEvent(Enum):
    ASK = "Ask"  # a decode leg was accepted
    ADMITTED = "Admitted"  # a slot and blocks are free
    ARRIVED = "Arrived"  # copied, visible, verified
    BROKE = "Broke"  # the copy or its verification failed
    CANCEL = "Cancel"  # the leg ended
    TICK = "Tick"  # the heartbeat
    LINK_LOST = "LinkLost"
    NOT_YET = "NotYet"
    NEVER = "Never"
    READY = "Ready"


class ReceiverAction(Enum):
    SEND_LOOKUP = "send LookupAll"
    SEND_HOLD = "send Hold"
    SEND_PULL = "send Pull"
    SEND_DONE = "send Done"
    SEND_ABORT = "send Abort"
    POST_RECEIVE = "post receive"
    PROMISE = "promise"  # give Ready to whoever waits for it
    DELIVER = "deliver"  # tell the engine that the KV is here
    FAIL = "fail"  # tell the leg why not
    COUNT_STALE = "count stale"


class LaunchState(StrEnum):  # hashed for each event of each request, as its events are
    LAUNCHED = "launched"  # both legs run, no token has come
    STARTED = "started"  # prefill's token is with the client
    PARKED = "parked"  # the KV waits for decode
    DECODING = "decoding"  # decode's tokens are with the client
    OVER = "over"  # complete, or failed: this attempt says nothing more


class LaunchEvent(StrEnum):
    PREFILL_TOKEN = "prefill Token"
    PREFILL_PARKED = "prefill Parked"
    PREFILL_RELEASED = "prefill Released"
    PREFILL_FINISHED = "prefill Finished"
    PREFILL_FAILED = "prefill Failed"
    PREFILL_DENIED = "prefill Denied"  # failed because decode gave up, or was not heard of
    DECODE_TOKEN = "decode Token"
    DECODE_FINISHED = "decode Finished"
    DECODE_FAILED = "decode Failed"
    DECODE_DENIED = "decode Denied"  # failed because prefill said "never"
    OVERDUE = "Overdue"  # what would explain a "prefill Denied" that was held back does not come


class LaunchAction(Enum):
    EMIT = "emit"
    FINISH = "finish"
    FAIL = "fail"  # this attempt; the request may get another
    KEEP_RECEIPT = "keep receipt"
    HOLD_BACK = "hold back"  # look again after the next event of the other leg


class SenderStep(NamedTuple):
    state: SenderState
    actions: tuple[SenderAction, ...]


class ReceiverStep(NamedTuple):
    state: ReceiverState
    actions: tuple[ReceiverAction, ...]


class LaunchStep(NamedTuple):
    state: LaunchState
    actions: tuple[LaunchAction, ...]


SenderTable = Mapping[tuple[SenderState, SenderEvent], SenderStep]
ReceiverTable = Mapping[tuple[ReceiverState, ReceiverEvent], ReceiverStep]
LaunchTable = Mapping[tuple[LaunchState, LaunchEvent], LaunchStep]


def _sender_table() -> SenderTable:
    s, e, a = SenderState, SenderEvent, SenderAction
    rows = {
        (s.UNKNOWN, e.EXPECT): (s.PREFILLING, ()),
        (s.UNKNOWN, e.LOOKUP): (s.ASKED, (a.NAME_READER, a.START_LEASE, a.SAY_NOT_YET)),
        (s.ASKED, e.LOOKUP): (s.ASKED, (a.RENEW_LEASE, a.SAY_NOT_YET)),
        (s.ASKED, e.EXPECT): (s.PREFILLING, (a.STOP_LEASE,)),
        (s.ASKED, e.ABORT): (s.OVER, ()),
        (s.ASKED, e.READER_LOST): (s.OVER, ()),
        (s.ASKED, e.LEASE_ENDED): (s.OVER, (a.SAY_NEVER,)),
        (s.ASKED, e.DROP): (s.OVER, (a.SAY_NEVER,)),
        (s.PREFILLING, e.LOOKUP): (s.PREFILLING, (a.NAME_READER, a.SAY_NOT_YET)),
        (s.PREFILLING, e.PARK): (s.PARKED, (a.START_LEASE, a.SAY_READY)),
        (s.PREFILLING, e.ABORT): (s.PREFILLING, (a.FORGET_READER,)),
        (s.PREFILLING, e.READER_LOST): (s.PREFILLING, (a.FORGET_READER,)),
        (s.PREFILLING, e.DROP): (s.OVER, (a.SAY_NEVER,)),
        (s.PARKED, e.LOOKUP): (s.PARKED, (a.NAME_READER, a.RENEW_LEASE, a.SAY_READY)),
        (s.PARKED, e.HOLD): (s.PARKED, (a.RENEW_LEASE,)),
        (s.PARKED, e.PULL): (s.PULLING, (a.RENEW_LEASE, a.POST_SEND)),
        # A Pull that got lost: a one-sided engine does not need it.
        (s.PARKED, e.DONE): (s.OVER, (a.RELEASE,)),
        (s.PARKED, e.ABORT): (s.OVER, (a.GIVE_UP,)),
        (s.PULLING, e.LOOKUP): (s.PULLING, (a.RENEW_LEASE,)),
        (s.PULLING, e.HOLD): (s.PULLING, (a.RENEW_LEASE,)),
        (s.PULLING, e.PULL): (s.PULLING, (a.COUNT_STALE,)),
        (s.PULLING, e.DONE): (s.OVER, (a.RELEASE,)),
        (s.PULLING, e.ABORT): (s.OVER, (a.GIVE_UP,)),
        (s.RECALLED, e.LOOKUP): (s.RECALLED, (a.SAY_NEVER,)),
        (s.RECALLED, e.HOLD): (s.RECALLED, (a.SAY_NEVER,)),
        (s.RECALLED, e.PULL): (s.RECALLED, (a.SAY_NEVER,)),
        (s.RECALLED, e.DROP): (s.RECALLED, ()),
        (s.RECALLED, e.DONE): (s.OVER, (a.LET_GO,)),
        (s.RECALLED, e.ABORT): (s.OVER, (a.LET_GO,)),
        (s.RECALLED, e.READER_LOST): (s.RECALLED, ()),  # silent, but perhaps it still reads
        # A reader that is late beyond this is caught by generations and digests.
        (s.RECALLED, e.LEASE_ENDED): (s.OVER, (a.LET_GO,)),
    }
    # Whoever was told "ready" may be reading: its Pull is perhaps on the way.
    for state in (s.PARKED, s.PULLING):
        for event in (e.LEASE_ENDED, e.DROP, e.READER_LOST):
            rows[state, event] = (s.RECALLED, (a.SAY_NEVER, a.START_LEASE, a.QUARANTINE))
    for state in (s.UNKNOWN, s.OVER):
        for event in (e.HOLD, e.PULL):  # it waits for what is not here: tell it so
            rows[state, event] = (state, (a.COUNT_STALE, a.SAY_NEVER))
        for event in (e.DONE, e.ABORT):
            rows[state, event] = (state, (a.COUNT_STALE,))
        rows[state, e.DROP] = (state, ())
    rows[s.OVER, e.LOOKUP] = (s.OVER, (a.SAY_NEVER,))
    # An attempt is used once. Also: decode gave up before the leg came, so nobody would pull.
    for state in (s.PREFILLING, s.PARKED, s.PULLING, s.RECALLED, s.OVER):
        rows[state, e.EXPECT] = (state, (a.REFUSE,))
    return {key: SenderStep(*row) for key, row in rows.items()}


def _receiver_table() -> ReceiverTable:
    s, e, a = ReceiverState, ReceiverEvent, ReceiverAction
    rows = {
        (s.UNKNOWN, e.ASK): (s.ASKING, (a.SEND_LOOKUP,)),
        (s.ASKING, e.TICK): (s.ASKING, (a.SEND_LOOKUP,)),  # a Ready may have been lost
        (s.ASKING, e.NOT_YET): (s.ASKING, ()),
        (s.ASKING, e.READY): (s.HELD, (a.SEND_HOLD, a.PROMISE)),
        (s.ASKING, e.NEVER): (s.OVER, (a.FAIL,)),
        (s.ASKING, e.LINK_LOST): (s.OVER, (a.FAIL,)),
        (s.ASKING, e.CANCEL): (s.OVER, (a.SEND_ABORT,)),
        (s.HELD, e.TICK): (s.HELD, (a.SEND_HOLD,)),
        (s.HELD, e.NOT_YET): (s.HELD, (a.COUNT_STALE,)),
        (s.HELD, e.READY): (s.HELD, (a.COUNT_STALE,)),
        (s.HELD, e.ADMITTED): (s.PULLING, (a.SEND_PULL, a.POST_RECEIVE)),
        (s.HELD, e.NEVER): (s.OVER, (a.SEND_ABORT, a.FAIL)),  # nor will we read: let it go
        (s.HELD, e.LINK_LOST): (s.OVER, (a.FAIL,)),
        (s.HELD, e.CANCEL): (s.OVER, (a.SEND_ABORT,)),
        (s.PULLING, e.TICK): (s.PULLING, (a.SEND_HOLD,)),
        (s.PULLING, e.NOT_YET): (s.PULLING, (a.COUNT_STALE,)),
        (s.PULLING, e.READY): (s.PULLING, (a.COUNT_STALE,)),
        (s.PULLING, e.ARRIVED): (s.OVER, (a.SEND_DONE, a.DELIVER)),
        (s.PULLING, e.BROKE): (s.OVER, (a.SEND_ABORT, a.FAIL)),
        (s.PULLING, e.NEVER): (s.DRAINING, (a.FAIL,)),
        (s.PULLING, e.LINK_LOST): (s.DRAINING, (a.FAIL,)),
        (s.PULLING, e.CANCEL): (s.DRAINING, ()),
        # Only now may the prefill worker reuse its blocks: we do not read them any more.
        (s.DRAINING, e.ARRIVED): (s.OVER, (a.SEND_ABORT,)),
        (s.DRAINING, e.BROKE): (s.OVER, (a.SEND_ABORT,)),
    }
    for event in (e.TICK, e.NOT_YET, e.READY, e.NEVER, e.LINK_LOST, e.CANCEL):
        rows[s.DRAINING, event] = (s.DRAINING, ())
    for state in (s.UNKNOWN, s.OVER):
        for event in (e.NOT_YET, e.READY, e.NEVER):
            rows[state, event] = (state, (a.COUNT_STALE,))
        rows[state, e.CANCEL] = (state, ())
    return {key: ReceiverStep(*row) for key, row in rows.items()}


def _launch_table() -> LaunchTable:
    s, e, a = LaunchState, LaunchEvent, LaunchAction
    rows = {
        (s.LAUNCHED, e.PREFILL_TOKEN): (s.STARTED, (a.EMIT,)),
        (s.LAUNCHED, e.PREFILL_FINISHED): (s.OVER, (a.KEEP_RECEIPT, a.FINISH)),
        (s.STARTED, e.PREFILL_FINISHED): (s.OVER, (a.KEEP_RECEIPT, a.FINISH)),
        (s.STARTED, e.PREFILL_PARKED): (s.PARKED, ()),
        (s.PARKED, e.PREFILL_RELEASED): (s.PARKED, (a.KEEP_RECEIPT,)),
        (s.PARKED, e.DECODE_TOKEN): (s.DECODING, (a.EMIT,)),
        (s.DECODING, e.DECODE_TOKEN): (s.DECODING, (a.EMIT,)),
        (s.PARKED, e.DECODE_FINISHED): (s.OVER, (a.KEEP_RECEIPT, a.FINISH)),
        (s.DECODING, e.DECODE_FINISHED): (s.OVER, (a.KEEP_RECEIPT, a.FINISH)),
        # Decode has the KV: what becomes of prefill does not matter any more.
        (s.DECODING, e.PREFILL_RELEASED): (s.DECODING, (a.KEEP_RECEIPT,)),
        (s.DECODING, e.PREFILL_FAILED): (s.DECODING, ()),
        (s.DECODING, e.PREFILL_DENIED): (s.DECODING, ()),
    }
    for state in (s.LAUNCHED, s.STARTED):
        # Decode may be faster than prefill's words on another connection: they come first.
        rows[state, e.DECODE_TOKEN] = (state, (a.HOLD_BACK,))
        rows[state, e.DECODE_FINISHED] = (state, (a.HOLD_BACK,))
        # Prefill's own word says why there is no KV, or that none is needed.
        rows[state, e.DECODE_DENIED] = (state, (a.HOLD_BACK,))
    for state in (s.LAUNCHED, s.STARTED, s.PARKED):
        rows[state, e.PREFILL_FAILED] = (s.OVER, (a.FAIL,))
        # Decode's own word says why it gave up; prefill heard of that first.
        rows[state, e.PREFILL_DENIED] = (state, (a.HOLD_BACK,))
        rows[state, e.OVERDUE] = (s.OVER, (a.FAIL,))
    for state in (s.LAUNCHED, s.STARTED, s.PARKED, s.DECODING):
        rows[state, e.DECODE_FAILED] = (s.OVER, (a.FAIL,))
    for state in (s.PARKED, s.DECODING):
        rows[state, e.DECODE_DENIED] = (s.OVER, (a.FAIL,))
    return {key: LaunchStep(*row) for key, row in rows.items()}


SENDER = _sender_table()
RECEIVER = _receiver_table()
LAUNCH = _launch_table()

# What a worker may cause at its peer: if the table forbids it, the peer is at fault.
_FROM_PEER = frozenset(
    {SenderEvent.LOOKUP, SenderEvent.HOLD, SenderEvent.PULL, SenderEvent.DONE, SenderEvent.ABORT}
    | {ReceiverEvent.NOT_YET, ReceiverEvent.NEVER, ReceiverEvent.READY}
    | set(LaunchEvent) - {LaunchEvent.OVERDUE}
)


def sender_step(state: SenderState, event: SenderEvent) -> SenderStep:
    """RemoteProtocolError or LocalProtocolError, by who caused an event that may not be."""
    return SENDER.get((state, event)) or _forbid(state, event)


def receiver_step(state: ReceiverState, event: ReceiverEvent) -> ReceiverStep:
    """As `sender_step`."""
    return RECEIVER.get((state, event)) or _forbid(state, event)


def launch_step(state: LaunchState, event: LaunchEvent) -> LaunchStep:
    """As `sender_step`."""
    return LAUNCH.get((state, event)) or _forbid(state, event)


def _forbid(state: Enum, event: Enum) -> NoReturn:
    kind = RemoteProtocolError if event in _FROM_PEER else LocalProtocolError
    raise kind(f"{event.value} may not happen while {state.value}")
