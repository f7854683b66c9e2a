"""Ids of requests: 32 hex digits that nobody can guess, as a receipt is found by its id."""

import secrets
from collections.abc import Callable, Iterator

_ID_BYTES = 16
_DRAWN_AT_ONCE = 256  # asking the system costs more than an id's bytes


def _ids() -> Iterator[str]:
    while True:
        digits = secrets.token_hex(_ID_BYTES * _DRAWN_AT_ONCE)
        for start in range(0, len(digits), 2 * _ID_BYTES):
            yield digits[start : start + 2 * _ID_BYTES]


# An id that was never given before.
fresh_id: Callable[[], str] = _ids().__next__
