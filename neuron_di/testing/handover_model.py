"""Walks through everything that can happen when blocks of an arena change owner.

    python -m neuron_di.testing.handover_model

Two workers with the steps of `kv/ownership.py`, each a generator that yields one access to shared
memory at a time. P promises two groups of blocks and gives them up in any order, whether or not it
heard that they were taken; D takes them for blocks of its own, uses those, and offers them again.
Between any two accesses the other end may run, and either may die and start again, also while
it joins. What a process does next follows from its program and from what it has read: so that is
its state, and every state of both is tried once.

Checked at every step: nobody has a block for its own use while a living other one has, nobody
reads other KV than what was promised, and a dead one's lock stops nobody. Checked at each end:
every block has one owner, who knows it, and each end has as many as it began with.

Next: neuron_di/testing/handover_ends.py
"""

import sys
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

from neuron_di.testing.handoff_world import Violation
from neuron_di.testing.handover_ends import (
    BLOCKS_AT_FIRST,
    NO_BUGS,
    NO_OFFER,
    Access,
    Bugs,
    decode,
    join,
    nothing,
    prefill,
)

_PROGRAMS = {"prefill": prefill, "decode": decode, "join": join, "nothing": nothing}
_ENDED: Final = Access("ended")
# What no other process can tell the time of: done at once, so that there are fewer orders to try.
_PRIVATE = frozenset({"choose", "use", "leave", "write", "read", "promise", "open gate"})


class _Process(NamedTuple):
    """One end: its program, and the answers to all that it asked of the memory."""

    slot: str
    program: str
    heard: tuple[Hashable, ...] = ()


class _World(NamedTuple):
    """Shared memory, locks and messages, and who may use which block.

    A tuple: hundreds of thousands are made and hashed, which is much quicker in C.
    """

    ends: tuple[_Process, ...]
    words: tuple[tuple[str, int], ...]  # by block: owner, generation
    offers: tuple[Any, ...]
    hints: tuple[int, ...]
    contents: tuple[str, ...]
    users: tuple[str, ...]  # by block: whose it is for its own use; "": nobody's
    gate: tuple[str, ...] = ()  # who holds it; "!P": alone
    promises: tuple[Any, ...] = ()
    crashes: int = 0


def _start() -> _World:
    owners = [slot for slot, blocks in BLOCKS_AT_FIRST.items() for _ in blocks]
    return _World(
        ends=(_Process("P", "prefill"), _Process("D", "decode")),
        words=tuple((owner, 1) for owner in owners),
        offers=(NO_OFFER,) * len(owners),
        hints=(0,) * len(owners),
        contents=("",) * len(owners),
        users=tuple(owners),
    )


@dataclass(frozen=True, slots=True)
class Exploration:
    num_states: int
    num_transitions: int
    num_ends: int


def explore(bugs: Bugs = NO_BUGS, *, crashes_max: int = 2) -> Exploration:
    """Try everything with at most so many crashes. Raises Violation."""
    start = _start()
    came_from: dict[_World, tuple[_World, str] | None] = {start: None}
    todo = deque([start])
    num_transitions = num_ends = 0
    while todo:
        world = todo.popleft()
        try:
            moves = _moves(world, bugs, crashes_max)
            if not any(label[0] != "!" for label, _ in moves):
                _check_end(world, bugs)
                num_ends += 1
        except Violation as violation:
            path = [*_path(came_from, world), violation.label]
            raise Violation(violation.what, path) from None
        for label, there in moves:
            num_transitions += 1
            if there not in came_from:
                came_from[there] = (world, label)
                todo.append(there)
    return Exploration(len(came_from), num_transitions, num_ends)


def _path(came_from: dict[_World, tuple[_World, str] | None], world: _World) -> list[str]:
    labels: list[str] = []
    while (step := came_from[world]) is not None:
        world, label = step
        labels.append(label)
    return labels[::-1]


@cache
def _next_access(process: _Process, bugs: Bugs) -> Access:
    """What a process that has heard this asks for next."""
    program = _PROGRAMS[process.program](process.slot, bugs)
    try:
        access = next(program)
        for answer in process.heard:
            access = program.send(answer)
    except StopIteration:
        return _ENDED
    return access


def _moves(world: _World, bugs: Bugs, crashes_max: int) -> list[tuple[str, _World]]:
    moves = []
    for index, process in enumerate(world.ends):
        if world.crashes < crashes_max:
            moves.append((f"!{process.slot} dies", _crashed(world, index)))
        moves += _steps(world, index, bugs)
    return moves


def _steps(world: _World, index: int, bugs: Bugs) -> list[tuple[str, _World]]:
    """What one end can do next, with all that only itself can tell the time of."""
    process = world.ends[index]
    access = _next_access(process, bugs)
    steps = []
    for answer, there in _done(world, process, access):
        label = f"{process.slot} {access.kind} {access.args} -> {answer}"
        heard = process._replace(heard=(*process.heard, answer))
        following = _next_access(heard, bugs)
        if following is _ENDED:
            heard = _Process(process.slot, "nothing")  # how it came to that matters no more
        there = there._replace(ends=_with(there.ends, index, heard))
        if following.kind in _PRIVATE:
            steps += [(f"{label}; {then}", last) for then, last in _steps(there, index, bugs)]
        else:
            steps.append((label, there))
    return steps


def _crashed(world: _World, index: int) -> _World:
    """A process is gone with its locks; another of its name begins, sooner or later."""
    slot = world.ends[index].slot
    again = _Process(slot, "join")
    return world._replace(
        ends=_with(world.ends, index, again),
        users=tuple("" if user == slot else user for user in world.users),
        gate=tuple(holder for holder in world.gate if holder.strip("!") != slot),
        crashes=world.crashes + 1,
    )


def _done(world: _World, process: _Process, access: Access) -> list[tuple[Hashable, _World]]:
    """Each way in which an access can come out now. None: it waits, or the process has ended."""
    slot, args = process.slot, access.args
    match access.kind:
        case "ended":
            return []
        case "lost":
            raise Violation("a block was taken, and nothing came for it", [slot])
        case "choose":
            return [(choice, world) for choice in args]
        case "load":
            return [(world.words[args[0]], world)]
        case "swap":
            block, expected, desired = args
            if world.words[block] != expected:
                return [(False, world)]
            return [(True, world._replace(words=_with(world.words, block, desired)))]
        case "store":
            return [(True, world._replace(words=_with(world.words, *args)))]
        case "offer":
            own_id, offer = args
            offers, hints = world.offers, world.hints
            offers, hints = _with(offers, own_id, offer), _with(hints, offer.source_id, own_id)
            return [(None, world._replace(offers=offers, hints=hints))]
        case "read offer":
            return [(world.offers[args[0]], world)]
        case "read hint":
            return [(world.hints[args[0]], world)]
        case "gate" | "open gate":
            return _gated(world, slot, access)
        case "use" | "leave" | "write" | "read":
            return _used(world, slot, access)
        case _:
            return _said(world, process, access)


def _gated(world: _World, slot: str, access: Access) -> list[tuple[Hashable, _World]]:
    others = tuple(holder for holder in world.gate if holder.strip("!") != slot)
    if access.kind == "open gate":
        return [(None, world._replace(gate=others))]
    is_alone = access.args[0]
    if others and (is_alone or any(holder.startswith("!") for holder in others)):
        return []
    return [(None, world._replace(gate=(*others, f"!{slot}" if is_alone else slot)))]


def _used(world: _World, slot: str, access: Access) -> list[tuple[Hashable, _World]]:
    label = f"{slot} {access.kind} {access.args}"
    if access.kind == "use":
        users = world.users
        for block in access.args:
            if users[block] not in ("", slot):
                raise Violation(f"block {block} is used by two", [label])
            users = _with(users, block, slot)
        return [(None, world._replace(users=users))]
    if access.kind == "leave":
        users = world.users
        for block in access.args:
            users = _with(users, block, "")
        return [(None, world._replace(users=users))]
    block, content = access.args
    if access.kind == "write":
        if world.users[block] != slot:
            raise Violation(f"block {block} is written to by who does not own it", [label])
        return [(None, world._replace(contents=_with(world.contents, block, content)))]
    if world.users[block] != slot or world.contents[block] != content:
        raise Violation(f"block {block} does not hold what was promised", [label])
    return [(None, world)]


def _said(world: _World, process: _Process, access: Access) -> list[tuple[Hashable, _World]]:
    args = access.args
    match access.kind:
        case "promise":
            return [(None, world._replace(promises=(*world.promises, args)))]
        case "hear promise":
            if args[0] < len(world.promises):
                return [(world.promises[args[0]], world)]
            peer = world.ends[0]
            is_over = peer.program != "prefill"
            return [(None, world)] if is_over else []
        case "look":  # whether the content is the promised one: the digests
            return [(tuple(world.contents[block] for block in args), world)]
        case _:
            raise AssertionError(f"no such access: {access.kind} of {process.slot}")


def _with(row: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*row[:index], value, *row[index + 1 :])


def _check_end(world: _World, bugs: Bugs) -> None:
    """Nothing more happens: are all blocks at home, and does everybody know?"""
    for process in world.ends:
        access = _next_access(process, bugs)
        if access.kind != "ended":
            raise Violation("nobody goes on", [f"{process.slot} waits to {access.kind}"])
        owned = {block for block, (owner, _) in enumerate(world.words) if owner == process.slot}
        used = {block for block, user in enumerate(world.users) if user == process.slot}
        if owned != used:
            raise Violation(f"{process.slot} owns {owned}, and knows of {used}", ["the end"])
        if len(owned) != len(BLOCKS_AT_FIRST[process.slot]):
            raise Violation(f"{process.slot} has {len(owned)} blocks at the end", ["the end"])


def main() -> None:
    for crashes_max in range(4):
        found = explore(crashes_max=crashes_max)
        sys.stdout.write(
            f"blocks change owner, at most {crashes_max} crashes: {found.num_states} states, "
            f"{found.num_transitions} transitions, {found.num_ends} ends\n"
        )


if __name__ == "__main__":
    main()
