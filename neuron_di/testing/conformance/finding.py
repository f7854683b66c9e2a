"""What a case can find."""

from typing import Any, NamedTuple

VALUE_CHARS_MAX = 120


class Fault(NamedTuple):
    """A rule that one response breaks on its own. `where` is a JSON path, or a part in words."""

    where: str
    what: str


class Difference(NamedTuple):
    """Two documents that should be equal are not. A value may be `ABSENT`."""

    path: str
    left: Any
    right: Any


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


def shorten(value: Any) -> str:
    """A value to be read by people, not longer than VALUE_CHARS_MAX."""
    try:
        words = repr(value)
    except RecursionError:
        words = "(nested too deeply to be shown)"
    return words if len(words) <= VALUE_CHARS_MAX else f"{words[: VALUE_CHARS_MAX - 1]}…"
