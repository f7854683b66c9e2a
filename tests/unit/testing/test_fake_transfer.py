import asyncio
import random

import numpy as np
import pytest

from neuron_di.errors import KvChanged, KvMissing, PeerGone, RemoteProtocolError, StaleIncarnation
from neuron_di.kv import whole_block_runs
from neuron_di.testing.fake_model import FakePool, fake_layout
from neuron_di.testing.fake_transfer import Fabric, FakeTransferEngine
from neuron_di.testing.faults import Faults
from neuron_di.testing.network import Network
from neuron_di.testing.virtual_loop import VirtualLoop, silenced
from neuron_di.transfer import BlockSource, Receive, Send, TransferToken
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
            pool.halves_N2S[:] = np.arange(64).reshape(8, 2, 4) + 1000 * len(name)
            process = self.network.spawn(name)
            self.engines[name] = FakeTransferEngine(
                fabric, process, pool, is_two_sided=is_two_sided
            )
        self.prefill, self.decode = self.engines[P], self.engines[D]
        self.layout = fake_layout(4)
        self.decode.connect(P, self.prefill.local_region(D), self.layout)
        self.prefill.accept(D, self.decode.local_region(P), self.layout)

    def receive(self, there=THERE, here=HERE, *, peer=P, source=None):
        return self.decode.post_receive(peer, self.order(there, here, source))

    def order(self, there=THERE, here=HERE, source=None):
        """Its tag is the first block there."""
        return Receive(
            tag=there[0],
            runs=whole_block_runs(self.layout, there, here),
            memory=self.decode.pool.memory(),
            source=source or BlockSource(there, self.prefill.pool.generations(there)),
            block_ids=here,
        )

    def send(self, there=THERE, here=HERE):
        runs = whole_block_runs(self.layout, there, here)
        return self.prefill.post_send(D, Send(tag=there[0], runs=runs))

    def has_arrived(self, there=THERE, here=HERE):
        return (self.decode.pool.halves_N2S[here] == self.prefill.pool.halves_N2S[there]).all()


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
        sent = pair.send()
        await done(token)
        await done(sent)
        assert token.error() is None
        assert token.kv_bytes == 3 * 32
        assert not pair.has_arrived()
        pair.decode.fence(P)
        assert pair.has_arrived()

    run(pair, main)


def test_a_receive_waits_for_its_send():
    pair = Pair(is_two_sided=True)

    async def main():
        first, second = pair.receive(), pair.receive([BlockId(4)], [BlockId(4)])
        await asyncio.sleep(5.0)
        assert not first.is_done()
        pair.send()
        await done(first)
        assert not second.is_done()
        pair.decode.disconnect(P)
        assert isinstance(second.error(), PeerGone)

    run(pair, main)


def test_a_cancelled_receive_ends_and_its_send_too():
    pair = Pair(is_two_sided=True)

    async def main():
        token = pair.receive()
        pair.decode.cancel(P, THERE[0])
        await done(token)
        assert isinstance(token.error(), KvMissing)
        sent = pair.send()
        await done(sent)
        assert sent.error() is None
        assert not pair.has_arrived()
        again, sent = pair.receive(), pair.send()  # of the same tag: nothing is left of it
        await done(again)
        assert again.error() is None
        await done(sent)

    run(pair, main)


def test_a_source_that_was_given_up_after_the_copy_is_noticed():
    pair = Pair()

    async def main():
        await done(pair.receive())
        assert pair.decode.commit(P, pair.order()) is None
        before = pair.order()
        pair.prefill.pool.retire(THERE[-1:])
        assert isinstance(pair.decode.commit(P, before), KvChanged)

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
        pair.decode.connect(Incarnation("other"), pair.prefill.local_region(D), pair.layout)
    assert isinstance(pair.receive(peer=D).error(), PeerGone)
    for source in (BlockSource([8, 0, 1], [0, 0, 0]), BlockSource([0, 1], [0])):
        assert isinstance(pair.receive(source=source).error(), RemoteProtocolError)
