"""Bytes to typed messages and back: msgspec only, a declared type and a size limit each time."""

from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from neuron_di.errors import RemoteProtocolError
from neuron_di.types import RequestId

T = TypeVar("T")

SIGNAL_BYTES_MAX = 8 << 20  # one message on the signal link, see ready_bytes_max
# One leg's document: the client's body, and our fields. A schema is in it twice, as a tool and in
# the grammar, there with its quotes escaped, and so are the ids of what was emitted.
LEG_BYTES_MAX = (16 << 20) + (4 << 20)
EVENT_BYTES_MAX = 16 << 20  # one event of a leg: a long prompt's report included

WORDS_CHARS_MAX = 200  # of why something could not be decoded: it may repeat all that was said

# A request's id as it arrives. Workers remember many, so that none may be large.
BoundedRequestId = Annotated[RequestId, msgspec.Meta(min_length=1, max_length=128)]

# Attempts are few; the bound keeps loops over the earlier ones short whatever a peer says.
BoundedAttempt = Annotated[int, msgspec.Meta(ge=0, le=1000)]

# What the proxy adds up, of all answers: no counter may fall, or be no number from then on.
BoundedCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Decoder(Generic[T]):
    """Decodes one declared type from a peer's bytes, or raises RemoteProtocolError."""

    def __init__(self, message_type: Any, *, bytes_max: int, as_json: bool) -> None:
        self._bytes_max = bytes_max
        self._decoder: Any = (
            msgspec.json.Decoder(message_type) if as_json else msgspec.msgpack.Decoder(message_type)
        )

    def decode(self, raw: bytes | memoryview) -> T:
        if len(raw) > self._bytes_max:
            raise RemoteProtocolError(
                f"message of {len(raw)} bytes, more than the limit of {self._bytes_max}"
            )
        try:
            message: T = self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            words = str(error)[:WORDS_CHARS_MAX]
            raise RemoteProtocolError(f"undecodable message: {words}") from None
        return message


encode_json: Callable[[msgspec.Struct], bytes] = msgspec.json.Encoder().encode
encode_msgpack: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode
