"""Walks through everything two honest workers can say to the proxy about one attempt.

The workers are models of their legs: what was said earlier on the same connection arrives
earlier, and nothing is known of the order between the two connections. Checked: no honest
worker is refused; tokens reach the client in order, each once; an answer is finished only when
it is complete, failed only when a worker failed; and the proxy never waits for nothing.
"""

from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

from neuron_di.testing.handoff_world import Violation
from neuron_di.wire import handoff
from neuron_di.wire.handoff import LaunchAction, LaunchEvent, LaunchState, LaunchTable

DECODE_TOKENS_MAX = 2

_E, _A, _L = LaunchEvent, LaunchAction, LaunchState
_TOKENS = (_E.PREFILL_TOKEN, _E.DECODE_TOKEN)
_NUM_EMITTED = {_L.LAUNCHED: 0, _L.STARTED: 1, _L.PARKED: 1, _L.DECODING: 2}  # 2: or more
_FROM_PREFILL = frozenset(event for event in LaunchEvent if event.name.startswith("PREFILL"))
_WITH_RECEIPT = (_E.PREFILL_RELEASED, _E.PREFILL_FINISHED, _E.DECODE_FINISHED)


class LaunchWorld(NamedTuple):
    """Both workers' legs, what they said and the proxy has not read, and the proxy."""

    prefill: Literal["new", "started", "parked", "finished", "failed", "denied", "released"] = "new"
    decode: Literal["asking", "has KV", "finished", "failed", "denied"] = "asking"
    num_decoded: int = 0
    from_prefill: tuple[LaunchEvent, ...] = ()
    from_decode: tuple[LaunchEvent, ...] = ()
    proxy: LaunchState = LaunchState.LAUNCHED
    is_held_back: bool = False  # decode's next event, until prefill's next
    is_denial_held: bool = False  # prefill's last event, until decode's next, but not for ever
    num_emitted: int = 0
    outcome: Literal["none", "finished", "failed"] = "none"


def explore_launch(table: LaunchTable = handoff.LAUNCH) -> tuple[int, int]:
    """Try everything. (states, transitions); raises Violation."""
    start = LaunchWorld()
    came_from: dict[LaunchWorld, tuple[LaunchWorld, str]] = {start: (start, "")}
    todo = deque([start])
    num_transitions = 0
    while todo:
        world = todo.popleft()
        try:
            num_moves = 0
            for label, after in launch_moves(world, table):
                num_moves += 1
                if after not in came_from:
                    came_from[after] = (world, label)
                    todo.append(after)
            _must(num_moves > 0 or world.outcome != "none", "the proxy waits for nothing", "")
            num_transitions += num_moves
        except Violation as violation:
            path = [violation.label]
            while world != start:
                world, label = came_from[world]
                path.append(label)
            raise Violation(violation.what, path[::-1]) from None
    return len(came_from), num_transitions


def launch_moves(world: LaunchWorld, table: LaunchTable) -> Iterator[tuple[str, LaunchWorld]]:
    """Everything that may happen next. Raises Violation where the table goes wrong."""
    if world.outcome != "none":
        return
    for event, after in _prefill_says(world):
        said = after._replace(from_prefill=(*world.from_prefill, event))
        yield f"{event.value} is said", said
    for event, after in _decode_says(world):
        said = after._replace(from_decode=(*world.from_decode, event))
        yield f"{event.value} is said", said
    if world.prefill == "parked" and world.decode == "asking":
        yield "the KV arrives", world._replace(decode="has KV")
    if world.from_prefill and not world.is_denial_held:
        event = world.from_prefill[0]
        left = world._replace(from_prefill=world.from_prefill[1:])
        yield event.value, _read(left, table, event) or world._replace(is_denial_held=True)
    if world.from_decode and not world.is_held_back:
        event = world.from_decode[0]
        left = world._replace(from_decode=world.from_decode[1:])
        yield event.value, _read(left, table, event) or world._replace(is_held_back=True)
    if world.is_denial_held:
        failed = _read(world, table, _E.OVERDUE)
        if failed is None:
            raise Violation("held back for ever", label=_E.OVERDUE.value)
        yield _E.OVERDUE.value, failed


def _prefill_says(world: LaunchWorld) -> Iterator[tuple[LaunchEvent, LaunchWorld]]:
    if world.prefill == "new":
        yield _E.PREFILL_TOKEN, world._replace(prefill="started")
    elif world.prefill == "started":
        yield _E.PREFILL_PARKED, world._replace(prefill="parked")
    elif world.prefill == "parked" and world.decode in ("has KV", "finished"):
        yield _E.PREFILL_RELEASED, world._replace(prefill="released")
    if world.prefill in ("new", "started"):  # "new": the emitted tokens were complete
        yield _E.PREFILL_FINISHED, world._replace(prefill="finished")
    if world.prefill in ("new", "started", "parked"):
        yield _E.PREFILL_FAILED, world._replace(prefill="failed")
        # Decode gave up, or only fell silent: then it may have the KV, and Done was lost.
        if world.decode == "failed" or world.prefill == "parked":
            yield _E.PREFILL_DENIED, world._replace(prefill="denied")


def _decode_says(world: LaunchWorld) -> Iterator[tuple[LaunchEvent, LaunchWorld]]:
    if world.decode == "has KV":
        if world.num_decoded < DECODE_TOKENS_MAX:
            yield _E.DECODE_TOKEN, world._replace(num_decoded=world.num_decoded + 1)
        yield _E.DECODE_FINISHED, world._replace(decode="finished")
    elif world.decode == "asking" and world.prefill in ("finished", "failed", "denied"):
        yield _E.DECODE_DENIED, world._replace(decode="denied")
    if world.decode in ("asking", "has KV"):
        yield _E.DECODE_FAILED, world._replace(decode="failed")


def _read(world: LaunchWorld, table: LaunchTable, event: LaunchEvent) -> LaunchWorld | None:
    """The proxy reads one event. None where it is held back, and stays where it is."""
    label = event.value
    step = table.get((world.proxy, event))
    if step is None:
        raise Violation(f"an honest worker's {event.value} is refused", label=label)
    if _A.HOLD_BACK in step.actions:
        _must(step == (world.proxy, (_A.HOLD_BACK,)), "held back, yet it had an effect", label)
        return None
    before = world
    is_prefills = event in _FROM_PREFILL
    world = world._replace(proxy=step.state, is_held_back=world.is_held_back and not is_prefills)
    world = world._replace(is_denial_held=world.is_denial_held and is_prefills)
    for action in step.actions:
        _must(world.outcome == "none", "something follows the end", label)
        match action:
            case _A.EMIT:
                _must(event in _TOKENS, "only tokens are emitted", label)
                is_first = event is _E.PREFILL_TOKEN
                _must(is_first == (world.num_emitted == 0), "tokens in the wrong order", label)
                world = world._replace(num_emitted=world.num_emitted + 1)
            case _A.FINISH:
                world = world._replace(outcome="finished")
                _check_finish(world, event, label)
            case _A.FAIL:
                world = world._replace(outcome="failed")
                _must(_is_broken(world), "failed though nobody did", label)
                is_broken_off = world.decode == "failed" or before.proxy is not _L.DECODING
                _must(is_broken_off, "failed though decode goes on", label)
                _must(event is not _E.PREFILL_DENIED, "decode is accused and not heard", label)
            case _A.KEEP_RECEIPT:
                _must(event in _WITH_RECEIPT, f"no receipt comes with {event.value}", label)
    is_kept = event not in _TOKENS or _A.EMIT in step.actions
    _must(is_kept, "a token is lost", label)
    is_receipt_kept = event not in _WITH_RECEIPT or _A.KEEP_RECEIPT in step.actions
    _must(is_receipt_kept, "a receipt is lost", label)
    expected = _NUM_EMITTED.get(world.proxy)
    is_in_step = world.proxy is _L.OVER or min(world.num_emitted, 2) == expected
    _must(is_in_step, f"{world.proxy.value} with {world.num_emitted} tokens", label)
    is_ended = world.proxy is _L.OVER
    _must(is_ended == (world.outcome != "none"), "an end that nobody hears of", label)
    return world


def _check_finish(world: LaunchWorld, event: LaunchEvent, label: str) -> None:
    is_prefill = event is _E.PREFILL_FINISHED
    _must(is_prefill or event is _E.DECODE_FINISHED, "finished by what is no end", label)
    num_tokens = world.num_decoded + (not is_prefill or world.num_emitted > 0)
    _must(world.num_emitted == num_tokens, "finished, but tokens are missing", label)


def _is_broken(world: LaunchWorld) -> bool:
    return world.prefill in ("failed", "denied") or world.decode == "failed"


def _must(is_so: bool, what: str, label: str) -> None:
    if not is_so:
        raise Violation(what, label=label)
