"""Strangers and hostile peers at the data connections (B40, B41). Whoever behaves is served on."""

import contextlib
import socket
import struct
import threading
from contextlib import ExitStack, closing

import msgspec
import pytest
from tcp_kit import (
    DECODE,
    LAYOUT,
    PREFILL,
    WAIT_S,
    TcpPair,
    hostile_decode,
    is_closed,
    runs_of,
    tcp_pair,
    wait,
)

from neuron_di.clock import Deadline
from neuron_di.errors import (
    PeerError,
    PeerGone,
    PeerRefused,
    PeerTimeout,
    RemoteProtocolError,
    StaleIncarnation,
)
from neuron_di.kv import KvPool
from neuron_di.transfer.tcp_engine import TcpEngine, TcpTimes
from neuron_di.transfer.tcp_frames import CANCEL, DATA, GONE, WANT, Frame
from neuron_di.transfer.tcp_listener import UNPROVED_MAX
from neuron_di.transfer.tcp_proof import Hello, dial
from neuron_di.transfer.tcp_sender import WISHES_MAX
from neuron_di.transfer.transfer_engine import Send
from neuron_di.types import Incarnation
from neuron_di.wire import TcpRegion

STRANGER = Incarnation("5e" * 16)
_FRAME = struct.Struct("<4sIQQQQ")


@pytest.fixture
def pair():
    """At the end of each test an honest transfer still succeeds, and nothing else was written."""
    with tcp_pair() as pair:
        yield pair
        assert pair.is_untouched()
        pair.connect()
        assert pair.moves()


def at_the_port(pair: TcpPair) -> socket.socket:
    region = pair.prefill.local_region(DECODE)
    assert isinstance(region, TcpRegion)
    return socket.create_connection((region.host, region.port), WAIT_S)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 20,
        b"\0" * 4096,
        b"\xff" * 4096,
        b"NDIKVTC1" + b"\xff" * 300,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 512,
        Frame(WANT, 1, 4096, 0, 4096).pack() * 10,
    ],
)
def test_strangers_words_at_the_data_port_close_the_connection(pair, words):
    with at_the_port(pair) as sock:
        sock.sendall(words)
        assert is_closed(sock)


def test_a_stranger_who_says_nothing_is_closed_in_time():
    with tcp_pair(times=TcpTimes(proof_s=0.2)) as pair, at_the_port(pair) as sock:
        assert is_closed(sock)
        assert pair.moves()


def test_a_stranger_who_speaks_slowly_is_closed_in_time():
    with tcp_pair(times=TcpTimes(proof_s=0.3)) as pair, at_the_port(pair) as sock:
        deadline = Deadline.after(WAIT_S)
        pause = threading.Event()

        def speak_on() -> None:
            while not deadline.has_passed():  # never silent for long
                sock.sendall(b"N")
                pause.wait(0.05)

        with pytest.raises(ConnectionError):
            speak_on()
        assert pair.moves()


def test_strangers_who_linger_keep_nobody_out(pair):
    with ExitStack() as stack:
        lingering = [stack.enter_context(at_the_port(pair)) for _ in range(UNPROVED_MAX + 8)]
        pair.connect()
        assert is_closed(lingering[0])


def proof(pair: TcpPair, *, secret: bytes, prefill_secret: bytes, **who: object) -> None:
    hello = {"attempt": 99, "index": 0, "num_streams": 1, "decode": DECODE, "prefill": PREFILL}
    with at_the_port(pair) as sock:
        dial(
            sock,
            Hello(**(hello | who)),
            decode_secret=secret,
            prefill_secret=prefill_secret,
            deadline=Deadline.after(WAIT_S),
        )


@pytest.mark.parametrize("wrong", ["decode", "prefill", "both"])
def test_without_both_secrets_nobody_gets_in(pair, wrong):
    own, region = pair.decode.local_region(PREFILL), pair.prefill.local_region(DECODE)
    secret = own.secret if wrong == "prefill" else bytes(32)
    prefill_secret = region.secret if wrong == "decode" else bytes(32)
    with pytest.raises(PeerRefused):
        proof(pair, secret=secret, prefill_secret=prefill_secret)


@pytest.mark.parametrize("name", [STRANGER, "x", "x" * 64])
def test_an_unknown_incarnation_gets_no_challenge_even_with_the_secrets(pair, name):
    own, region = pair.decode.local_region(PREFILL), pair.prefill.local_region(DECODE)
    with pytest.raises(PeerRefused):
        proof(pair, secret=own.secret, prefill_secret=region.secret, decode=Incarnation(name))


def test_a_connection_that_means_another_process_is_told_so(pair):
    own, region = pair.decode.local_region(PREFILL), pair.prefill.local_region(DECODE)
    with pytest.raises(StaleIncarnation):
        proof(pair, secret=own.secret, prefill_secret=region.secret, prefill=STRANGER)
    with pytest.raises(StaleIncarnation):
        pair.decode.connect(STRANGER, region, LAYOUT)


@pytest.mark.parametrize(("index", "num_streams"), [(0, 0), (1, 1), (64, 65), (2**32 - 1, 1)])
def test_streams_that_do_not_add_up_are_refused(pair, index, num_streams):
    own, region = pair.decode.local_region(PREFILL), pair.prefill.local_region(DECODE)
    with pytest.raises(PeerRefused):
        proof(
            pair,
            secret=own.secret,
            prefill_secret=region.secret,
            index=index,
            num_streams=num_streams,
        )


def test_a_recorded_proof_opens_nothing(pair):
    """The nonces are of one connection."""
    recorded: list[bytes] = []
    own, region = pair.decode.local_region(PREFILL), pair.prefill.local_region(DECODE)

    class Recorder(socket.socket):
        def sendall(self, message: bytes) -> None:
            recorded.append(bytes(message))
            super().sendall(message)

    with Recorder() as sock:
        sock.connect((region.host, region.port))
        attempt = next(pair.decode._attempts)
        hello = Hello(attempt=attempt, index=0, num_streams=1, decode=DECODE, prefill=PREFILL)
        dial(
            sock,
            hello,
            decode_secret=own.secret,
            prefill_secret=region.secret,
            deadline=Deadline.after(WAIT_S),
        )
    assert len(recorded) == 2
    with at_the_port(pair) as sock:
        sock.sendall(b"".join(recorded))
        sock.settimeout(WAIT_S)
        told = b""
        with contextlib.suppress(ConnectionError):
            while part := sock.recv(1 << 16):
                told += part
        assert len(told) <= 44  # a challenge, no welcome


def raw(kind: int, tag: int, total: int, offset: int, length: int, magic: bytes = b"NDK1") -> bytes:
    return _FRAME.pack(magic, kind, *(n % 2**64 for n in (tag, total, offset, length)))


BROKEN = [
    raw(WANT, 7, 2**63, 0, 2**63),
    raw(WANT, 7, 2**64 - 1, 0, 1),
    raw(WANT, 7, 4096, 0, -1),
    raw(WANT, 7, 4096, -1, 1),
    raw(WANT, 7, 4096, 4096, 1),
    raw(WANT, 7, 4096, 2**63, 2**63),
    raw(WANT, 7, 4096, 0, 4096, magic=b"NDK2"),
    raw(DATA, 7, 4096, 0, 4096),
    raw(0, 7, 4096, 0, 4096),
    raw(2**32 - 1, 7, 4096, 0, 4096),
]


@pytest.mark.parametrize("words", BROKEN)
def test_a_proved_decode_worker_that_speaks_nonsense_is_cut_off(pair, words):
    with hostile_decode(pair) as sock:
        sending = pair.prefill.post_send(DECODE, send_of(tag=7))
        sock.sendall(words)
        assert is_closed(sock)
    assert isinstance(wait(sending), PeerError)


@pytest.mark.parametrize("length", [1, 4095, 4097, 8192])
def test_a_wish_for_another_number_of_bytes_gets_none(pair, length):
    with hostile_decode(pair) as sock:
        sending = pair.prefill.post_send(DECODE, send_of(tag=7))
        sock.sendall(raw(WANT, 7, length, 0, length))
        assert isinstance(wait(sending), RemoteProtocolError)
        kind = _FRAME.unpack(sock.recv(_FRAME.size, socket.MSG_WAITALL))[1]
        assert kind == 5
    assert pair.is_untouched()


def test_the_same_bytes_are_sent_once(pair):
    with hostile_decode(pair) as sock:
        sending = pair.prefill.post_send(DECODE, send_of(tag=7))
        sock.sendall(raw(WANT, 7, 4096, 0, 4096))
        first = sock.recv(_FRAME.size + 4096, socket.MSG_WAITALL)
        assert first[_FRAME.size :] == pair.sent[:4096].tobytes()
        assert wait(sending) is None
        sock.sendall(raw(WANT, 7, 4096, 0, 4096) + raw(CANCEL, 7, 4096, 0, 4096))
        assert _FRAME.unpack(sock.recv(_FRAME.size, socket.MSG_WAITALL))[1] == GONE


def test_a_wish_for_nothing_takes_nothing_from_the_send(pair):
    with hostile_decode(pair) as sock:
        sending = pair.prefill.post_send(DECODE, send_of(tag=7))
        for offset, length in ((0, 0), (7, 0), (4096, 0), (0, 4096)):
            sock.sendall(raw(WANT, 7, 4096, offset, length))
            answer = sock.recv(_FRAME.size + length, socket.MSG_WAITALL)
            assert answer == raw(DATA, 7, 4096, offset, length) + pair.sent[:length].tobytes()
        assert wait(sending) is None
        assert sending.kv_bytes == 4096


@pytest.mark.parametrize(("offset", "length"), [(0, 8192), (4096, 4096), (0, 1)])
def test_pieces_that_overlap_are_more_than_there_is(pair, offset, length):
    with hostile_decode(pair) as sock:
        sock.sendall(raw(WANT, 7, 8192, 0, 8192))
        sending = pair.prefill.post_send(DECODE, send_of(tag=8, num_bytes=8192))
        words = raw(WANT, 8, 8192, 0, 4096) + raw(WANT, 8, 8192, offset, length)
        sock.sendall(words * 2)
        assert isinstance(wait(sending), RemoteProtocolError) or sending.kv_bytes == 8192


def test_wishes_without_end_are_cut_off(pair):
    with hostile_decode(pair) as sock:
        wishes = b"".join(raw(WANT, tag, 4096, 0, 4096) for tag in range(WISHES_MAX + 1))
        with contextlib.suppress(ConnectionError):
            sock.sendall(wishes)
        assert is_closed(sock)


def test_a_peer_that_takes_nothing_ends_the_send():
    with tcp_pair(4096, times=TcpTimes(silence_s=0.3)) as pair, hostile_decode(pair) as sock:
        total = 16 << 20
        sending = pair.prefill.post_send(DECODE, send_of(tag=7, num_bytes=total))
        sock.sendall(raw(WANT, 7, total, 0, total))
        assert isinstance(wait(sending), PeerTimeout | PeerGone)
        pair.connect()
        assert pair.moves()


def send_of(tag: int, num_bytes: int = 4096) -> Send:
    return Send(tag=tag, runs=runs_of([0], [0], [num_bytes]))


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9])
def test_a_data_port_of_somebody_else_is_not_taken_for_a_workers(words):
    with tcp_pair(times=TcpTimes(proof_s=0.3)) as pair:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def speak() -> None:
                sock, _ = listener.accept()
                with sock:
                    sock.sendall(words)
                    is_closed(sock)

            thread = threading.Thread(target=speak)
            thread.start()
            port = listener.getsockname()[1]
            wrong = msgspec.structs.replace(pair.prefill.local_region(DECODE), port=port)
            with pytest.raises(PeerError):
                pair.decode.connect(PREFILL, wrong, LAYOUT)
            thread.join(WAIT_S)
        assert pair.moves()  # the connection that there was goes on


def test_a_path_that_lets_only_small_packets_through_is_noticed_when_connecting():
    """All but the probe passes."""
    with tcp_pair(times=TcpTimes(proof_s=0.5)) as pair:
        region = pair.prefill.local_region(DECODE)
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def relay() -> None:
                near, _ = listener.accept()
                with near, socket.create_connection((region.host, region.port)) as far:
                    near.settimeout(WAIT_S)
                    far.settimeout(WAIT_S)
                    far.sendall(near.recv(176, socket.MSG_WAITALL))
                    near.sendall(far.recv(44, socket.MSG_WAITALL))
                    far.sendall(near.recv(32, socket.MSG_WAITALL))
                    near.sendall(far.recv(1400, socket.MSG_WAITALL))
                    is_closed(near)

            thread = threading.Thread(target=relay)
            thread.start()
            narrow = msgspec.structs.replace(region, port=listener.getsockname()[1])
            with pytest.raises(PeerTimeout):
                pair.decode.connect(PREFILL, narrow, LAYOUT)
            thread.join(WAIT_S)
        pair.connect()
        assert pair.moves()


def test_a_secret_is_in_no_text():
    with tcp_pair() as pair:
        region = pair.prefill.local_region(DECODE)
        assert region.secret.hex() not in repr(region)
        assert repr(region.secret) not in repr(region)


def test_a_peer_that_was_never_accepted_finds_no_port():
    with closing(KvPool.create(LAYOUT, 1, STRANGER)) as pool, closing(TcpEngine(pool)) as engine:
        assert engine.local_region(PREFILL).port == 0
