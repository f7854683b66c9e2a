"""ZMQ has no socket left, as where a process has no descriptors left: an error, and no leak."""

import asyncio
import gc
import threading

import pytest
import zmq

from neuron_di.errors import ConfigError, NeuronDiError, PeerGone
from neuron_di.transfer import Admission, SignalKeys, ZmqTransport, make_signal_keys
from neuron_di.transfer.door import Guard
from neuron_di.transfer.signal_link import Link, Seal


def transport_with(num_sockets: int) -> ZmqTransport:
    transport = ZmqTransport()
    transport._context.set(zmq.MAX_SOCKETS, num_sockets)
    return transport


def keys() -> SignalKeys:
    made = make_signal_keys("auto")
    assert made is not None
    return made


def connect(transport: ZmqTransport, *, is_sealed: bool) -> Link:
    own = keys()
    seal = Seal(own, own.public, lambda _: None) if is_sealed else None
    return transport.connect("127.0.0.1", 1, b"me", lambda _: None, seal=seal)


def bind(transport: ZmqTransport, *, is_sealed: bool) -> Link:
    guard = Guard(keys(), Admission(), 1.0, lambda: None) if is_sealed else None
    return transport.bind("127.0.0.1", 0, lambda _: None, guard=guard)[0]


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize(("make", "error"), [(connect, PeerGone), (bind, ConfigError)])
async def test_whatever_is_missing_the_transport_ends(make, error, is_sealed) -> None:
    """Each socket of a link is the one that there is no place for."""
    loop = asyncio.get_running_loop()
    failed: list[NeuronDiError] = []
    for num_sockets in range(1, 9):
        transport = transport_with(num_sockets)
        # All places but so many are taken; a link that was closed gives its own back.
        taken = transport._context.socket(zmq.PAIR)
        try:
            make(transport, is_sealed=is_sealed).close()
        except error as refused:
            failed.append(refused)
        taken.close()
        transport.close()
        await ended(transport)
    assert len(failed) in range(1, 8)
    assert all("127.0.0.1" in refused.message for refused in failed)
    gc.collect()
    assert loop.is_running()


async def ended(transport: ZmqTransport) -> None:
    """ZMQ waits for ever for a socket that nobody closed."""
    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        transport.wait_closed()
        loop.call_soon_threadsafe(is_over.set)

    threading.Thread(target=wait, daemon=True).start()
    async with asyncio.timeout(10.0):
        await is_over.wait()
    assert transport._context.closed


async def test_the_end_of_a_transport_does_not_wait_for_a_socket_that_was_lost() -> None:
    transport = ZmqTransport()
    lost = transport._context.socket(zmq.DEALER)
    transport.close()
    await ended(transport)
    assert lost.closed


async def test_a_link_that_cannot_be_leaves_its_socket_to_nobody() -> None:
    """Closed at once, not only with the transport: it may be tried again for hours."""
    transport = transport_with(2)  # the link's own, and one of the two that watch it
    for _ in range(3):
        with pytest.raises(PeerGone, match="no signal link can be at"):
            connect(transport, is_sealed=True)
        assert all(socket.closed for socket in transport._context._sockets)
    transport.close()
    await ended(transport)
