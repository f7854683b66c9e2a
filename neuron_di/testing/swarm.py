"""One seed, one run: draw a cluster and its faults, let clients ask, check, heal, check again.

Safety is checked all the time: each token against the undisturbed answer, each engine's books
after each of its turns. Liveness after everything was healed: each request has ended, and every
block, slot, leg and request is back within a bound.
"""

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from neuron_di.testing.faults import DAMAGE_FAULTS, Faults
from neuron_di.testing.sim_chaos import CHAOS_S, SINGLE_CHAOS_S, Chaos, draw_rates_of_run
from neuron_di.testing.sim_client import Client
from neuron_di.testing.sim_cluster import Cluster, Tally
from neuron_di.testing.sim_failure import Failure
from neuron_di.testing.sim_options import draw_options, draw_single_fault_options
from neuron_di.testing.sim_prefixes import found_too_much
from neuron_di.testing.sim_trace import lines_of
from neuron_di.testing.virtual_loop import LoopOverrun, place_of, silenced
from neuron_di.testing.workload import NUM_REQUESTS, some_alike, wanted

CLIENTS = 20
SINGLE_FAULT_SHARE = 0.15  # of the seeds: the defaults, one blow, and nobody may be lost
SINGLE_FAULT_S = 8.0  # and each request ends within this: a transfer timeout, and recomputing
ARRIVE_S = 2.0
SLACK_S = 1.5  # from a request's deadline to its end
HOME_S = 60.0  # from the last request's end until everything is back
POLL_S = 0.25
_LOGGERS = ("neuron_di", "neuron_di_proxy")


@dataclass(slots=True)
class Run:
    """What one seed did. `failures` is empty when every promise was kept."""

    seed: int
    failures: list[Failure]
    tally: Tally
    trace_digest: str = ""
    lines: tuple[str, ...] = ()  # the trace, where it was asked for or something failed


def run_seed(seed: int, *, with_trace: bool = False) -> Run:
    """One run, the same each time, in every process."""
    rng = random.Random(seed)
    is_single = rng.random() < SINGLE_FAULT_SHARE
    if is_single:
        options, faults = draw_single_fault_options(rng), Faults(rng)
    else:
        options, faults = draw_options(rng), Faults(rng, draw_rates_of_run(rng))
    with silenced():
        return _run(Cluster(rng, options, faults), seed, with_trace, is_single)


def _run(cluster: Cluster, seed: int, with_trace: bool, is_single: bool) -> Run:
    failures = cluster.world.failures
    with _logged_errors(cluster):
        try:
            cluster.loop.run_until_complete(_scenario(cluster, is_single))
        except LoopOverrun as error:
            cluster.world.fail("stuck", f"livelock: {error}")
        except Exception as error:
            cluster.world.fail("bug", f"the simulation broke: {error!r}{place_of(error)}")
    for text in cluster.loop.errors:
        cluster.world.fail("bug", text)
    run = Run(seed, failures, cluster.tally())
    if with_trace or failures:
        run.lines = tuple(lines_of(cluster))
        run.trace_digest = hashlib.sha256("\n".join(run.lines).encode()).hexdigest()
    cluster.close()
    return run


async def _scenario(cluster: Cluster, is_single: bool) -> None:
    rng = cluster.rng
    cluster.start()
    await asyncio.sleep(0.5)  # workers announce themselves
    chaos = Chaos(cluster, rng)
    if is_single:
        chaos.begin_single()
    else:
        chaos.begin()
    aside = random.Random(repr(rng.getstate()))
    numbers = rng.sample(range(NUM_REQUESTS), CLIENTS)
    for number, instead in zip(numbers, some_alike(aside, numbers), strict=True):
        _start_client(cluster, number, instead, is_single=is_single)
    await asyncio.sleep(SINGLE_CHAOS_S if is_single else CHAOS_S)
    chaos.heal()
    # A client's task may belong to a process that was killed, so it is not waited for itself.
    limit_s = cluster.options.limits.request_timeout_s + SLACK_S + 30.0
    await _until(lambda: all(client.outcome != "running" for client in cluster.clients), limit_s)
    for client in cluster.clients:
        if client.outcome == "running":
            cluster.world.fail("stuck", "has no end", client.name)
        elif is_single and client.failed is not None:
            cluster.world.fail(
                "lost", f"{client.failed.code}: {client.failed.message}", client.name
            )
    for name, words in found_too_much(cluster.clients, cluster.proxy.records):
        cluster.world.fail("wrong", words, name)
    cluster.proxy.rest()
    await _until(lambda: not cluster.leftovers(), HOME_S)
    for leftover in cluster.leftovers():
        cluster.world.fail("leaked", leftover)


def _start_client(cluster: Cluster, number: int, instead: int, *, is_single: bool) -> None:
    """Ask for `instead`; what is drawn is as if `number` were asked for."""
    rng, limits = cluster.rng, cluster.options.limits
    num_tokens = len(wanted(number).answer.tokens)
    client = Client(
        name=f"r{instead}",
        wanted=wanted(instead),
        arrives_s=rng.random() * ARRIVE_S,
        cancels_after=rng.randint(1, num_tokens) if rng.random() < 0.1 else None,
        deadline_s=SINGLE_FAULT_S if is_single else limits.request_timeout_s + SLACK_S,
        fail=cluster.world.fail,
        now_s=cluster.loop.time,
        may_find_kv=cluster.options.engine.prefix_cache == "on",
    )
    if is_single:  # nothing else keeps a worker from hearing of the end
        client.on_end = cluster.check_later
    cluster.clients.append(client)
    leaves_s = rng.random() * 2.0 if rng.random() < 0.1 else None

    def arrive() -> None:
        task = cluster.proxy.serve(client)
        if task is not None and leaves_s is not None:
            cluster.loop.call_later(leaves_s, task.cancel)

    cluster.loop.call_later(client.arrives_s, arrive)


async def _until(is_so: Callable[[], bool], limit_s: float) -> None:
    """Return when it is so, or after the limit."""
    for _ in range(int(limit_s / POLL_S)):
        if is_so():
            return
        await asyncio.sleep(POLL_S)


class _ErrorHandler(logging.Handler):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(logging.ERROR)
        self._cluster = cluster

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        struck = self._cluster.faults.num_struck
        is_damage = record.getMessage() == "kv_mismatch" and any(struck[k] for k in DAMAGE_FAULTS)
        if not is_damage and "an injected fault" not in repr(error):
            self._cluster.world.fail(
                "bug", f"logged {record.getMessage()}: {error!r}{place_of(error)}"
            )


@contextmanager
def _logged_errors(cluster: Cluster) -> Iterator[None]:
    """An error that is logged is a bug of ours, if it was not injected."""
    handler = _ErrorHandler(cluster)
    before = []
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        before.append((logger, logger.level, logger.propagate))
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
