"""What goes wrong in a run, and when: crashes, freezes, partitions, lies; drawn beforehand.

Some strike at a time, others at a moment of the protocol: when the n-th message of a type is
sent, its sender or its receiver is killed or frozen.
"""

import random
from dataclasses import dataclass
from typing import Literal

from neuron_di.testing.faults import LEG_FAULTS, MESSAGE_FAULTS, TRANSFER_FAULTS, draw_rates
from neuron_di.testing.sim_cluster import Cluster
from neuron_di.testing.sim_proxy import Lie
from neuron_di.testing.sim_worker import PROXY, SimWorker
from neuron_di.types import Role

CHAOS_S = 4.0  # until everything is healed
SINGLE_CHAOS_S = 14.0
SIGNAL_TAGS = (
    "handshake", "welcome", "kv_map_init", "kv_map", "lookup_all", "not_yet", "never", "ready",
    "hold", "pull", "done", "abort", "ping", "pong",
)  # fmt: skip
# One of these costs latency, no answer. A leg that falls silent is told by the stall timeout only.
SINGLE_FAULTS = (*TRANSFER_FAULTS, "leg reset", "connection refused")
SINGLE_MESSAGE_FAULTS = tuple(
    f"{fault} {tag}" for fault in ("drop", "duplicate", "reorder") for tag in SIGNAL_TAGS
)
PHASE_TAGS = ("lookup_all", "not_yet", "ready", "hold", "pull", "done", "abort", "handshake")
# Of each kind of blow, that a run has some of it.
CHANCES = {
    "kill": 0.4, "freeze": 0.3, "cut": 0.3, "lie": 0.2, "wipe": 0.05, "kill proxy": 0.05,
    "drain": 0.25, "role": 0.25,
}  # fmt: skip
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
DRAINS_S = (0.0, 0.5, 60.0)  # the time limits of orders
SINGLE_ORDER_SHARE = 0.25
LIES: tuple[Lie, ...] = ("hidden", "stale", "misplaced")

Blow = Literal["kill", "freeze"]


@dataclass(slots=True)
class Ambush:
    """Strikes the sender or the receiver of the n-th message of a type."""

    tag: str
    num_before: int
    is_sender: bool
    blow: Blow
    lasts_s: float


def draw_rates_of_run(rng: random.Random) -> dict[str, float]:
    """The faults that have a rate. Each run has few kinds, some runs have none."""
    aside = random.Random(repr(rng.getstate()))
    kinds = [f"{fault} {tag}" for fault in MESSAGE_FAULTS for tag in SIGNAL_TAGS]
    rates: dict[str, float] = {}
    if rng.random() < 0.5:
        rates |= draw_rates(rng, kinds, share=0.1, rate_max=0.7)
    if rng.random() < 0.4:
        rates |= draw_rates(rng, TRANSFER_FAULTS, share=0.4, rate_max=0.8)
    if rng.random() < 0.4:
        rates |= draw_rates(rng, LEG_FAULTS, share=0.5, rate_max=0.2)
    if rng.random() < 0.1:
        rates["garbage"] = 0.05 * rng.random()
    if rng.random() < 0.1:
        rates["role fails"] = 0.7 * rng.random()
    if rng.random() < 0.05:
        rates["step fails"] = 0.05 * rng.random()
    if aside.random() < 0.1:
        rates["copy fails"] = 0.3 * aside.random()
    return rates


class Chaos:
    """Draws the blows of one run, strikes them, and heals everything in the end."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._ambushes: list[Ambush] = []
        self._seen: dict[str, int] = {}
        self._is_over = False
        self._is_single = False

    def begin(self) -> None:
        """Draw everything, and wait for the moments."""
        rng, cluster = self._rng, self._cluster
        cluster.network.on_signal = self._on_signal
        if rng.random() < 0.5:
            for _ in range(rng.randint(1, 3)):
                self._ambushes.append(
                    Ambush(
                        tag=rng.choice(PHASE_TAGS),
                        num_before=rng.randint(0, 12),
                        is_sender=rng.random() < 0.5,
                        blow=rng.choice(("kill", "freeze")),
                        lasts_s=rng.choice((0.05, 0.5, 3.0)) * rng.random(),
                    )
                )
        for kind, chance in CHANCES.items():
            if rng.random() < chance:
                for _ in range(rng.randint(1, 3)):
                    lasts_s = rng.choice((0.05, 0.5, 3.0)) * rng.random()
                    self._later(rng.random() * CHAOS_S * 0.7, kind, lasts_s)

    def begin_single(self) -> None:
        """One thing goes wrong at some moment: no request may be lost by that."""
        self._is_single = True
        rng, cluster = self._rng, self._cluster
        cluster.network.on_signal = self._on_signal
        if rng.random() < SINGLE_ORDER_SHARE:  # which harms nobody, however long it takes
            kind = rng.choice(("drain", "role"))
            self._later(rng.random() * 2.0, kind, rng.choice((0.3, 3.0, 12.0)) * rng.random())
            return
        if rng.random() < 0.4:
            kinds = SINGLE_FAULTS if rng.random() < 0.6 else SINGLE_MESSAGE_FAULTS
            cluster.faults.once = {rng.choice(kinds): rng.randrange(10)}
            return
        blow: Blow = rng.choice(("kill", "freeze"))
        lasts_s = rng.choice((0.3, 3.0, 12.0)) * rng.random()
        if rng.random() < 0.6:
            self._ambushes.append(
                Ambush(
                    tag=rng.choice(("lookup_all", "not_yet", "ready", "hold", "pull", "done")),
                    num_before=rng.randint(0, 15),
                    is_sender=rng.random() < 0.5,
                    blow=blow,
                    lasts_s=lasts_s,
                )
            )
        else:
            self._later(rng.random() * 2.0, blow, lasts_s)

    def heal(self) -> None:
        """End every fault: from now on everything must come to its end."""
        cluster = self._cluster
        self._is_over = True
        self._ambushes.clear()
        cluster.faults.heal()
        cluster.network.note("heal")
        cluster.network.mend_all()
        cluster.proxy.start()
        if cluster.proxy.directory is not None:
            cluster.proxy.directory.lies.clear()
        for place in cluster.workers:
            place.thaw()
            place.start()

    def _later(self, at_s: float, kind: str, lasts_s: float) -> None:
        self._cluster.loop.call_later(at_s, self._strike, kind, lasts_s)

    def _strike(self, kind: str, lasts_s: float) -> None:
        if self._is_over:
            return
        cluster, rng = self._cluster, self._rng
        place = rng.choice(cluster.workers)
        if kind == "cut":
            others = [PROXY, *(other.name for other in cluster.workers if other is not place)]
            self._cut(place.name, rng.choice(others), lasts_s)
        elif kind == "wipe":
            cluster.faults.count("registry wiped")
            cluster.proxy.wipe_registry()
        elif kind == "kill proxy":
            cluster.faults.count("kill proxy")
            cluster.proxy.kill()
            cluster.loop.call_later(lasts_s, cluster.proxy.start)
        elif kind in ("drain", "role"):
            self._order(place, kind, lasts_s)
        elif kind == "lie":
            self._lie(place, rng.choice(LIES), lasts_s)
        else:
            self._hit(place, "kill" if kind == "kill" else "freeze", lasts_s)

    def _hit(self, place: SimWorker, blow: Blow, lasts_s: float) -> None:
        cluster = self._cluster
        # An ambush waits with the process it hits: one that was frozen by another may be late.
        if self._is_over or not place.is_alive:
            return
        cluster.faults.count(blow)
        if blow == "kill":
            place.kill()
            cluster.loop.call_later(lasts_s, place.start)
        else:
            place.freeze()
            cluster.loop.call_later(lasts_s, place.thaw)

    def _order(self, place: SimWorker, kind: str, lasts_s: float) -> None:
        """Drain a worker, which is started again a while later, or change its role."""
        rng, cluster = self._rng, self._cluster
        timeout_s = DRAINS_S[-1] if self._is_single else rng.choice(DRAINS_S)
        if not place.is_alive:
            return
        cluster.faults.count(f"ordered: {kind}")
        if kind == "drain":
            place.order_drain(timeout_s)
            cluster.loop.call_later(lasts_s, place.start)  # if it has ended by then
        else:
            place.order_role(rng.choice(ROLES), timeout_s)

    def _cut(self, here: str, there: str, lasts_s: float) -> None:
        rng, network = self._rng, self._cluster.network
        ways = [(here, there), (there, here)]
        if rng.random() < 0.4:  # one way only
            ways = [rng.choice(ways)]
        is_lossy = rng.random() < 0.5
        self._cluster.faults.count("cut one way" if len(ways) == 1 else "cut")
        for source, target in ways:
            network.note("cut", source, target, is_lossy)
            network.cut(source, target, is_lossy=is_lossy)
            self._cluster.loop.call_later(lasts_s, network.mend, source, target)

    def _lie(self, place: SimWorker, lie: Lie, lasts_s: float) -> None:
        directory = self._cluster.proxy.directory
        if directory is not None:
            self._cluster.faults.count(f"registry lies: {lie}")
            self._cluster.network.note("lie", place.name, lie)
            directory.lies[place.name] = lie
            self._cluster.loop.call_later(lasts_s, directory.lies.pop, place.name, None)

    def _on_signal(self, sender: str, receiver: str, tag: str) -> None:
        count = self._seen[tag] = self._seen.get(tag, 0) + 1
        for ambush in list(self._ambushes):
            if ambush.tag == tag and count > ambush.num_before:
                self._ambushes.remove(ambush)
                name = sender if ambush.is_sender else receiver
                place = next(p for p in self._cluster.workers if p.name == name)
                self._cluster.network.note("ambush", tag, name, ambush.blow)
                # Not within the sender's own callback: it runs on to its end.
                self._cluster.loop.call_later(0, self._hit, place, ambush.blow, ambush.lasts_s)
