"""One hand-over as a whole: both ends, what is under way between them, and who owns which blocks.

`moves` lists what may happen next. What an end does about it comes from the tables; what its
actions mean for legs and blocks stands here, and an action that makes no sense is a Violation.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from neuron_di.wire import handoff
from neuron_di.wire.handoff import (
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
    ReceiverTable,
    SenderAction,
    SenderEvent,
    SenderState,
    SenderTable,
)

UNDER_WAY_MAX = 3  # messages, before a heartbeat or a duplicate adds one more

_S, _SE, _SA = SenderState, SenderEvent, SenderAction
_R, _RE, _RA = ReceiverState, ReceiverEvent, ReceiverAction
_SENDER_GONE = (_S.UNKNOWN, _S.OVER)
_RECEIVER_GONE = (_R.UNKNOWN, _R.OVER)
_SAYS = {_SA.SAY_NOT_YET: _RE.NOT_YET, _SA.SAY_NEVER: _RE.NEVER, _SA.SAY_READY: _RE.READY}
_SENDS = {
    _RA.SEND_LOOKUP: _SE.LOOKUP,
    _RA.SEND_HOLD: _SE.HOLD,
    _RA.SEND_PULL: _SE.PULL,
    _RA.SEND_DONE: _SE.DONE,
    _RA.SEND_ABORT: _SE.ABORT,
}
_MAY_SAY = {
    _SA.SAY_NOT_YET: (_S.ASKED, _S.PREFILLING),
    _SA.SAY_READY: (_S.PARKED,),
    _SA.SAY_NEVER: (_S.UNKNOWN, _S.RECALLED, _S.OVER),
}

Leg = Literal["none", "running", "over", "delivered"]


class Tables(NamedTuple):
    """What is checked. `is_verified` False leaves the digest check out."""

    sender: SenderTable = handoff.SENDER
    receiver: ReceiverTable = handoff.RECEIVER
    is_verified: bool = True


class Violation(Exception):
    """The tables allow what must not be. `path` says what had happened before, oldest first."""

    def __init__(self, what: str, path: list[str] | None = None, *, label: str = "") -> None:
        super().__init__(f"{what}: {', '.join(path or [label])}")
        self.what = what
        self.path = path or []
        self.label = label


class World(NamedTuple):
    """Everything that decides what may happen next."""

    faults: int  # left
    # The prefill worker.
    sender: SenderState = SenderState.UNKNOWN
    has_reader: bool = False
    has_lease: bool = False
    prefill_leg: Leg = "none"
    source: Literal["none", "running", "parked", "quarantined", "free", "timed out"] = "none"
    is_sender_alive: bool = True
    is_peer_known: bool = True  # the prefill worker still listens to this decode worker
    # The decode worker.
    receiver: ReceiverState = ReceiverState.UNKNOWN
    decode_leg: Leg = "none"
    has_promise: bool = False
    copy: Literal["none", "clean", "dirty"] = "none"
    is_link_up: bool = True  # decode's end of it
    # Under way, oldest first.
    up: tuple[SenderEvent, ...] = ()
    down: tuple[ReceiverEvent, ...] = ()

    def are_blocks_home(self) -> bool:
        return self.source in ("none", "free", "timed out") and self.copy == "none"

    def is_home(self) -> bool:
        """Both ends are through with it."""
        are_legs_over = self.prefill_leg != "running" and self.decode_leg != "running"
        is_over = self.sender in _SENDER_GONE and self.receiver in _RECEIVER_GONE
        return is_over and are_legs_over and self.are_blocks_home()

    def is_quiet(self) -> bool:
        """Both legs are over and nothing is under way: only time can still change something."""
        are_legs_over = self.prefill_leg != "running" and self.decode_leg != "running"
        return are_legs_over and not self.up and not self.down and self.copy == "none"

    def is_out_of_step(self) -> bool:
        """Nothing is under way, and decode waits for what will not come by itself."""
        awaited = {
            _R.ASKING: (_S.ASKED, _S.PREFILLING),
            _R.HELD: (_S.PARKED,),
            _R.PULLING: (_S.PULLING,),
        }.get(self.receiver)
        return awaited is not None and not (self.up or self.down or self.sender in awaited)


class Move(NamedTuple):
    kind: str  # "deliver", "noticed" (a loss), "fault", or an event's name
    label: str
    world: World
    blamed: str | None = None  # the event that was refused as the peer's protocol error


def moves(world: World, tables: Tables) -> Iterator[Move]:
    """Everything that may happen next. Raises Violation where the tables go wrong."""
    yield from _messages(world, tables)
    for sender_event in _sender_events(world):
        yield _at_sender(world, tables, sender_event, sender_event.value)
    for receiver_event in _receiver_events(world, tables):
        yield _at_receiver(world, tables, receiver_event, receiver_event.value)
    yield from _losses(world, tables)
    if world.faults:
        paid = world._replace(faults=world.faults - 1)
        for label, faulty in _faults(paid):
            yield Move("fault", label, faulty)


def _messages(world: World, tables: Tables) -> Iterator[Move]:
    if world.up:
        event, left = world.up[0], world._replace(up=world.up[1:])
        has_entry = world.sender not in _SENDER_GONE
        # Nobody but the named reader gets through to the table; that it was one is no sin.
        is_ignored = has_entry and not world.has_reader and event is not _SE.LOOKUP
        if not world.is_sender_alive or not world.is_peer_known or is_ignored:
            yield Move("deliver", f"{event.value} is ignored", left)
        else:
            yield _at_sender(left, tables, event, f"{event.value} arrives", is_message=True)
    if world.down:
        answer, left = world.down[0], world._replace(down=world.down[1:])
        yield _at_receiver(left, tables, answer, f"{answer.value} arrives", is_message=True)


def _sender_events(world: World) -> Iterator[SenderEvent]:
    if not world.is_sender_alive:
        return
    # An attempt comes once; that it comes twice is tried where it is known to have been here.
    if world.prefill_leg == "none" or world.sender not in (_S.UNKNOWN, _S.ASKED):
        yield _SE.EXPECT
    yield _SE.DROP
    if world.source == "running":
        yield _SE.PARK
    if world.has_lease:
        yield _SE.LEASE_ENDED


def _receiver_events(world: World, tables: Tables) -> Iterator[ReceiverEvent]:
    if world.decode_leg == "none":
        yield _RE.ASK
    yield _RE.CANCEL
    if world.receiver is _R.HELD:  # RecvBuffer.pull looks first: the engine may be late
        yield _RE.ADMITTED
    has_room = len(world.up) + len(world.down) < UNDER_WAY_MAX
    if world.receiver not in _RECEIVER_GONE and world.is_link_up and has_room:
        yield _RE.TICK
    if world.copy == "clean" or (world.copy == "dirty" and not tables.is_verified):
        yield _RE.ARRIVED
    if world.copy != "none":
        yield _RE.BROKE


def _losses(world: World, tables: Tables) -> Iterator[Move]:
    """Each end notices that the other is lost. A fault, unless it follows from an earlier one."""
    if world.has_reader and world.is_sender_alive and world.is_peer_known:
        is_due = not world.is_link_up
        if is_due or world.faults:
            left = world._replace(is_peer_known=False, faults=world.faults - (not is_due))
            move = _at_sender(left, tables, _SE.READER_LOST, "ReaderLost")
            yield move._replace(kind="noticed" if is_due else "fault")
    if world.receiver not in _RECEIVER_GONE and world.is_link_up:
        is_due = not world.is_peer_known or not world.is_sender_alive
        if is_due or world.faults:
            left = world._replace(is_link_up=False, down=(), faults=world.faults - (not is_due))
            move = _at_receiver(left, tables, _RE.LINK_LOST, "LinkLost")
            yield move._replace(kind="noticed" if is_due else "fault")


def _faults(world: World) -> Iterator[tuple[str, World]]:
    has_room = len(world.up) + len(world.down) < UNDER_WAY_MAX
    if up := world.up:
        yield f"{up[0].value} is lost", world._replace(up=up[1:])
        if has_room:
            yield f"{up[0].value} is doubled", world._replace(up=(*up, up[0]))
    if len(up) > 1:
        yield f"{up[1].value} overtakes", world._replace(up=(up[1], up[0], *up[2:]))
    if down := world.down:
        yield f"{down[0].value} is lost", world._replace(down=down[1:])
        if has_room:
            yield f"{down[0].value} is doubled", world._replace(down=(*down, down[0]))
    if len(down) > 1:
        yield f"{down[1].value} overtakes", world._replace(down=(down[1], down[0], *down[2:]))
    if world.sender is _S.OVER:
        yield "prefill forgets it", world._replace(sender=_S.UNKNOWN)
    if world.is_sender_alive:  # its memory stays mapped by whoever reads it
        yield (
            "prefill dies",
            world._replace(
                sender=_S.UNKNOWN,
                has_reader=False,
                has_lease=False,
                prefill_leg="over",
                source="none",
                is_sender_alive=False,
            ),
        )
    if world.receiver not in _RECEIVER_GONE:
        yield (
            "decode dies",
            world._replace(
                receiver=_R.OVER,
                decode_leg="over",
                has_promise=False,
                copy="none",
                is_link_up=False,
                down=(),
            ),
        )


def _at_sender(
    world: World, tables: Tables, event: SenderEvent, label: str, *, is_message: bool = False
) -> Move:
    kind = "deliver" if is_message else event.value
    step = tables.sender.get((world.sender, event))
    if step is None:
        if is_message:
            return Move(kind, label, world, f"{event.value} while {world.sender.value}")
        raise Violation(f"{event.value} while {world.sender.value} is a bug of ours", label=label)
    before = world.sender
    world = world._replace(sender=step.state)
    if event is _SE.EXPECT and _SA.REFUSE not in step.actions:
        _must(world.prefill_leg == "none", "an attempt runs twice", label)
        world = world._replace(prefill_leg="running", source="running")
    elif event is _SE.PARK:
        world = world._replace(source="parked")
    elif event is _SE.LEASE_ENDED:
        world = world._replace(has_lease=False)
    for action in step.actions:
        world = _do_sender(world, action, event, before, label)
    if event is _SE.DROP:
        if world.prefill_leg == "running" and world.source == "running":
            world = world._replace(source="free")  # the engine's own
        if world.prefill_leg in ("none", "running"):
            _must(world.source != "parked", "a leg ended and left its blocks parked", label)
            world = world._replace(prefill_leg="over")
    if world.sender in _SENDER_GONE:
        world = world._replace(has_reader=False, has_lease=False)
    _check_sender(world, label)
    return Move(kind, label, _spoil(world, label))


def _do_sender(
    world: World, action: SenderAction, event: SenderEvent, before: SenderState, label: str
) -> World:
    match action:
        case _SA.NAME_READER:
            return world._replace(has_reader=True)
        case _SA.FORGET_READER:
            return world._replace(has_reader=False)
        case _SA.START_LEASE:
            return world._replace(has_lease=True)
        case _SA.RENEW_LEASE:
            _must(world.has_lease, "no lease to renew", label)
        case _SA.STOP_LEASE:
            return world._replace(has_lease=False)
        case _SA.SAY_NOT_YET | _SA.SAY_NEVER | _SA.SAY_READY:
            _must(world.sender in _MAY_SAY[action], f"a lie: {action.value}", label)
            is_heard = world.is_link_up and (world.has_reader or event in _SENDS.values())
            return world._replace(down=(*world.down, _SAYS[action])) if is_heard else world
        case _SA.REFUSE:
            _must(event is _SE.EXPECT, "only a leg is refused", label)
            if world.prefill_leg == "none":
                return world._replace(prefill_leg="over")
        case _SA.POST_SEND:
            _must(world.source == "parked", "a send of what is not parked", label)
        case _SA.RELEASE | _SA.GIVE_UP | _SA.QUARANTINE:
            _must(world.source == "parked", f"nothing to {action.value}", label)
            _must(world.prefill_leg == "running", "the prefill leg ended twice", label)
            is_handed_over = world.decode_leg == "delivered" or not world.is_link_up
            _must(action is not _SA.RELEASE or is_handed_over, "released before it arrived", label)
            is_read = action is _SA.QUARANTINE and world.has_reader
            return world._replace(prefill_leg="over", source="quarantined" if is_read else "free")
        case _SA.LET_GO:
            if world.source == "quarantined":
                is_late = before is _S.RECALLED and event is _SE.LEASE_ENDED
                return world._replace(source="timed out" if is_late else "free")
            _must(not world.has_reader, "let go twice", label)
    return world


def _check_sender(world: World, label: str) -> None:
    state, source = world.sender, world.source
    expected: dict[SenderState, Iterable[str]] = {
        _S.PREFILLING: ("running",),
        _S.PARKED: ("parked",),
        _S.PULLING: ("parked",),
        _S.RECALLED: ("quarantined", "free"),
    }
    allowed = expected.get(state, ("none", "free", "timed out"))
    _must(source in allowed, f"blocks are {source} while {state.value}", label)
    is_bounded = state in (*_SENDER_GONE, _S.PREFILLING) or world.has_lease
    _must(is_bounded, f"{state.value} has no deadline", label)


def _at_receiver(
    world: World, tables: Tables, event: ReceiverEvent, label: str, *, is_message: bool = False
) -> Move:
    kind = "deliver" if is_message else event.value
    step = tables.receiver.get((world.receiver, event))
    if step is None:
        if is_message:
            return Move(kind, label, world, f"{event.value} while {world.receiver.value}")
        raise Violation(f"{event.value} while {world.receiver.value} is a bug of ours", label=label)
    was_clean = world.copy == "clean"
    world = world._replace(receiver=step.state)
    if event is _RE.ASK:
        world = world._replace(decode_leg="running")
    elif event in (_RE.ARRIVED, _RE.BROKE):
        world = world._replace(copy="none")
    for action in step.actions:
        world = _do_receiver(world, action, event, label, was_clean=was_clean)
    if event is _RE.CANCEL and world.decode_leg in ("none", "running"):
        world = world._replace(decode_leg="over")
    if world.receiver in _RECEIVER_GONE:
        world = world._replace(has_promise=False)
    _check_receiver(world, label)
    return Move(kind, label, _spoil(world, label))


def _do_receiver(
    world: World, action: ReceiverAction, event: ReceiverEvent, label: str, *, was_clean: bool
) -> World:
    match action:
        case _RA.POST_RECEIVE:
            _must(world.has_promise and world.copy == "none", "copied without a promise", label)
            return world._replace(copy="clean")
        case _RA.PROMISE:
            _must(event is _RE.READY, "a promise without Ready", label)
            return world._replace(has_promise=True)
        case _RA.DELIVER:
            _must(event is _RE.ARRIVED, "delivered what did not arrive", label)
            _must(was_clean, "delivered somebody else's KV", label)
            _must(world.decode_leg == "running", "delivered to a leg that is over", label)
            return world._replace(decode_leg="delivered")
        case _RA.FAIL:
            _must(world.decode_leg == "running", "the decode leg ended twice", label)
            return world._replace(decode_leg="over")
        case _RA.COUNT_STALE:
            return world
    if action is _RA.SEND_ABORT:
        is_done = world.copy == "none" and world.receiver is _R.OVER
        _must(is_done, "Abort, but the blocks are still read", label)
    elif action is _RA.SEND_DONE:
        _must(event is _RE.ARRIVED, "Done, but nothing arrived", label)
    is_carried = world.is_link_up and world.is_sender_alive
    return world._replace(up=(*world.up, _SENDS[action])) if is_carried else world


def _check_receiver(world: World, label: str) -> None:
    state, leg = world.receiver, world.decode_leg
    is_copying = state in (_R.PULLING, _R.DRAINING)
    _must((world.copy != "none") == is_copying, f"{state.value} with copy {world.copy}", label)
    is_waited_for = state in (_R.ASKING, _R.HELD, _R.PULLING)
    _must((leg == "running") == is_waited_for, f"{state.value} with its leg {leg}", label)


def _spoil(world: World, label: str) -> World:
    """A copy of blocks that are free is spoilt. Only a lease may do that to a reader."""
    if world.copy != "clean" or world.source not in ("free", "timed out"):
        return world
    _must(world.source == "timed out", "blocks are free while they are read", label)
    return world._replace(copy="dirty")


def _must(is_so: bool, what: str, label: str) -> None:
    if not is_so:
        raise Violation(what, label=label)
