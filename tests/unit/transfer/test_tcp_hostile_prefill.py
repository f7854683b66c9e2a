"""A prefill worker that proves who it is, and then answers what nobody asked for (B40, B41)."""

import contextlib
import socket
import struct
import threading
from contextlib import closing

import msgspec
import pytest
from tcp_kit import DECODE, LAYOUT, PREFILL, UNTOUCHED, WAIT_S, runs_of, tcp_pair, wait

from neuron_di.clock import Deadline
from neuron_di.errors import PeerError, PeerRefused, PeerTimeout, RemoteProtocolError
from neuron_di.transfer import tcp_proof
from neuron_di.transfer.tcp_engine import TcpTimes
from neuron_di.transfer.tcp_frames import DATA, GONE, WANT
from neuron_di.transfer.tcp_proof import answer
from neuron_di.wire import TcpRegion

_FRAME = struct.Struct("<4sIQQQQ")


def raw(kind: int, tag: int, total: int, offset: int, length: int) -> bytes:
    return _FRAME.pack(b"NDK1", kind, *(n % 2**64 for n in (tag, total, offset, length)))


class HostilePrefill:
    """A prefill worker that proves who it is, and then says what the test wants, once asked."""

    def __init__(
        self,
        own_secret: bytes,
        decode_secret: bytes,
        words: bytes,
        pool_bytes: int = 64 * 4096,
    ) -> None:
        self._secrets = own_secret, decode_secret
        self._words = words
        self._pool_bytes = pool_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.region = TcpRegion(
            host="127.0.0.1",
            port=self._listener.getsockname()[1],
            secret=own_secret,
            num_streams=1,
        )

    def _run(self) -> None:
        sock, _ = self._listener.accept()
        own_secret, decode_secret = self._secrets
        with sock:
            _, welcome = answer(
                sock,
                PREFILL,
                lambda _: (own_secret, decode_secret),
                self._pool_bytes,
                tls=None,
                deadline=Deadline.after(WAIT_S),
            )
            with contextlib.suppress(ConnectionError):  # it is not believed
                sock.sendall(welcome)
                sock.recv(_FRAME.size, socket.MSG_WAITALL)
                sock.sendall(self._words)
            self._is_over.wait(WAIT_S)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(WAIT_S)
        self._listener.close()


ASKED = raw(DATA, 1, 4096, 0, 4096)


@pytest.mark.parametrize(
    "words",
    [
        raw(DATA, 2, 4096, 0, 4096) + bytes(4096),  # a tag that nobody asked for
        raw(DATA, 1, 8192, 0, 8192) + bytes(8192),
        raw(DATA, 1, 4096, 0, 4095) + bytes(4095),
        raw(DATA, 1, 4096, 1, 4095) + bytes(4095),
        raw(DATA, 1, 8192, 4096, 4096) + bytes(4096),
        raw(DATA, 1, 2**63, 0, 2**63) + bytes(1 << 16),
        raw(DATA, 1, 4096, 0, -1) + bytes(1 << 16),
        raw(DATA, 1, 4096, -4096, 4096) + bytes(4096),
        raw(WANT, 1, 4096, 0, 4096),
        raw(GONE, 2, 4096, 0, 4096),
        b"\xff" * 4096,
    ],
)
def test_an_answer_that_was_not_asked_for_writes_nothing(words):
    with tcp_pair(is_connected=False) as pair:
        own = pair.decode.local_region(PREFILL)
        with closing(HostilePrefill(b"p" * 32, own.secret, words)) as prefill:
            pair.decode.connect(PREFILL, prefill.region, LAYOUT)
            token = pair.receive(pair.receive_of(runs_of([0], [8192], [4096])))
            assert isinstance(wait(token), RemoteProtocolError)
            assert pair.is_untouched()
            assert isinstance(wait(pair.receive(pair.whole())), PeerError)


def test_what_comes_behind_an_answer_or_twice_breaks_the_connection_and_writes_nothing():
    words = (ASKED + b"\x11" * 4096) * 2 + b"\x22" * (1 << 16)
    with tcp_pair(is_connected=False) as pair:
        own = pair.decode.local_region(PREFILL)
        with closing(HostilePrefill(b"p" * 32, own.secret, words)) as prefill:
            pair.decode.connect(PREFILL, prefill.region, LAYOUT)
            token = pair.receive(pair.receive_of(runs_of([0], [8192], [4096])))
            assert wait(token) is None
            assert (pair.received[8192:12288] == 0x11).all()
            assert (pair.received[:8192] == UNTOUCHED).all()
            assert (pair.received[12288:] == UNTOUCHED).all()
            late = pair.receive(pair.whole())
            assert isinstance(wait(late), PeerError)
            assert (pair.received[12288:] == UNTOUCHED).all()


def test_too_few_bytes_and_then_silence_end_the_receive():
    with tcp_pair(is_connected=False, times=TcpTimes(silence_s=0.2)) as pair:
        own = pair.decode.local_region(PREFILL)
        with closing(HostilePrefill(b"p" * 32, own.secret, ASKED + b"\x11" * 4095)) as prefill:
            pair.decode.connect(PREFILL, prefill.region, LAYOUT)
            token = pair.receive(pair.receive_of(runs_of([0], [8192], [4096])))
            assert isinstance(wait(token), PeerTimeout)
            assert (pair.received[12287:] == UNTOUCHED).all()


class _Impostor:
    """Listens where a prefill worker should, knows no secret, and says the worker's words."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def region(self, of_worker: TcpRegion) -> TcpRegion:
        return msgspec.structs.replace(of_worker, port=self._listener.getsockname()[1])

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(WAIT_S)
                    sock.recv(tcp_proof._HELLO.size, socket.MSG_WAITALL)
                    sock.sendall(tcp_proof._CHALLENGE.pack(tcp_proof._MAGIC, 1, b"x" * 32))
                    sock.recv(32, socket.MSG_WAITALL)
                    proof = b"p" * 32
                    sock.sendall(tcp_proof._WELCOME.pack(proof, 64 * 4096))
                    sock.sendall(tcp_proof._probe(proof))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_S)


def test_who_cannot_prove_that_it_is_the_prefill_worker_is_not_believed():
    with tcp_pair(is_connected=False) as pair, closing(_Impostor()) as impostor:
        region = impostor.region(pair.prefill.local_region(DECODE))
        with pytest.raises(PeerRefused, match="at its data port is somebody else"):
            pair.decode.connect(PREFILL, region, LAYOUT)


@pytest.mark.parametrize("pool_bytes", [0, 2**62 + 4096, 2**63, 2**64 - 4096])
def test_a_pool_of_an_absurd_size_is_no_connection(pool_bytes):
    with tcp_pair(is_connected=False) as pair:
        own = pair.decode.local_region(PREFILL)
        with (
            closing(HostilePrefill(b"p" * 32, own.secret, b"", pool_bytes)) as prefill,
            pytest.raises(PeerRefused),
        ):
            pair.decode.connect(PREFILL, prefill.region, LAYOUT)
