"""What a simulation says when a promise was broken."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "wrong",  # a token, an index or an end that is not the undisturbed run's
    "lost",  # a request that one fault cost, although another worker could have served it
    "hidden",  # a failure reported as success, without an end, or as somebody else's fault
    "stuck",  # no end, or one after the deadline
    "leaked",  # blocks that do not add up, or anything kept when nothing runs any more
    "bug",  # an exception or an error in the log that no fault explains
]


@dataclass(frozen=True, slots=True)
class Failure:
    """`at_s` is virtual time. `request` is whose promise it was, if it was one request's."""

    kind: Kind
    at_s: float
    text: str
    request: str = ""

    def __str__(self) -> str:
        name = f"{self.request}: " if self.request else ""
        return f"{self.kind} at {self.at_s:.3f} s: {name}{self.text}"


Fail = Callable[[Kind, str, str], None]  # kind, text, request
