"""Lanes to sockets whose other ends are here, and the same tokens as Python writes them."""

import socket
from types import SimpleNamespace

import msgspec

from neuron_di.wire.leg_link import PlainToken, told_decoder
from neuron_di_proxy.histogram import Histogram
from neuron_di_proxy.token_lane import Lane, Outlet

BEFORE, BEHIND = b'data: {"id":"a","delta":{"content":', b"}}\n\n"
BOUNDS = (0.001, 0.01, 0.1, 1)


def payload_of(tokens: list[PlainToken], events: bytes = b"\x90") -> bytes:
    """A frame's payload: `Told`, whose events may be any bytes."""
    return b"\x92" + msgspec.msgpack.encode(tokens) + events


def tokens_in(payload: bytes) -> list[PlainToken]:
    """The tokens of a payload that has just one byte of header, as msgspec reads them."""
    return told_decoder.decode(payload).tokens


def event_of(text: str) -> bytes:
    return BEFORE + msgspec.json.encode(text) + BEHIND if text else b""


def chunk_of(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event) if event else b""


def chunks_of(texts: list[str]) -> bytes:
    return b"".join(chunk_of(event_of(text)) for text in texts)


class HeldTransport:
    """A transport that keeps what it is given. As much of it waits as a test says."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.num_waiting = 0
        self.is_over = self.is_aborted = False
        self.num_asked = 0

    def write(self, data: bytes) -> None:
        assert type(data) is bytes
        self.written.append(data)

    def abort(self) -> None:
        self.is_over = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_over

    def get_write_buffer_size(self) -> int:
        self.num_asked += 1
        return self.num_waiting


class Rig:
    """A socket, its other end, an outlet, and what lanes to it count."""

    def __init__(self, *, has_fd: bool = True) -> None:
        self.socket, self.client = socket.socketpair()
        self.client.setblocking(False)
        self.transport = HeldTransport()
        self.outlet = Outlet(self.socket.fileno() if has_fd else -1, self.transport)
        self.record = SimpleNamespace(last_token_s=0.0)
        self.ids: list[int] = []
        self.gaps = Histogram(BOUNDS)
        self.events: list[bytes] = []  # of lanes that could not send them

    def lane(self, *, due: int = 0, last_s: float = 0.0, **changed: object) -> Lane:
        parts = {
            "outlet": self.outlet,
            "write": self.events.append,
            "before": BEFORE,
            "behind": BEHIND,
            "due": due,
            "record": self.record,
            "ids": self.ids,
            "gaps": self.gaps,
            "last_s": last_s,
        }
        return Lane(**parts | changed)

    def received(self) -> bytes:
        """All that came to the client since it was last asked."""
        data = bytearray()
        while True:
            try:
                piece = self.client.recv(1 << 20)
            except BlockingIOError:
                return bytes(data)
            if not piece:
                return bytes(data)
            data += piece

    def close(self) -> None:
        self.socket.close()
        self.client.close()
