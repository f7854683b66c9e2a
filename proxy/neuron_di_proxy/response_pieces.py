"""A response's body in pieces, so that a deadline is for a piece of it and not for all."""

from collections.abc import Iterator
from typing import cast

from hypercorn.typing import ASGISendEvent, HTTPResponseBodyEvent

from neuron_di_proxy.reply import LARGE_PIECE_BYTES

PIECE_BYTES = 2 * LARGE_PIECE_BYTES  # large ones still: they do not count as unread


def pieces_of(event: ASGISendEvent) -> Iterator[ASGISendEvent]:
    """What to send in place of `event`: the event itself, unless it is a large body."""
    body = event["body"] if event["type"] == "http.response.body" else b""
    if len(body) <= PIECE_BYTES:
        yield event
        return
    whole = cast("HTTPResponseBodyEvent", event)
    for start in range(0, len(body), PIECE_BYTES):
        end = start + PIECE_BYTES
        is_last = end >= len(body)
        yield HTTPResponseBodyEvent(
            type="http.response.body",
            body=body[start:end],
            more_body=bool(whole["more_body"]) or not is_last,
        )
