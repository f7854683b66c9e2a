import asyncio
import random

import msgspec
import pytest

from neuron_di.errors import PeerGone, PeerTimeout
from neuron_di.testing.faults import Faults
from neuron_di.testing.sim_cluster import Cluster
from neuron_di.testing.sim_legs import ORPHAN_S, SimWorkers
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


def open_leg(cluster, workers, *, number=10, request_id="r"):
    want = wanted(number)
    leg = PrefillLeg(
        request_id=request_id,
        attempt=0,
        endpoint="completions",
        prompt=msgspec.Raw(msgspec.json.encode(want.prompt_ids)),
        sampling=want.sampling,
        timeout_s=60.0,
    )
    return Heard(workers.open_leg(cluster.workers[0].worker.record(), "whole", leg)), want


class Heard:
    """An open leg, whose events are taken one at a time."""

    def __init__(self, leg):
        self.leg = leg
        self._said = asyncio.Queue()
        leg.open(self._said.put_nowait)
        assert self._said.empty()  # nothing is heard from within `open`

    async def next(self):
        said = await self._said.get()
        if isinstance(said, Exception):
            raise said
        return said


async def all_of(leg):
    events = [await leg.next()]
    while isinstance(events[-1], Token):
        events.append(await leg.next())
    return events


async def read_on(leg, events):
    while True:
        events.append(await leg.next())


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
        leg.leg.close()
        leg.leg.close()
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
            await Heard(workers.open_leg(record, "whole", leg.leg.document)).next()

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


def test_all_legs_at_a_worker_share_one_connection_and_its_end():
    async def scenario(cluster, workers):
        legs = [
            open_leg(cluster, workers, number=number, request_id=f"r{number}")[0]
            for number in (42, 43)
        ]
        cluster.faults.once = {"leg reset": 1}
        for leg in legs:
            with pytest.raises(PeerGone):
                await all_of(leg)
        await asyncio.sleep(0.1)
        assert len(cluster.workers[0].worker.legs) == 0
        another, want = open_leg(cluster, workers, request_id="another")  # and a new connection
        *tokens, _ = await all_of(another)
        assert tuple(tokens) == want.answer.tokens

    simulate(scenario)


def test_a_closed_leg_leaves_the_others_alone():
    async def scenario(cluster, workers):
        legs = [
            open_leg(cluster, workers, number=number, request_id=f"r{number}")
            for number in (42, 43)
        ]
        await legs[0][0].next()
        legs[0][0].leg.close()
        *tokens, _ = await all_of(legs[1][0])
        assert tuple(tokens) == legs[1][1].answer.tokens
        assert legs[0][0]._said.empty()

    simulate(scenario)


def test_nothing_follows_what_a_lossy_cut_swallowed():
    async def scenario(cluster, workers):
        place = cluster.workers[0]
        leg, _ = open_leg(cluster, workers, number=42)
        first = await leg.next()
        cluster.network.cut(place.name, PROXY, is_lossy=True)
        await asyncio.sleep(0.02)
        cluster.network.mend(place.name, PROXY)
        later = []
        with pytest.raises(PeerTimeout):
            await read_on(leg, later)
        assert [each.index for each in (first, *later)] == list(range(1 + len(later)))
        await asyncio.sleep(2 * ORPHAN_S)
        assert len(place.worker.legs) == 0

    simulate(scenario)


def test_a_connection_may_be_refused():
    async def scenario(cluster, workers):
        leg, _ = open_leg(cluster, workers)
        with pytest.raises(PeerGone):
            await leg.next()

    simulate(scenario, {"connection refused": 1.0})
