"""Who gets in at the data port while strangers crowd it, and who may use which secret."""

import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from tcp_kit import DECODE, LAYOUT, PREFILL, WAIT_S, is_closed, tcp_pair

from neuron_di.clock import Deadline, sleep_s
from neuron_di.config import TransferOptions
from neuron_di.errors import PeerRefused
from neuron_di.kv import KvPool
from neuron_di.obs.limited_logger import LINES_MAX
from neuron_di.transfer import tcp_listener
from neuron_di.transfer.tcp_engine import TcpEngine
from neuron_di.transfer.tcp_listener import UNPROVED_MAX, Arrival, TcpListener, source_of
from neuron_di.transfer.tcp_proof import Hello, dial
from neuron_di.types import Incarnation

NUM_STRANGERS = UNPROVED_MAX + 40
NAMED, ASKED = b"n", b"?"


def serve(arrival: Arrival) -> None:
    """Answers each byte, and takes one of them for the name of a worker."""
    while said := arrival.sock.recv(1):
        arrival.is_named = arrival.is_named or said == NAMED
        arrival.sock.sendall(said)


@contextmanager
def listening(serve=serve) -> Iterator[TcpListener]:
    listener = TcpListener("127.0.0.1", 0, serve)
    try:
        yield listener
    finally:
        listener.close(Deadline.after(WAIT_S))


def come(listener: TcpListener, source: str = "127.0.0.1") -> socket.socket:
    address = ("127.0.0.1", listener.port)
    return socket.create_connection(address, WAIT_S, source_address=(source, 0))


def says(sock: socket.socket, word: bytes) -> bool:
    """Whether it is answered."""
    sock.settimeout(WAIT_S)
    try:
        sock.sendall(word)
        return sock.recv(1) == word
    except ConnectionError:
        return False


@pytest.mark.parametrize("source", ["127.0.0.2", "127.0.0.1"])
def test_a_flood_ends_strangers_of_its_own_address_that_have_named_nobody(source):
    """Of those who were there first all stay, from elsewhere or with a name; of the flood go as
    many as there is no room for, the oldest."""
    word = ASKED if source == "127.0.0.2" else NAMED
    with listening() as listener, ExitStack() as stack:
        honest = [stack.enter_context(come(listener, source)) for _ in range(3)]
        assert all(says(sock, word) for sock in honest)
        flood = [stack.enter_context(come(listener)) for _ in range(NUM_STRANGERS)]
        num_ended = NUM_STRANGERS + len(honest) - UNPROVED_MAX
        assert all(is_closed(sock) for sock in flood[:num_ended])
        assert all(says(sock, ASKED) for sock in honest + flood[num_ended:])


def test_where_all_have_a_name_the_oldest_goes():
    with listening() as listener, ExitStack() as stack:
        socks = []
        for _ in range(UNPROVED_MAX):
            socks.append(stack.enter_context(come(listener)))
            assert says(socks[-1], NAMED)
        stack.enter_context(come(listener))
        assert is_closed(socks[0])
        assert says(socks[1], ASKED)


def test_a_host_has_a_network_of_ipv6_and_an_address_of_ipv4():
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:1")
    assert source_of("2001:db8:0:1::1") != source_of("2001:db8::1")
    assert source_of("fe80::1%lo") == source_of("fe80::2")
    assert source_of("10.0.0.1") != source_of("10.0.0.2")


def test_what_fails_because_it_was_ended_is_no_news(monkeypatch):
    """TLS under which the connection ends may fail in any way: a line for each is a flood, too."""
    failures: list[str] = []

    class Log:
        def exception(self, event: str) -> None:
            failures.append(event)

    def fail(arrival: Arrival) -> None:
        arrival.sock.recv(1)
        raise ValueError("handshake on what is no connection")

    monkeypatch.setattr(tcp_listener, "_log", Log())
    with listening(fail) as listener, ExitStack() as stack:
        flood = [stack.enter_context(come(listener)) for _ in range(UNPROVED_MAX + 3)]
        assert all(is_closed(sock) for sock in flood[:3])
        assert not failures
        flood[3].sendall(b"x")
        assert is_closed(flood[3])
        listener.close(Deadline.after(WAIT_S))
    assert failures == ["data_connection_failed"]


def test_a_listener_without_a_thread_gives_its_port_back(monkeypatch):
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(tcp_listener.PeerGone):
            TcpListener("127.0.0.1", port, serve)
    TcpListener("127.0.0.1", port, serve).close(Deadline.after(WAIT_S))


def test_a_log_that_is_slow_holds_nobody_up(monkeypatch):
    """disconnect() is called on the event loop."""
    is_logging, go_on = threading.Event(), threading.Event()

    def log(*_args: object, **_fields: object) -> None:
        is_logging.set()
        go_on.wait(WAIT_S)

    with tcp_pair() as pair:
        monkeypatch.setattr(pair.prefill._refusals, "warning", log)
        region = pair.prefill.local_region(DECODE)
        with socket.create_connection((region.host, region.port), WAIT_S) as sock:
            sock.sendall(b"\xff" * 4096)
            assert is_logging.wait(WAIT_S)
            ending = threading.Thread(target=pair.prefill.disconnect, args=(DECODE,))
            ending.start()
            ending.join(5)
            is_held_up = ending.is_alive()
            go_on.set()
            ending.join(WAIT_S)
            assert not is_held_up


def test_a_worker_in_both_roles_cannot_pose_as_another():
    """It decodes from `prefill` and prefills for `decode`, so each has told it a secret."""
    both = Incarnation("e0" * 16)
    with (
        tcp_pair() as pair,
        closing(KvPool.create(LAYOUT, 1, both)) as pool,
        closing(TcpEngine(pool, TransferOptions())) as engine,
    ):
        pair.prefill.accept(both, engine.local_region(PREFILL), LAYOUT)
        told_by_prefill = pair.prefill.local_region(both)
        told_by_decode = pair.decode.local_region(both)
        hello = Hello(attempt=1 << 40, index=0, num_streams=1, decode=DECODE, prefill=PREFILL)
        address = (told_by_prefill.host, told_by_prefill.port)
        with socket.create_connection(address, WAIT_S) as sock, pytest.raises(PeerRefused):
            dial(
                sock,
                hello,
                decode_secret=told_by_decode.secret,
                prefill_secret=told_by_prefill.secret,
                deadline=Deadline.after(WAIT_S),
            )
        regions = [pair.decode.local_region(peer) for peer in (PREFILL, both)]
        regions += [pair.prefill.local_region(peer) for peer in (DECODE, both)]
        assert len({region.secret for region in regions}) == 4
        assert pair.moves()


def test_without_descriptors_the_log_is_not_filled(monkeypatch, caplog):
    monkeypatch.setattr(tcp_listener, "_NO_DESCRIPTOR_PAUSE_S", 0.001)
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listening() as listener, socket.socket() as waits:
        resource.setrlimit(resource.RLIMIT_NOFILE, (waits.fileno(), most))
        try:
            waits.connect(("127.0.0.1", listener.port))
            while not caplog.records:
                sleep_s(0.01)
            sleep_s(0.3)  # in which it tries again some hundred times
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))
        assert says(waits, ASKED)
    assert len(caplog.records) <= 2 * LINES_MAX
