"""The simulated network: places with one process each at a time, latency, and partitions.

A *place* is what outlives a process: a host and its ports. A killed process's successor stands
at the same place. Connections are TCP's: in order, reset when an end dies, and silent while
the way is cut; what was sent into a cut arrives after it, or never.
"""

import random
from collections.abc import Callable
from typing import Any

from neuron_di.testing.faults import Faults
from neuron_di.testing.virtual_loop import Process, VirtualLoop

LATENCY_S_MIN = 0.000_1
RESET_TIMEOUT_S = 3.0  # until a death is noticed at the other side of a cut: TCP's keepalive


class Network:
    """Knows the process at each place, and which ways are cut."""

    def __init__(self, loop: VirtualLoop, faults: Faults, rng: random.Random) -> None:
        self.loop = loop
        self.faults = faults
        self.rng = rng
        self.trace: list[tuple[Any, ...]] = []
        self.on_signal: Callable[[str, str, str], None] = _ignore  # sender, receiver, type
        self.latency_s_mean = 0.001
        self._processes: dict[str, Process] = {}
        self._cuts: dict[tuple[str, str], bool] = {}  # the value: what was sent is lost
        self._held: list[Wire] = []
        self._on_death: dict[str, list[Callable[[], None]]] = {}

    def note(self, kind: str, *what: object) -> None:
        """Write to the trace: time, kind, and whatever says what happened."""
        self.trace.append((self.loop.now_s, kind, *what))

    def process_at(self, place: str) -> Process | None:
        return self._processes.get(place)

    def spawn(self, place: str) -> Process:
        """A new process at a place where none lives."""
        process = self._processes[place] = Process(self.loop, place)
        return process

    def kill(self, place: str) -> None:
        """Its connections end: at once for who can see it, after a timeout behind a cut."""
        process = self._processes.pop(place, None)
        if process is not None:
            process.kill()
            for callback in self._on_death.pop(place, []):
                callback()

    def on_death(self, place: str, callback: Callable[[], None]) -> None:
        """Call back when the process that is at this place now is killed."""
        callbacks = self._on_death.setdefault(place, [])
        callbacks.append(callback)

    def forget_death(self, place: str, callback: Callable[[], None]) -> None:
        """The connection is over: nobody needs to hear of that death."""
        callbacks = self._on_death.get(place, [])
        if callback in callbacks:
            callbacks.remove(callback)

    def latency_s(self) -> float:
        return LATENCY_S_MIN + 2 * self.latency_s_mean * self.rng.random()

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cuts

    def cut(self, source: str, target: str, *, is_lossy: bool) -> None:
        self._cuts[source, target] = is_lossy

    def is_lossy(self, source: str, target: str) -> bool:
        return self._cuts.get((source, target), False)

    def mend(self, source: str, target: str) -> None:
        self._cuts.pop((source, target), None)
        self._flush()

    def mend_all(self) -> None:
        self._cuts.clear()
        self._flush()

    def _flush(self) -> None:
        held, self._held = self._held, []
        for wire in held:
            wire.flush()

    def hold(self, wire: "Wire") -> None:
        self._held.append(wire)


def _ignore(sender: str, receiver: str, tag: str) -> None:
    """Nobody listens to what is sent."""


class Wire:
    """One direction of a connection. What arrives runs in the process at its far end."""

    def __init__(self, network: Network, source: str, target: str, process: Process) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._process = process
        self._free_s = 0.0  # nothing overtakes what arrives then
        self._held: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.is_closed = False

    def send(
        self,
        deliver: Callable[..., object],
        *args: object,
        delay_s: float = 0.0,
        is_ordered: bool = True,
    ) -> None:
        """Call `deliver(*args)` at the far end, after the network's latency and `delay_s`."""
        network = self._network
        if self.is_closed:
            return
        if network.is_cut(self._source, self._target):
            if not network.is_lossy(self._source, self._target):
                self._held.append((deliver, args))
                if len(self._held) == 1:
                    network.hold(self)
            return
        loop = network.loop
        at_s = loop.now_s + network.latency_s() + delay_s
        if is_ordered:
            at_s = self._free_s = max(at_s, self._free_s)
        loop.call_at(at_s, self._arrive, deliver, args, context=self._process.context)

    def flush(self) -> None:
        """The way may be free again."""
        held, self._held = self._held, []
        for deliver, args in held:
            self.send(deliver, *args)

    def _arrive(self, deliver: Callable[..., object], args: tuple[object, ...]) -> None:
        if not self.is_closed:
            deliver(*args)
