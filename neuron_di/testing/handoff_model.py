"""Walks through everything that can happen in one hand-over, and checks the tables against it.

    make handoff-model, or python -m neuron_di.testing.handoff_model

One sender, one receiver, two channels, who owns which blocks, and a few faults: a message lost,
doubled or overtaken, a link that breaks, a silent reader, a crashed process, a forgotten end.
Every order of events is tried, breadth first, so that a counter-example is as short as can be.

Checked at every step: nobody reads blocks that are free, except where the quarantine of blocks
ended on a reader that did not let go (the digest check catches that one); nothing unverified is
delivered;
each leg and each set of blocks ends once; no message leads to a bug of ours. Checked at the end:
from wherever one is, time and delivery alone bring everything home, and whoever waits is told;
without faults decode is told at once, and no block waits for a lease once both legs are over.

Next: neuron_di/testing/handoff_world.py, neuron_di/testing/launch_model.py
"""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from neuron_di.testing.handoff_world import Move, Tables, Violation, World, moves
from neuron_di.testing.launch_model import explore_launch

# What happens sooner or later, whatever anybody does: messages arrive, copies end, time passes.
INEVITABLE = frozenset({"deliver", "noticed", "LeaseEnded", "Arrived", "Broke", "Cancel", "Drop"})
# The same without the decode leg's own end: it must not take a deadline to learn of a "never".
TELLING = (INEVITABLE - {"Cancel"}) | {"Park", "Tick", "Admitted"}


@dataclass(slots=True)
class Exploration:
    """What was found. `blamed`: a peer that did no wrong was refused because of a fault."""

    num_states: int = 0
    num_transitions: int = 0
    blamed: dict[str, list[str]] = field(default_factory=dict)  # by event; and how it came to be
    num_caught_by_digest: int = 0  # worlds in which a copy reads blocks that were let go


def explore(tables: Tables | None = None, *, faults_max: int = 2) -> Exploration:
    """Try everything with at most so many faults on each path. Raises Violation."""
    graph = _Graph(tables or Tables(), World(faults=faults_max))
    graph.expand()
    graph.check_reachable("nobody comes home", INEVITABLE, lambda world: world.is_home())
    graph.check_reachable("nobody tells decode", TELLING, _is_answered)
    for world in graph.worlds:
        if world.faults < faults_max:
            continue
        if world.is_quiet() and not world.are_blocks_home():
            raise Violation("both legs are over, and blocks wait for a lease", graph.path(world))
        if world.is_out_of_step():
            raise Violation("decode learns of it at its next heartbeat only", graph.path(world))
    return graph.found


def _is_answered(world: World) -> bool:
    return world.decode_leg != "running"


class _Graph:
    """Every reachable world, and what led from which to which."""

    def __init__(self, tables: Tables, start: World) -> None:
        self.found = Exploration()
        self.worlds: list[World] = [start]
        self._tables = tables
        self._number: dict[World, int] = {start: 0}
        self._came_from: list[tuple[int, str]] = [(0, "")]
        self._edges: list[tuple[int, int, str]] = []

    def expand(self) -> None:
        """Breadth first; a violation ends it."""
        todo = deque([0])
        while todo:
            here = todo.popleft()
            world = self.worlds[here]
            self.found.num_caught_by_digest += world.copy == "dirty"
            try:
                for move in moves(world, self._tables):
                    there = self._number.setdefault(move.world, len(self.worlds))
                    if there == len(self.worlds):
                        self.worlds.append(move.world)
                        self._came_from.append((here, move.label))
                        todo.append(there)
                    self._note(here, there, move)
            except Violation as violation:
                raise Violation(violation.what, [*self.path(world), violation.label]) from None
        self.found.num_states = len(self.worlds)

    def check_reachable(
        self, complaint: str, kinds: frozenset[str], is_goal: Callable[[World], bool]
    ) -> None:
        """Violation unless moves of these kinds lead from every world to a goal."""
        before: list[list[int]] = [[] for _ in self.worlds]
        for here, there, kind in self._edges:
            if kind in kinds:
                before[there].append(here)
        reaching = [number for number, world in enumerate(self.worlds) if is_goal(world)]
        is_fine = [False] * len(self.worlds)
        for number in reaching:
            is_fine[number] = True
        while reaching:
            for number in before[reaching.pop()]:
                if not is_fine[number]:
                    is_fine[number] = True
                    reaching.append(number)
        if not all(is_fine):
            raise Violation(complaint, self.path(self.worlds[is_fine.index(False)]))

    def path(self, world: World) -> list[str]:
        """What happened until then, oldest first."""
        number, labels = self._number[world], list[str]()
        while number:
            number, label = self._came_from[number]
            labels.append(label)
        return labels[::-1]

    def _note(self, here: int, there: int, move: Move) -> None:
        self.found.num_transitions += 1
        self._edges.append((here, there, move.kind))
        if move.blamed is not None and move.blamed not in self.found.blamed:
            self.found.blamed[move.blamed] = [*self.path(self.worlds[here]), move.label]


_LEGEND = """\
no rule was broken: else this ends with how it came about. Two things are within the rules:
  late reader: the quarantine of its blocks is over; its copy fails the digests, and is not used
  forgotten: an honest decode worker is refused, as prefill has ended and forgotten the request
"""


def report(found: Exploration, *, faults_max: int) -> str:
    """For people, who have read the legend."""
    size = f"{found.num_states} states, {found.num_transitions} transitions"
    lines = [
        f"a hand-over, at most {faults_max} faults: {size}",
        f"  late reader: in {found.num_caught_by_digest} states",
    ]
    for what, path in found.blamed.items():
        lines.append(f"  forgotten: {what}, after {', '.join(path)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    for faults_max in range(4):
        sys.stdout.write(report(explore(faults_max=faults_max), faults_max=faults_max))
    num_states, num_transitions = explore_launch()
    sys.stdout.write(f"a launch: {num_states} states, {num_transitions} transitions\n{_LEGEND}")


if __name__ == "__main__":
    main()
