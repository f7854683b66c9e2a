"""How the two ends of a data connection show each other who they are.

    decode                                 prefill
    Hello  who, whom, which stream, nonce ->
                                          <-  Challenge  nonce
    Proof  HMAC                           ->
                                          <-  Welcome    HMAC, size of the pool, probe

The key of both HMACs is made of both ends' secrets, which travelled over the encrypted signal link
and are of this pair alone: who knows one of another pair's knows nothing of this one's.
Each HMAC covers every byte that was said before, both incarnations among them, and the
certificate where there is one. The probe is larger than a packet: a path that lets only small ones
through is noticed here, not by a request. All messages have a fixed size.
"""

import hashlib
import hmac
import secrets
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass

from neuron_di.clock import Deadline
from neuron_di.errors import PeerRefused, RemoteProtocolError, StaleIncarnation
from neuron_di.transfer.tcp_tls import NO_CERTIFICATE, Tls, digest_of
from neuron_di.types import Incarnation

_MAGIC = b"NDIKVTC1"
_HELLO = struct.Struct("<8sQII64s64s32s")  # attempt, index, number of streams, who, whom, nonce
_CHALLENGE = struct.Struct("<8sI32s")  # whether it is the one that was meant, nonce
_WELCOME = struct.Struct("<32sQ")  # proof, bytes of the pool
_MAC_BYTES = 32
_NONCE_BYTES = 32
_PROBE_BYTES = 64 << 10
STREAMS_MAX = 64
POOL_BYTES_MAX = 1 << 62  # offsets are signed, of 64 bits, and are added to


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A decode worker's word on a connection; true once it is proved.

    `attempt` grows with each time that this process connects: streams of an earlier one are late.
    """

    attempt: int
    index: int
    num_streams: int
    decode: Incarnation
    prefill: Incarnation


def dial(
    sock: socket.socket,
    hello: Hello,
    *,
    decode_secret: bytes,
    prefill_secret: bytes,
    deadline: Deadline,
) -> int:
    """Decode side, on a connected socket: prove and be proved. Returns the bytes of the pool.

    PeerRefused where the other end is not who it should be, StaleIncarnation where it says so.
    """
    raw_hello = _pack_hello(hello)
    _send(sock, raw_hello, deadline)
    try:
        raw_challenge = _read(sock, _CHALLENGE.size, deadline)
        magic, is_it, _ = _CHALLENGE.unpack(raw_challenge)
        if magic != _MAGIC:
            raise PeerRefused("at its data port is no worker")
        if not is_it:
            raise StaleIncarnation("at its data port is another process")
        said = raw_hello + raw_challenge + _certificate(sock, None)
        key = _key(prefill_secret, decode_secret)
        _send(sock, _mac(key, b"decode", said), deadline)
        proof, pool_bytes = _WELCOME.unpack(_read(sock, _WELCOME.size, deadline))
        expected = _mac(key, b"prefill", said + pool_bytes.to_bytes(8, "little"))
        if not hmac.compare_digest(proof, expected):
            raise PeerRefused("at its data port is somebody else")
        if not 1 <= pool_bytes <= POOL_BYTES_MAX:
            raise PeerRefused("its pool is of a size that no pool has")
        if _read(sock, _PROBE_BYTES, deadline) != _probe(proof):
            raise PeerRefused("its data port sends other bytes than it should")
    except ConnectionError:
        raise PeerRefused("its data port closed the connection without a proof") from None
    assert isinstance(pool_bytes, int)
    return pool_bytes


def answer(
    sock: socket.socket,
    own: Incarnation,
    secrets_of: Callable[[Incarnation], tuple[bytes, bytes] | None],
    pool_bytes: int,
    *,
    tls: Tls | None,
    deadline: Deadline,
) -> tuple[Hello, bytes]:
    """Prefill side, on an accepted socket: (the proved Hello, what Welcome to send when ready).

    `secrets_of` a decode worker are prefill's own, for it, and the worker's. PeerRefused where
    it is not proved. Nothing is told to whom no secrets belong.
    """
    raw_hello = _read(sock, _HELLO.size, deadline)
    hello = _read_hello(raw_hello)
    both = secrets_of(hello.decode)
    if both is None:
        raise PeerRefused("an unknown worker at the data port")
    is_it = hello.prefill == own
    raw_challenge = _CHALLENGE.pack(_MAGIC, is_it, secrets.token_bytes(_NONCE_BYTES))
    _send(sock, raw_challenge, deadline)
    if not is_it:
        raise PeerRefused("a worker at the data port means another process")
    said = raw_hello + raw_challenge + _certificate(sock, tls)
    key = _key(*both)
    if not hmac.compare_digest(_read(sock, _MAC_BYTES, deadline), _mac(key, b"decode", said)):
        raise PeerRefused("a worker at the data port has no proof")
    proof = _mac(key, b"prefill", said + pool_bytes.to_bytes(8, "little"))
    return hello, _WELCOME.pack(proof, pool_bytes) + _probe(proof)


def _pack_hello(hello: Hello) -> bytes:
    who, whom = hello.decode.encode(), hello.prefill.encode()
    if not 0 < len(who) <= 64 or not 0 < len(whom) <= 64:
        raise StaleIncarnation("an incarnation that no worker has")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return _HELLO.pack(_MAGIC, hello.attempt, hello.index, hello.num_streams, who, whom, nonce)


def _read_hello(raw: bytes) -> Hello:
    magic, attempt, index, num_streams, who, whom, _ = _HELLO.unpack(raw)
    if magic != _MAGIC or not index < num_streams <= STREAMS_MAX:
        raise RemoteProtocolError("at the data port came what is no hello")
    try:
        decode, prefill = (name.rstrip(b"\0").decode("ascii") for name in (who, whom))
    except UnicodeDecodeError:
        raise RemoteProtocolError("at the data port came what is no hello") from None
    return Hello(
        attempt=attempt,
        index=index,
        num_streams=num_streams,
        decode=Incarnation(decode),
        prefill=Incarnation(prefill),
    )


def pair_secret(own_secret: bytes, peer: Incarnation) -> bytes:
    """What a worker tells this peer, and no other."""
    return hmac.digest(own_secret, b"neuron-di kv tcp pair\0" + peer.encode(), "sha256")


def _key(prefill_secret: bytes, decode_secret: bytes) -> bytes:
    return hashlib.sha256(b"neuron-di kv tcp 1" + prefill_secret + decode_secret).digest()


def _mac(key: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + said, "sha256")


def _probe(proof: bytes) -> bytes:
    return hashlib.shake_128(proof).digest(_PROBE_BYTES)


def _certificate(sock: socket.socket, own: Tls | None) -> bytes:
    """The digest of prefill's certificate: its own, or the one that it showed."""
    if own is not None:
        return own.certificate_digest
    if isinstance(sock, ssl.SSLSocket):
        return digest_of(sock.getpeercert(binary_form=True))
    return NO_CERTIFICATE


def _send(sock: socket.socket, message: bytes, deadline: Deadline) -> None:
    sock.settimeout(max(deadline.remaining_s(), 1e-3))
    sock.sendall(message)


def _read(sock: socket.socket, num_bytes: int, deadline: Deadline) -> bytes:
    """TimeoutError when the deadline passes, ConnectionError when it was closed."""
    parts = bytearray()
    while len(parts) < num_bytes:
        if deadline.has_passed():
            raise TimeoutError("no proof in time")
        sock.settimeout(max(deadline.remaining_s(), 1e-3))
        part = sock.recv(num_bytes - len(parts))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        parts += part
    return bytes(parts)
