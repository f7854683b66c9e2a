"""An HTTP response while it is written, whichever server has the connection.

`front.py` writes to a socket of its own, `app.py` hands the bytes to Quart. Whoever answers a
request knows this protocol only, so that both write the same.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from neuron_di_proxy.histogram import Histogram
from neuron_di_proxy.receipts import RequestRecord
from neuron_di_proxy.token_lane import Lane

UNREAD_BYTES_MAX = 4 << 20  # of a stream that its client does not take, beside its large pieces
LARGE_PIECE_BYTES = 64 << 10  # a piece of more is a prompt's report, of which a choice has one
EVENT_STREAM = ("content-type", "text/event-stream")
PING = b": ping\n\n"  # an SSE comment: it keeps connections open that middle boxes think idle

Headers = Sequence[tuple[str, str]]  # lower-case names, in the order they are sent


class Reply(Protocol):
    """One response: `begin`, `write` as often as there is something, `end`. Owned by one task.

    Nothing here waits. What a client does not take is kept, up to a bound; beyond it, or when it
    takes nothing for `send_timeout_s`, the request is ended as if its client had left. A client
    that leaves cancels the task that answers it; what is written after that is dropped.
    """

    has_begun: bool

    def begin(
        self, status: int, headers: Headers, *, length: int | None, first: bytes = b""
    ) -> None:
        """Send the head, with the `first` piece of the body if that is there.

        `length` is the whole body's; None: it is streamed, as long as it takes.
        """
        ...

    def write(self, data: bytes) -> None:
        """Send a piece of the body. Of a stream, each piece is one or more whole SSE events."""
        ...

    def lane(
        self,
        frame: tuple[bytes, bytes],
        record: RequestRecord,
        gaps: Histogram,
    ) -> Lane | None:
        """What takes tokens here by itself, as events of their text in this frame, if that can be.

        Between `begin` and `end`; what else is written may come between.
        """
        ...

    def first_lane(
        self,
        frame: tuple[bytes, bytes],
        record: RequestRecord,
        gaps: Histogram,
        headers: Headers,
        on_begun: Callable[[], None],
    ) -> Lane | None:
        """What takes the first token only, if that can be, and begins a stream with it.

        `on_begun` is called when it has. Whoever begins the response before closes the lane.
        """
        ...

    def end(self, last: bytes = b"") -> None:
        """Send the `last` piece, if there is one: the body is complete."""
        ...
