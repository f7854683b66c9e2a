"""The engine of any two hosts, between two of them and between two processes."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import numpy as np
import pytest
from tcp_kit import (
    DECODE,
    LAYOUT,
    PREFILL,
    WAIT_S,
    runs_of,
    tcp_pair,
    wait,
)

from neuron_di.errors import (
    ConfigError,
    KvMissing,
    LocalProtocolError,
    PeerGone,
    PeerRefused,
    RemoteProtocolError,
)
from neuron_di.kv import KvPool
from neuron_di.transfer.tcp_engine import TcpEngine, TcpTimes
from neuron_di.transfer.transfer_engine import Send
from neuron_di.types import Incarnation
from neuron_di_bindings import socket_runs

LARGE = 4096  # blocks: 16 MiB, more than a connection's buffers hold


@pytest.fixture(params=["compiled", "plain"])
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(socket_runs, "_library", lambda: None)
    elif not socket_runs.is_compiled():
        pytest.skip("the extension is not built")


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize("is_sent_first", [True, False])
def test_a_large_transfer_is_spread_over_the_streams_and_arrives(way, streams, is_sent_first):
    with tcp_pair(LARGE, transfer_streams=streams) as pair:
        sizes = np.random.default_rng(0).integers(1, 9000, 3000)
        starts = (np.cumsum(sizes) - sizes).tolist()
        order = np.random.default_rng(1).permutation(3000).tolist()
        lengths = [int(sizes[n]) for n in order]
        destinations = [4096 + sum(lengths[:n]) + n for n in range(3000)]  # a gap behind each
        receive = pair.receive_of(runs_of([starts[n] for n in order], destinations, lengths))
        halves = [pair.send, pair.receive]
        tokens = [half(receive) for half in (halves if is_sent_first else halves[::-1])]
        assert [wait(token) for token in tokens] == [None, None]
        assert [token.kv_bytes for token in tokens] == [sum(lengths)] * 2
        assert all(token.transfer_s > 0 for token in tokens)
        assert pair.has_arrived(receive)


def test_many_transfers_at_once_each_get_their_own_bytes():
    with tcp_pair(256, transfer_streams=3) as pair:

        def move(block: int) -> None:
            for _ in range(10):
                receive = pair.receive_of(runs_of([block * 4096], [(255 - block) * 4096], [4096]))
                sending, receiving = pair.send(receive), pair.receive(receive)
                assert (wait(sending), wait(receiving)) == (None, None)

        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(move, n) for n in range(64)]:
                future.result(WAIT_S)
        received = pair.received[192 * 4096 :].reshape(64, 4096)[::-1]
        assert (received.ravel() == pair.sent[: 64 * 4096]).all()


def test_a_receive_whose_send_never_comes_is_cancelled_and_its_send_is_told():
    with tcp_pair() as pair:
        receive = pair.whole()
        token = pair.receive(receive)
        assert not token.is_done()
        pair.decode.cancel(PREFILL, receive.tag)
        assert isinstance(wait(token), KvMissing)
        assert pair.moves()  # what was said before it has been heard
        sending = pair.send(receive)
        error = wait(sending)
        assert isinstance(error, KvMissing)
        assert "gave this transfer up" in error.message  # not only after a time
        assert (pair.received[8192:] == 0xEE).all()
        pair.decode.cancel(PREFILL, receive.tag)
        pair.decode.cancel(PREFILL, 10**18)
        assert pair.moves()


def test_cancelling_beside_the_send_leaves_memory_alone_once_the_token_is_done():
    """Whoever comes first: the receive is whole, or its memory is not written to any more."""
    with tcp_pair(LARGE, transfer_streams=2) as pair:
        for _ in range(30):
            receive = pair.whole()
            receiving, sending = pair.receive(receive), pair.send(receive)
            pair.decode.cancel(PREFILL, receive.tag)
            error = wait(receiving)
            pair.received[:] = 0xEE
            assert error is None or isinstance(error, KvMissing)
            assert wait(sending) is None or isinstance(sending.error(), KvMissing)
            assert pair.moves()
            assert (pair.received[8192:] == 0xEE).all()


def test_a_send_that_nobody_asks_for_ends_at_its_deadline():
    with tcp_pair(times=TcpTimes(unclaimed_s=0.05)) as pair:
        receive = pair.whole()
        assert isinstance(wait(pair.send(receive)), KvMissing)
        assert isinstance(wait(pair.receive(receive)), KvMissing)
        assert pair.is_untouched()
        assert pair.moves()


@pytest.mark.parametrize("is_sent_first", [True, False])
@pytest.mark.parametrize("length", [1, 4095, 4097, 8192])
def test_two_ends_that_mean_different_bytes_both_fail(length, is_sent_first):
    with tcp_pair() as pair:
        receive = pair.receive_of(runs_of([0], [0], [4096]))
        send = Send(tag=receive.tag, runs=runs_of([0], [0], [length]))
        if is_sent_first:
            sending, receiving = pair.prefill.post_send(DECODE, send), pair.receive(receive)
        else:
            receiving, sending = pair.receive(receive), pair.prefill.post_send(DECODE, send)
        assert isinstance(wait(sending), RemoteProtocolError)
        assert isinstance(wait(receiving), RemoteProtocolError)
        assert pair.is_untouched()
        assert pair.moves()


@pytest.mark.parametrize(
    ("offset", "length"),
    [(-1, 1), (64 * 4096, 1), (0, 64 * 4096 + 1), (2**63 - 1, 1), (1, 2**63 - 1), (0, 0), (0, -1)],
)
def test_a_send_from_outside_of_the_pool_is_refused_at_both_ends(offset, length):
    with tcp_pair() as pair:
        receive = pair.receive_of(runs_of([0], [0], [4096]))
        receiving = pair.receive(receive)
        send = Send(tag=receive.tag, runs=runs_of([offset], [0], [length]))
        assert isinstance(wait(pair.prefill.post_send(DECODE, send)), RemoteProtocolError)
        assert isinstance(wait(receiving), RemoteProtocolError)
        assert pair.moves()


def test_one_tag_serves_one_transfer_at_a_time():
    with tcp_pair() as pair:
        receive = pair.whole()
        receiving = pair.receive(receive)
        assert isinstance(wait(pair.receive(receive)), LocalProtocolError)
        sending = pair.send(receive)
        assert (wait(sending), wait(receiving)) == (None, None)
        other = pair.whole()
        first = pair.send(other)
        assert isinstance(wait(pair.send(other)), LocalProtocolError)
        assert (wait(pair.receive(other)), wait(first)) == (None, None)


@pytest.mark.parametrize("end", ["prefill", "decode"])
def test_disconnecting_ends_what_is_posted_at_both_ends(end):
    with tcp_pair() as pair:
        waiting = [pair.receive(pair.whole()), pair.send(pair.whole())]
        if end == "prefill":
            pair.prefill.disconnect(DECODE)
        else:
            pair.decode.disconnect(PREFILL)
        assert all(isinstance(wait(token), PeerGone) for token in waiting)
        assert isinstance(wait(pair.receive(pair.whole())), PeerGone)
        pair.connect()
        assert pair.moves()


def test_connecting_anew_replaces_the_connection():
    with tcp_pair() as pair:
        waiting = [pair.receive(pair.whole()), pair.send(pair.whole())]
        pair.decode.connect(PREFILL, pair.prefill.local_region(DECODE), LAYOUT)
        assert all(isinstance(wait(token), PeerGone) for token in waiting)
        assert pair.moves()


def test_close_waits_for_what_is_on_its_way_and_not_for_ever():
    with tcp_pair(LARGE) as pair:
        receive = pair.whole()
        sending, receiving = pair.send(receive), pair.receive(receive)
        pair.decode.close()
        assert (wait(sending), wait(receiving)) == (None, None)
        assert pair.has_arrived(receive)
        with pytest.raises(PeerGone):
            pair.decode.connect(PREFILL, pair.prefill.local_region(DECODE), LAYOUT)
    with tcp_pair(times=TcpTimes(close_s=0.05)) as pair:
        waiting = [pair.receive(pair.whole()), pair.send(pair.whole())]
        pair.decode.close()
        pair.prefill.close()
        assert all(isinstance(wait(token), PeerGone) for token in waiting)


@pytest.mark.parametrize("region", [{"port": 0}, {"is_tls": True}, {"host": "169.254.169.254"}])
def test_a_region_that_nobody_should_dial_is_not_dialled(region):
    def why_refused(host: str, port: int) -> str:
        return "" if host == "127.0.0.1" else "a cloud's own address"

    with tcp_pair() as pair, closing(KvPool.create(LAYOUT, 1, Incarnation("x"))) as pool:
        engine = TcpEngine(pool, why_refused=why_refused)
        wrong = msgspec.structs.replace(pair.prefill.local_region(DECODE), **region)
        with pytest.raises(PeerRefused):
            engine.connect(PREFILL, wrong, LAYOUT)
        engine.close()


def test_a_port_that_is_taken_is_a_mistake_of_the_configuration():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            tcp_pair(is_connected=False, transfer_port=port) as pair,
            pytest.raises(ConfigError, match=str(port)),
        ):
            pair.prefill.accept(DECODE, pair.decode.local_region(PREFILL), LAYOUT)
