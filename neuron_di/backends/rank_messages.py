"""What the first rank of a worker and its other ranks say to each other, beside the tensors.

    first rank                        another rank, a process that it started
    Start              ->
                       <-             Loaded             its weights are there
    Connect            ->
                       <-             Connected          to all others, for tensors
    OpenPool, with fd  ->
                       <-             PoolOpened
    RunChunk           ->                                no answer: the tensors are one
    ClosePool          ->
                       <-             PoolClosed
                       <-             Failed             its last words

The end of the connection is the end of a rank: neither outlives the other.
"""

import contextlib
import os
import socket
import struct
from typing import TypeVar

import msgspec
from msgspec.msgpack import Decoder

from neuron_di.errors import RemoteProtocolError
from neuron_di.kv import KvLayout
from neuron_di.kv.rank_pool import PoolPlace
from neuron_di.models import ModelSpec

_LENGTH = struct.Struct("<Q")
_MESSAGE_BYTES_MAX = 1 << 28


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    rank: int
    parent_pid: int
    folder: str
    spec: ModelSpec  # of the whole model
    layout: KvLayout
    num_threads: int
    timeout_s: float  # how long a rank waits for another's tensor


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag="connect"):
    pass


class OpenPool(msgspec.Struct, frozen=True, kw_only=True, tag="open_pool"):
    place: PoolPlace
    num_positions: int  # the longest request


class ClosePool(msgspec.Struct, frozen=True, kw_only=True, tag="close_pool"):
    pass


class RunChunk(msgspec.Struct, frozen=True, kw_only=True, tag="run_chunk"):
    token_ids: list[int]
    start: int
    block_ids: list[int]
    with_logits: bool
    reads_logits: bool = False

    def __repr__(self) -> str:
        return f"RunChunk({len(self.token_ids)} positions from {self.start})"


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    pass


class Connected(msgspec.Struct, frozen=True, kw_only=True, tag="connected"):
    pass


class PoolOpened(msgspec.Struct, frozen=True, kw_only=True, tag="pool_opened"):
    pass


class PoolClosed(msgspec.Struct, frozen=True, kw_only=True, tag="pool_closed"):
    pass


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    reason: str
    is_config: bool = False  # it could not start as configured


Order = Start | Connect | OpenPool | ClosePool | RunChunk
Reply = Loaded | Connected | PoolOpened | PoolClosed | Failed

order_decoder: Decoder[Order] = Decoder(Order)
reply_decoder: Decoder[Reply] = Decoder(Reply)

T = TypeVar("T")


class Channel:
    """One end of a connection between two processes of one worker. Owns the socket."""

    def __init__(self, sock: socket.socket, *, send_timeout_s: float) -> None:
        self._sock = sock
        seconds = struct.pack("@ll", int(send_timeout_s), 0)
        # Not settimeout: it would hold for receiving, too, which may take for ever.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def send(self, message: Order | Reply, fd: int | None = None) -> None:
        """Send a message, and a copy of an open file. OSError when the other end takes nothing."""
        data = msgspec.msgpack.encode(message)
        data = _LENGTH.pack(len(data)) + data
        sent = socket.send_fds(self._sock, [data], [] if fd is None else [fd])
        self._sock.sendall(memoryview(data)[sent:])

    def receive(self, decoder: Decoder[T]) -> tuple[T, int | None]:
        """Wait for the next message; the caller owns the open file that came with it.

        EOFError at the end of the connection.
        """
        head, fds, _, _ = socket.recv_fds(self._sock, _LENGTH.size, 1)
        try:
            head += self._receive(_LENGTH.size - len(head))
            (length,) = _LENGTH.unpack(head)
            if length > _MESSAGE_BYTES_MAX:
                raise RemoteProtocolError(f"a message of {length} bytes")
            message = decoder.decode(self._receive(length))
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, msgspec.DecodeError):
                raise RemoteProtocolError(f"a message that is none: {error}") from None
            raise
        return message, fds[0] if fds else None

    def close(self) -> None:
        """End the connection; a `receive` that waits, on another thread, ends too."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _receive(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            count = self._sock.recv_into(view)
            if count == 0:
                raise EOFError
            view = view[count:]
        return bytes(data)
