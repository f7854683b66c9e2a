"""The connection between the two ends of `bench-transfer`: one TCP stream, one key.

    serving end    ->  magic, a random challenge
    measuring end  ->  a challenge of its own, and a proof that it has the key
    serving end    ->  its proof
    then frames, both ways: length, proof, message

Every proof covers both challenges, and each frame's also its direction and number: what was
recorded, reflected, changed or reordered is refused. Nothing of a peer is decoded before its proof
was checked. Messages are authenticated, not encrypted: they are about random bytes.
"""

import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

import msgspec

from neuron_di.clock import Deadline
from neuron_di.errors import PeerGone, PeerRefused, PeerTimeout, RemoteProtocolError
from neuron_di.transfer_bench.messages import FRAME_BYTES_MAX
from neuron_di.wire import Decoder, encode_msgpack

HELLO_TIMEOUT_S = 5.0
KEY_CHARS_MIN = 20
_MAGIC = b"NDIXFER1"
_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
_SERVING, _MEASURING = b"S", b"M"

T = TypeVar("T")


def make_key() -> str:
    """A key for one run: text that can be pasted."""
    return secrets.token_urlsafe(32)


class ControlLink:
    """One authenticated connection. Owns the socket. Used by one thread."""

    def __init__(self, sock: socket.socket, key: bytes, *, is_serving: bool) -> None:
        self._socket = sock
        self._key = key
        self._mine, self._theirs = (_SERVING, _MEASURING) if is_serving else (_MEASURING, _SERVING)
        self._num_sent = 0
        self._num_received = 0

    @staticmethod
    def answer(sock: socket.socket, key: str) -> "ControlLink":
        """Serving end. PeerRefused where the other end does not have the key."""
        return _hello(sock, lambda deadline: _answer(sock, key, deadline))

    @staticmethod
    def ask(host: str, port: int, key: str) -> "ControlLink":
        """Measuring end: connect. PeerGone, PeerTimeout, or PeerRefused without the right key."""
        try:
            sock = socket.create_connection((host, port), HELLO_TIMEOUT_S)
        except (OSError, UnicodeError) as error:  # idna refuses some names
            raise PeerGone(f"nothing serves bench-transfer at {host}:{port}: {error}") from None
        return _hello(sock, lambda deadline: _ask(sock, key, deadline))

    @property
    def local_host(self) -> str:
        """The address by which the other end reaches this one."""
        host: str = self._socket.getsockname()[0]
        return host

    def send(self, message: msgspec.Struct) -> None:
        """PeerGone when the other end has gone. Waits as long as `receive` last did."""
        body = encode_msgpack(message)
        proof = self._proof(self._mine, self._num_sent, body)
        self._num_sent += 1
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + proof + body)
        except OSError as error:
            raise PeerGone(f"the other end of bench-transfer is gone: {error}") from None

    def receive(self, decoder: Decoder[T], timeout_s: float) -> T:
        """The next message. PeerGone, PeerTimeout or RemoteProtocolError."""
        deadline = Deadline.after(timeout_s)
        (num_bytes,) = _LENGTH.unpack(_read(self._socket, _LENGTH.size, deadline))
        if num_bytes > FRAME_BYTES_MAX:
            raise RemoteProtocolError(f"a frame of {num_bytes} bytes")
        proof = _read(self._socket, _PROOF_BYTES, deadline)
        body = _read(self._socket, num_bytes, deadline)
        if not hmac.compare_digest(proof, self._proof(self._theirs, self._num_received, body)):
            raise RemoteProtocolError("a frame that the other end did not send")
        self._num_received += 1
        return decoder.decode(body)

    def close(self) -> None:
        self._socket.close()

    def _proof(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + _NUMBER.pack(number) + body, "sha256")


def _hello(sock: socket.socket, talk: Callable[[Deadline], T]) -> T:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return talk(Deadline.after(HELLO_TIMEOUT_S))
    except BaseException:
        sock.close()
        raise


def _answer(sock: socket.socket, key: str, deadline: Deadline) -> ControlLink:
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    _write(sock, _MAGIC + challenge, deadline)
    theirs = _read(sock, _CHALLENGE_BYTES, deadline)
    session_key = _session_key(key, challenge, theirs)
    proof = _read(sock, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, hmac.digest(session_key, _MEASURING, "sha256")):
        raise PeerRefused("the other end does not have the key of this bench-transfer")
    _write(sock, hmac.digest(session_key, _SERVING, "sha256"), deadline)
    return ControlLink(sock, session_key, is_serving=True)


def _ask(sock: socket.socket, key: str, deadline: Deadline) -> ControlLink:
    hello = _read(sock, len(_MAGIC) + _CHALLENGE_BYTES, deadline)
    if not hello.startswith(_MAGIC):
        raise PeerRefused("what answers there is no bench-transfer of this version")
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    session_key = _session_key(key, hello[len(_MAGIC) :], challenge)
    _write(sock, challenge + hmac.digest(session_key, _MEASURING, "sha256"), deadline)
    try:
        proof = _read(sock, _PROOF_BYTES, deadline)
    except PeerGone:
        raise PeerRefused("the serving end refused the key") from None
    if not hmac.compare_digest(proof, hmac.digest(session_key, _SERVING, "sha256")):
        raise PeerRefused("what answers there does not have the key")
    return ControlLink(sock, session_key, is_serving=False)


def _session_key(key: str, serving_challenge: bytes, measuring_challenge: bytes) -> bytes:
    return hmac.digest(key.encode(), _MAGIC + serving_challenge + measuring_challenge, "sha256")


def _write(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    try:
        sock.settimeout(max(0.001, deadline.remaining_s()))
        sock.sendall(data)
    except OSError as error:
        raise PeerGone(f"the other end of bench-transfer is gone: {error}") from None


def _read(sock: socket.socket, num_bytes: int, deadline: Deadline) -> bytes:
    data = bytearray(num_bytes)
    view, num_read = memoryview(data), 0
    while num_read < num_bytes:
        try:
            sock.settimeout(max(0.001, deadline.remaining_s()))
            count = sock.recv_into(view[num_read:])
        except TimeoutError:
            raise PeerTimeout("the other end of bench-transfer is silent") from None
        except OSError as error:
            raise PeerGone(f"the other end of bench-transfer is gone: {error}") from None
        if count == 0:
            raise PeerGone("the other end of bench-transfer closed the connection")
        num_read += count
    return bytes(data)
