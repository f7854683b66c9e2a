import asyncio
import random

import pytest

from neuron_di.errors import ConfigError
from neuron_di.testing.faults import Faults
from neuron_di.testing.network import Network
from neuron_di.testing.sim_link import SignalNetwork, SimTransport, message_tag
from neuron_di.testing.virtual_loop import VirtualLoop, silenced
from neuron_di.wire import Abort, Done, Ping, encode_msgpack

PORT = 7


class Net:
    """A prefill worker that listens, and a decode worker that is connected to it."""

    def __init__(self, rates=None):
        self.loop = VirtualLoop()
        rng = random.Random(3)
        self.network = Network(self.loop, Faults(rng, rates), rng)
        self.signals = SignalNetwork(self.network)
        self.at_prefill = []
        self.at_decode = []

    def run(self, main):
        with silenced():
            self.loop.run_until_complete(main)
            self.loop.close()
        assert self.loop.errors == []

    def listen(self):
        self.prefill = SimTransport(self.signals, self.network.spawn("prefill"))
        self.router, _ = self.prefill.bind("sim", PORT, self.at_prefill.append)

    def connect(self, identity=b"decode.1", name="decode"):
        process = self.network.process_at(name) or self.network.spawn(name)
        transport = SimTransport(self.signals, process)
        return transport.connect("sim", PORT, identity, self.at_decode.append)


def pings(*numbers):
    return [encode_msgpack(Ping(sequence=number)) for number in numbers]


def sent(net):
    return [frames[-1] for frames in net.at_prefill]


def test_messages_arrive_in_order_and_are_answered_by_identity():
    net = Net()

    async def main():
        net.listen()
        dealer = net.connect()
        for message in pings(*range(20)):  # the first ones before there is a connection
            assert dealer.send([message])
            await asyncio.sleep(0.0002)
        await asyncio.sleep(1.0)
        assert net.router.send([b"decode.1", b"answer"])
        await asyncio.sleep(1.0)

    net.run(main())
    assert net.at_prefill == [[b"decode.1", message] for message in pings(*range(20))]
    assert net.at_decode == [[b"answer"]]


def test_a_router_cannot_send_to_whom_it_does_not_know():
    net = Net()

    async def main():
        net.listen()
        assert not net.router.send([b"nobody.1", b"hello"])
        dealer = net.connect()
        await asyncio.sleep(1.0)
        dealer.close()
        await asyncio.sleep(1.0)
        assert not net.router.send([b"decode.1", b"hello"])
        assert not dealer.send([b"hello"])

    net.run(main())


def test_an_identity_stays_with_the_connection_that_had_it_first():
    net = Net()

    async def main():
        net.listen()
        net.connect()
        await asyncio.sleep(1.0)
        thief = net.connect(name="thief")
        thief.send([b"stolen"])
        await asyncio.sleep(5.0)

    net.run(main())
    assert net.at_prefill == []


def test_a_dealer_goes_on_with_the_successor_at_the_address():
    net = Net()

    async def main():
        net.listen()
        dealer = net.connect()
        await asyncio.sleep(1.0)
        net.network.kill("prefill")
        await asyncio.sleep(1.0)
        assert dealer.send(pings(1))
        await asyncio.sleep(5.0)
        assert net.at_prefill == []
        net.listen()
        await asyncio.sleep(5.0)

    net.run(main())
    assert sent(net) == pings(1)


def test_the_death_of_a_dealer_is_noticed():
    net = Net()

    async def main():
        net.listen()
        net.connect()
        await asyncio.sleep(1.0)
        net.network.kill("decode")
        await asyncio.sleep(1.0)
        assert not net.router.send([b"decode.1", b"hello"])

    net.run(main())


def test_a_port_is_bound_once():
    net = Net()

    async def main():
        net.listen()
        with pytest.raises(ConfigError):
            net.prefill.bind("sim", PORT, print)

    net.run(main())


@pytest.mark.parametrize("is_lossy", [False, True])
def test_what_is_sent_into_a_cut_comes_after_it_or_never(is_lossy):
    net = Net()

    async def main():
        net.listen()
        dealer = net.connect()
        await asyncio.sleep(1.0)
        net.network.cut("decode", "prefill", is_lossy=is_lossy)
        for message in pings(1, 2):
            dealer.send([message])
        assert net.router.send([b"decode.1", b"the other way is free"])
        await asyncio.sleep(2.0)
        assert net.at_prefill == []
        assert net.at_decode != []
        net.network.mend("decode", "prefill")
        dealer.send(pings(3))
        await asyncio.sleep(1.0)

    net.run(main())
    assert sent(net) == (pings(3) if is_lossy else pings(1, 2, 3))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("drop ping", []),
        ("duplicate ping", [1, 1]),
        ("delay ping", [1]),
        ("drop pong", [1]),  # another type
    ],
)
def test_faults_strike_by_the_type_of_the_message(fault, expected):
    net = Net({fault: 1.0})

    async def main():
        net.listen()
        net.connect().send(pings(1))
        await asyncio.sleep(60.0)

    net.run(main())
    assert sent(net) == pings(*expected)


def test_a_reordered_message_is_overtaken():
    net = Net({"reorder abort": 1.0})

    async def main():
        net.listen()
        dealer = net.connect()
        for _ in range(20):
            dealer.send([encode_msgpack(Abort(request_id="r", attempt=0, reason=""))])
            dealer.send(pings(1))
        await asyncio.sleep(60.0)

    net.run(main())
    tags = [message_tag(message) for message in sent(net)]
    assert sorted(tags) == ["abort"] * 20 + ["ping"] * 20
    assert tags != ["abort", "ping"] * 20


def test_the_type_of_a_message_is_read_off_its_bytes():
    done = Done(request_id="r", attempt=0, engine="fake", form="direct", kv_bytes=1, transfer_s=0.1)
    assert message_tag(encode_msgpack(done)) == "done"
    assert message_tag(b"") == message_tag(b"garbage") == "?"
