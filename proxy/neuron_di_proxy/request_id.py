"""Ids of requests: 32 hex digits that nobody can guess, as a receipt is found by its id."""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping

from neuron_di.errors import BadRequest

_ID_BYTES = 16
_DRAWN_AT_ONCE = 256  # asking the system costs more than an id's bytes
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # printable, and safe in a header and a log


def _ids() -> Iterator[str]:
    while True:
        digits = secrets.token_hex(_ID_BYTES * _DRAWN_AT_ONCE)
        for start in range(0, len(digits), 2 * _ID_BYTES):
            yield digits[start : start + 2 * _ID_BYTES]


# An id that was never given before.
fresh_id: Callable[[], str] = _ids().__next__


def client_id_of(headers: Mapping[str, str]) -> str | None:
    """The id that a client gave its request, if it did. BadRequest when it cannot be echoed."""
    given = headers.get("x-request-id")
    if given is not None and _CLIENT_ID.fullmatch(given) is None:
        raise BadRequest(
            "X-Request-Id may have 1 to 128 letters, digits and ._:/+=@-", param="X-Request-Id"
        )
    return given
