"""The leg link: one connection of a proxy process to a worker process, for all their legs.

The proxy connects to the port where the worker also serves HTTP, and says `MAGIC`. From then on
both sides send frames: the payload's length in four bytes, then the payload in msgpack.

    proxy  -> worker   OpenLeg(number, kind, document) | CloseLeg(number) | ProxyAlive
    worker -> proxy    Told(tokens, events, status)    an empty one: the worker is alive

A leg's number is the proxy's, counts up and is never used twice on one link. What all legs have
to say after one step of the engine is one `Told`: most of it as `PlainToken`, whatever has more
to say as an event. Within a leg, plain tokens of a `Told` come before its events. A terminal
event, or CloseLeg, ends a leg; what either side still sends of it after that is ignored. The end
of the link ends all its legs.

What says that the worker is alive says how it is, too: once a second, once the link is greeted,
and when its state changes. A proxy that hears it need not ask.
"""

from collections.abc import Sequence
from struct import Struct
from typing import Annotated, Literal

import msgspec

from neuron_di.errors import RemoteProtocolError
from neuron_di.wire.announce import WorkerStatus
from neuron_di.wire.codec import EVENT_BYTES_MAX, LEG_BYTES_MAX, Decoder
from neuron_di.wire.legs import LegEvent

# No HTTP request begins so: its first byte tells the two apart.
MAGIC = b"\0neuron-di legs 1\n"

# Both sides say so often that they are alive: what queues is not what died.
ALIVE_INTERVAL_S = 1.0

_LENGTH = Struct(">I")
_LENGTH_BYTES = _LENGTH.size
FROM_PROXY_BYTES_MAX = LEG_BYTES_MAX + 1024
# One event may be as large as it likes to; the tokens of a step beside it are small.
FROM_WORKER_BYTES_MAX = EVENT_BYTES_MAX + (8 << 20)

LegKind = Literal["prefill", "decode", "whole"]
LegNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class OpenLeg(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Answer a leg. `document` is a PrefillLeg or DecodeLeg in JSON."""

    number: LegNumber
    kind: LegKind
    document: bytes

    def __repr__(self) -> str:
        return f"OpenLeg({self.number}, {self.kind}, {len(self.document)} bytes)"


class CloseLeg(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """The proxy has no use for this leg any more."""

    number: LegNumber


class ProxyAlive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """The proxy lives and reads."""


FromProxy = OpenLeg | CloseLeg | ProxyAlive

# A token that has nothing but its text: leg, index, token id, text. A tuple, as tens of thousands
# are read each second.
PlainToken = tuple[int, int, int, str]


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What a worker's legs have to say at one moment, or how the worker is."""

    tokens: list[PlainToken]
    events: list[tuple[int, LegEvent]]
    status: WorkerStatus | None = None

    def __repr__(self) -> str:
        return f"Told({len(self.tokens)} tokens, {len(self.events)} events)"


from_proxy_decoder: Decoder[FromProxy] = Decoder(
    FromProxy, bytes_max=FROM_PROXY_BYTES_MAX, as_json=False
)
told_decoder: Decoder[Told] = Decoder(Told, bytes_max=FROM_WORKER_BYTES_MAX, as_json=False)

_NO_BYTES = b"\xc4\0"  # msgpack's
_BYTES_FOLLOW = b"\xc6"  # their number in four bytes, then they

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: FromProxy | Told) -> bytearray:
    """A message as it is sent: its length, then itself."""
    frame = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, frame, _LENGTH_BYTES)
    _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH_BYTES)
    return frame


def encode_open(
    number: int, kind: LegKind, document: Sequence[bytes | memoryview]
) -> list[bytes | bytearray | memoryview]:
    """OpenLeg as it is sent, its document in pieces: where these are several, none is copied."""
    if len(document) == 1:
        return [encode_frame(OpenLeg(number, kind, bytes(document[0])))]
    num_bytes = sum(map(len, document))
    frame = encode_frame(OpenLeg(number, kind, b""))
    del frame[-len(_NO_BYTES) :]
    frame += _BYTES_FOLLOW + _LENGTH.pack(num_bytes)
    _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH_BYTES + num_bytes)
    return [frame, *document]


class FrameReader:
    """Cuts what arrives into frames' payloads. Keeps no more than one frame that is incomplete."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.partial = bytearray()  # what came of a frame that is not whole yet
        self._num_needed = _LENGTH_BYTES

    def feed(self, data: bytes) -> list[memoryview]:
        """The payloads that `data` completes. RemoteProtocolError: a frame larger than allowed."""
        if self.partial:
            self.partial += data
            if len(self.partial) < self._num_needed:
                return []
            data, self.partial = bytes(self.partial), bytearray()
        payloads: list[memoryview] = []
        view = memoryview(data)
        start, end = 0, len(data)
        while True:
            payload = start + _LENGTH_BYTES
            if payload > end:
                self._num_needed = _LENGTH_BYTES
                break
            (num_bytes,) = _LENGTH.unpack_from(data, start)
            if num_bytes > self._bytes_max:
                raise RemoteProtocolError(f"a frame of {num_bytes} bytes, or no frame at all")
            if payload + num_bytes > end:
                self._num_needed = _LENGTH_BYTES + num_bytes
                break
            payloads.append(view[payload : payload + num_bytes])
            start = payload + num_bytes
        if start < end:
            self.partial += view[start:]
        return payloads
