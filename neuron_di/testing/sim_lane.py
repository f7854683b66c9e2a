"""A client of the simulation at the end of a lane: it gets tokens as a real one gets bytes.

Where the proxy would write to a socket, the event's text is read again and given to the client,
with the id that the lane has counted for it. What has no text is written by nobody: the client is
given it when something else comes.
"""

from typing import Any, cast

import msgspec

from neuron_di.clock import now_s
from neuron_di.wire import Token
from neuron_di.wire.leg_link import Told, encode_frame
from neuron_di_proxy.emit import Emit
from neuron_di_proxy.histogram import Histogram
from neuron_di_proxy.receipts import RequestRecord
from neuron_di_proxy.token_lane import IS_COMPILED, Lane, Outlet, relay_told

_NUMBER = 0  # of the only leg in a frame
_FRAME_LENGTH_BYTES = 4
_decode_text = msgspec.json.Decoder(str).decode


class SimLane:
    """All tokens of one request, by whichever way they come. `emit` gets each of them once."""

    def __init__(self, record: RequestRecord, emit: Emit, *, is_plain: bool) -> None:
        self._record = record
        self._is_plain = is_plain  # its tokens are nothing but text
        self._emit_now = emit
        self._num_given = 0
        self._outlet = Outlet(-1, cast("Any", None))  # every event is given to `_write`

    def emit(self, token: Token) -> None:
        """A token that took the long way."""
        self._give_textless(token.index)
        self._give(token)

    def make(self, *, is_first: bool) -> Lane | None:
        """A lane for all tokens from the next one on, or for the first one."""
        record = self._record
        if not IS_COMPILED or not self._is_plain or (is_first and record.emitted):
            return None
        return Lane(
            outlet=self._outlet,
            write=self._write,
            before=b"",
            behind=b"",
            due=len(record.emitted),
            record=record,
            ids=record.emitted,
            gaps=Histogram((1.0,)),
            last_s=record.last_token_s,
            begun=(lambda: None) if is_first else None,
        )

    def finish(self) -> None:
        """The answer is complete."""
        self._give_textless(len(self._record.emitted))

    def _write(self, event: bytes) -> None:
        index = len(self._record.emitted) - 1
        self._give_textless(index)
        self._give(
            Token(index=index, token_id=self._record.emitted[index], text=_decode_text(event))
        )

    def _give_textless(self, end: int) -> None:
        for index in range(self._num_given, end):
            self._give(Token(index=index, token_id=self._record.emitted[index], text=""))

    def _give(self, token: Token) -> None:
        self._num_given = token.index + 1
        self._emit_now(token)


def relayed(token: Token, lane: Lane) -> bool:
    """Bring a token to a lane, in a frame of its own. False: it does not take it."""
    told = Told([(_NUMBER, token.index, token.token_id, token.text)], [])
    payload = memoryview(encode_frame(told))[_FRAME_LENGTH_BYTES:]
    others, rest, _ = relay_told(payload, {_NUMBER: lane}, now_s())
    assert rest is None, "it has nothing but a token"
    return not others
