import asyncio
import random

import numpy as np
import pytest

from neuron_di.errors import KvChanged, PeerGone, RemoteProtocolError, StaleIncarnation
from neuron_di.testing.fake_model import FakePool, fake_layout
from neuron_di.testing.fake_transfer import Fabric, FakeTransferEngine
from neuron_di.testing.faults import Faults
from neuron_di.testing.network import Network
from neuron_di.testing.virtual_loop import VirtualLoop, silenced
from neuron_di.transfer import BlockSource, TransferToken
from neuron_di.types import BlockId, Incarnation

P, D = Incarnation("prefill"), Incarnation("decode")
HERE, THERE = [BlockId(5), BlockId(1), BlockId(2)], [BlockId(0), BlockId(7), BlockId(3)]


class Pair:
    """Two workers' pools with an engine each, connected."""

    def __init__(self, rates=None, *, is_two_sided=False):
        self.loop = VirtualLoop()
        rng = random.Random(5)
        self.network = Network(self.loop, Faults(rng, rates), rng)
        fabric = Fabric(self.network)
        self.engines = {}
        for name in (P, D):
            pool = FakePool(fake_layout(4), 8, name)
            pool.words_NS[:] = np.arange(32, dtype=np.uint64).reshape(8, 4) + 1000 * len(name)
            process = self.network.spawn(name)
            self.engines[name] = FakeTransferEngine(
                fabric, process, pool, is_two_sided=is_two_sided
            )
        self.prefill, self.decode = self.engines[P], self.engines[D]
        self.decode.connect(P, self.prefill.local_region())
        self.prefill.accept(D, self.decode.local_region())

    def receive(self, there=THERE, here=HERE):
        source = BlockSource(there, self.prefill.pool.generations(there))
        return self.decode.post_receive(P, source, here)

    def has_arrived(self, there=THERE, here=HERE):
        return (self.decode.pool.words_NS[here] == self.prefill.pool.words_NS[there]).all()


def run(pair, main):
    async def all_of_it():
        await main()
        await asyncio.sleep(30.0)

    with silenced():
        pair.loop.run_until_complete(all_of_it())
        pair.loop.close()
    assert pair.loop.errors == []


async def done(token: TransferToken):
    while not token.is_done():  # noqa: ASYNC110 - the token is made to be polled
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_two_sided", [False, True])
def test_blocks_arrive_and_are_visible_after_the_fence(is_two_sided):
    pair = Pair(is_two_sided=is_two_sided)

    async def main():
        token = pair.receive()
        sent = pair.prefill.post_send(D, THERE)
        await done(token)
        await done(sent)
        assert token.error() is None
        assert token.kv_bytes == 3 * 32
        assert not pair.has_arrived()
        pair.decode.fence(P)
        assert pair.has_arrived()

    run(pair, main)


def test_a_receive_waits_for_its_send_in_order():
    pair = Pair(is_two_sided=True)

    async def main():
        first, second = pair.receive(), pair.receive([BlockId(4)], [BlockId(4)])
        await asyncio.sleep(5.0)
        assert not first.is_done()
        pair.prefill.post_send(D, THERE)
        await done(first)
        assert not second.is_done()
        pair.decode.disconnect(P)
        assert isinstance(second.error(), PeerGone)

    run(pair, main)


def test_a_source_that_was_given_up_is_noticed():
    pair = Pair({"transfer is slow": 1.0})

    async def main():
        token = pair.receive()
        pair.prefill.pool.retire(THERE[-1:])
        await done(token)
        assert isinstance(token.error(), KvChanged)

    run(pair, main)


@pytest.mark.parametrize("fault", ["transfer flips a bit", "transfer hits a wrong block"])
def test_damage_is_told_by_nobody(fault):
    pair = Pair({fault: 1.0})

    async def main():
        token = pair.receive()
        await done(token)
        assert token.error() is None
        pair.decode.fence(P)
        assert not pair.has_arrived()

    run(pair, main)


@pytest.mark.parametrize("fault", ["transfer stalls", "transfer is late", "transfer is slow"])
def test_a_slow_copy_takes_its_time(fault):
    pair = Pair({fault: 1.0})

    async def main():
        token = pair.receive()
        await asyncio.sleep(0.004)
        assert not token.is_done()
        await done(token)
        pair.decode.fence(P)
        assert pair.has_arrived()

    run(pair, main)


def test_a_late_write_hits_blocks_that_were_given_up():
    pair = Pair({"transfer is late": 1.0})

    async def main():
        token = pair.receive()
        pair.decode.pool.retire(HERE)  # given up, and, wrongly, nobody waits for the token
        await done(token)
        assert pair.has_arrived()  # without a fence: whoever has the blocks now is hit

    run(pair, main)


def test_a_copy_fails_when_told_to():
    pair = Pair({"transfer fails": 1.0})

    async def main():
        token = pair.receive()
        await done(token)
        assert token.error() is not None
        pair.decode.fence(P)
        assert not pair.has_arrived()

    run(pair, main)


def test_wrong_peers_and_wrong_blocks_are_refused():
    pair = Pair()
    with pytest.raises(StaleIncarnation):
        pair.decode.connect(Incarnation("other"), pair.prefill.local_region())
    nobody = BlockSource(THERE, [0, 0, 0])
    assert isinstance(pair.decode.post_receive(D, nobody, HERE).error(), PeerGone)
    source = BlockSource([8, 0, 1], [0, 0, 0])
    assert isinstance(pair.decode.post_receive(P, source, HERE).error(), RemoteProtocolError)
    source = BlockSource([0], [0])
    assert isinstance(pair.decode.post_receive(P, source, HERE).error(), RemoteProtocolError)
