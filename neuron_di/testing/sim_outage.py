"""A registry is away for minutes, while clients ask and workers come and go.

Workers serve on, and the proxy goes by what it knew last and by its probes: no client may notice.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

from neuron_di.testing.faults import Faults
from neuron_di.testing.sim_client import Client
from neuron_di.testing.sim_cluster import Cluster
from neuron_di.testing.sim_options import default_options
from neuron_di.testing.sim_worker import SimWorker
from neuron_di.testing.swarm import Run
from neuron_di.testing.virtual_loop import place_of, silenced
from neuron_di.testing.workload import NUM_REQUESTS, wanted

OUTAGE_S = 600.0
BEFORE_S = 5.0
CONVERGE_S = 30.0  # from the registry's return until the proxy knows who is there
CLIENTS = 400
POLL_S = 0.5


def run_outage(seed: int, *, outage_s: float = OUTAGE_S, num_clients: int = CLIENTS) -> Run:
    """One run, the same each time: 2 prefill and 3 decode workers, of which some fail.

    `failures` is empty when every client got its answer, and the proxy knew in the end who was
    there; while the registry was away, who had restarted.
    """
    rng = random.Random(seed)
    with silenced():
        options = default_options(("prefill", "prefill", "decode", "decode", "decode"))
        cluster = Cluster(rng, options, Faults(rng))
        with _reported(cluster):
            cluster.loop.run_until_complete(_scenario(cluster, outage_s, num_clients))
        run = Run(seed, cluster.world.failures, cluster.tally())
        cluster.loop.close()
        del cluster
    return run


@contextmanager
def _reported(cluster: Cluster) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        cluster.world.fail("bug", f"the simulation broke: {error!r}{place_of(error)}")
    for text in cluster.loop.errors:
        cluster.world.fail("bug", text)


async def _scenario(cluster: Cluster, outage_s: float, num_clients: int) -> None:
    cluster.start()
    await asyncio.sleep(BEFORE_S)
    registry = cluster.proxy.registry
    registry.go_away()
    numbers = cluster.rng.sample(range(NUM_REQUESTS), num_clients)
    for number in numbers:
        _start_client(cluster, number, cluster.rng.random() * outage_s)
    _strike(cluster, outage_s)
    await asyncio.sleep(outage_s)
    _check_restarted(cluster)
    registry.come_back()
    for client in cluster.clients:
        while client.outcome == "running":  # noqa: ASYNC110 - as people look
            await asyncio.sleep(POLL_S)
        if client.outcome != "completed":
            cluster.world.fail("lost", f"{client.outcome}: {client.failed}", client.name)
    await asyncio.sleep(CONVERGE_S)
    _check_view(cluster)
    cluster.proxy.rest()
    await asyncio.sleep(CONVERGE_S)
    for leftover in cluster.leftovers():
        cluster.world.fail("leaked", leftover)


def _strike(cluster: Cluster, outage_s: float) -> None:
    """One decode worker dies for good, one of each role is restarted, one stands still."""
    by_name: dict[str, SimWorker] = {place.name: place for place in cluster.workers}
    loop = cluster.loop
    loop.call_later(0.1 * outage_s, by_name["decode-2"].kill)
    for name, at_s in (("prefill-1", 0.3 * outage_s), ("decode-1", 0.5 * outage_s)):
        loop.call_later(at_s, by_name[name].kill)
        loop.call_later(at_s + 1.0, by_name[name].start)
    loop.call_later(0.7 * outage_s, by_name["decode-0"].freeze)
    loop.call_later(0.7 * outage_s + 4.0, by_name["decode-0"].thaw)


def _check_restarted(cluster: Cluster) -> None:
    """Who restarted at its address is known by its own answer, and used."""
    directory = cluster.proxy.directory
    known = () if directory is None else directory.workers()
    seen = {record.incarnation for record in known}
    for place in cluster.workers:
        if place.worker is not None and place.worker.record().incarnation not in seen:
            cluster.world.fail("stuck", f"{place.name} restarted and was not found")


def _check_view(cluster: Cluster) -> None:
    directory = cluster.proxy.directory
    known = () if directory is None else directory.workers()
    seen = {record.worker_id: record.incarnation for record in known}
    running = [place.worker.record() for place in cluster.workers if place.worker is not None]
    there = {record.worker_id: record.incarnation for record in running}
    if seen != there:
        cluster.world.fail("stuck", f"the proxy knows {seen}, there are {there}")


def _start_client(cluster: Cluster, number: int, arrives_s: float) -> None:
    client = Client(
        name=f"r{number}",
        wanted=wanted(number),
        arrives_s=arrives_s,
        cancels_after=None,
        deadline_s=cluster.options.limits.request_timeout_s,
        fail=cluster.world.fail,
        now_s=cluster.loop.time,
    )
    cluster.clients.append(client)
    cluster.loop.call_later(arrives_s, cluster.proxy.serve, client)
