import asyncio
import random

import msgspec
import pytest

from neuron_di.errors import PeerGone, PeerTimeout
from neuron_di.testing.faults import Faults
from neuron_di.testing.sim_cluster import Cluster
from neuron_di.testing.sim_legs import SimWorkers
from neuron_di.testing.sim_options import default_options
from neuron_di.testing.sim_worker import PROXY
from neuron_di.testing.virtual_loop import silenced
from neuron_di.testing.workload import wanted
from neuron_di.wire import Finished, PrefillLeg, Token
from neuron_di_proxy.failure import LegFailed

IDLE_S = 3.0


def simulate(scenario, rates=None):
    """Run `scenario(cluster, workers)` in the proxy's process of a cluster of one `both` worker."""
    with silenced():
        run(scenario, rates)  # all that is left of it goes before the silence ends


def run(scenario, rates):
    rng = random.Random(11)
    cluster = Cluster(rng, default_options(("both",)), Faults(rng, rates))

    async def main():
        cluster.start()
        await asyncio.sleep(1.0)
        workers = SimWorkers(
            cluster.network,
            cluster.network.process_at(PROXY),
            cluster.world.servers,
            idle_timeout_s=IDLE_S,
            connect_timeout_s=0.5,
        )
        await cluster.proxy.process.start(scenario(cluster, workers))

    cluster.loop.run_until_complete(main())
    assert cluster.loop.errors == []
    assert cluster.world.failures == []
    cluster.loop.close()


def open_leg(cluster, workers, *, number=10):
    want = wanted(number)
    leg = PrefillLeg(
        request_id="r",
        attempt=0,
        endpoint="completions",
        prompt=msgspec.Raw(msgspec.json.encode(want.prompt_ids)),
        sampling=want.sampling,
        timeout_s=60.0,
    )
    return workers.open_leg(cluster.workers[0].worker.record(), "whole", leg), want


async def all_of(leg):
    events = [await leg.next()]
    while isinstance(events[-1], Token):
        events.append(await leg.next())
    return events


def test_a_leg_says_what_the_worker_says():
    async def scenario(cluster, workers):
        leg, want = open_leg(cluster, workers)
        *tokens, end = await all_of(leg)
        assert tuple(tokens) == want.answer.tokens
        assert isinstance(end, Finished)
        record = cluster.workers[0].worker.record()
        assert (await workers.status(record)).record.incarnation == record.incarnation

    simulate(scenario)


def test_a_leg_that_fails_says_why():
    async def scenario(cluster, workers):
        leg, _ = open_leg(cluster, workers)
        cluster.workers[0].worker.set_state("draining")
        with pytest.raises(LegFailed) as refusal:
            await leg.next()
        assert refusal.value.failed.code == "over_capacity"

    simulate(scenario)


def test_a_closed_leg_ends_at_its_worker():
    async def scenario(cluster, workers):
        leg, _ = open_leg(cluster, workers, number=42)
        await leg.next()
        assert len(cluster.workers[0].worker.legs) == 1
        leg.close()
        leg.close()
        await asyncio.sleep(0.1)
        assert len(cluster.workers[0].worker.legs) == 0

    simulate(scenario)


def test_a_killed_worker_is_gone():
    async def scenario(cluster, workers):
        record = cluster.workers[0].worker.record()
        leg, _ = open_leg(cluster, workers, number=42)
        await leg.next()
        cluster.workers[0].kill()
        with pytest.raises(PeerGone):
            await all_of(leg)
        with pytest.raises(PeerGone):
            await workers.status(record)
        with pytest.raises(PeerGone):
            await workers.open_leg(record, "whole", leg._leg).next()

    simulate(scenario)


@pytest.mark.parametrize("blow", ["freeze", "cut"])
def test_a_frozen_or_unreachable_worker_is_silent(blow):
    async def scenario(cluster, workers):
        place = cluster.workers[0]
        record = place.worker.record()
        leg, _ = open_leg(cluster, workers, number=42)
        await leg.next()
        if blow == "freeze":
            place.freeze()
        else:
            cluster.network.cut(place.name, PROXY, is_lossy=False)
        start_s = cluster.loop.now_s
        with pytest.raises(PeerTimeout):
            await all_of(leg)
        assert cluster.loop.now_s - start_s == pytest.approx(IDLE_S, abs=0.1)
        with pytest.raises(PeerTimeout):
            await workers.status(record)

    simulate(scenario)


def test_a_request_that_queues_is_not_silence():
    async def scenario(cluster, workers):
        leg, _ = open_leg(cluster, workers, number=42)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4 * IDLE_S):
                await leg.next()

    def stopped(cluster, workers):
        place = cluster.workers[0]
        place.worker._engine._notify = lambda: None  # nobody turns the engine
        return scenario(cluster, workers)

    simulate(stopped)


def test_a_reset_connection_ends_both_sides():
    async def scenario(cluster, workers):
        leg, _ = open_leg(cluster, workers, number=42)
        with pytest.raises(PeerGone):
            await all_of(leg)
        await asyncio.sleep(0.1)
        assert len(cluster.workers[0].worker.legs) == 0

    simulate(scenario, {"leg reset": 1.0})


def test_a_connection_may_be_refused():
    async def scenario(cluster, workers):
        leg, _ = open_leg(cluster, workers)
        with pytest.raises(PeerGone):
            await leg.next()

    simulate(scenario, {"connection refused": 1.0})
