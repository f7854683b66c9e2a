"""What a check found: one sentence, how bad it is, and what to do about it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

import msgspec

_CHECK = re.compile(r"[a-z]+(\.[a-z0-9_]+)+")

Fact = str | int | float | bool | None | list[Any] | dict[str, Any]
_Facts = Mapping[str, Fact]

_NO_FACTS: _Facts = {}


class Grade(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    NOTE = "note"  # a fact that is neither good nor bad by itself
    WARNING = "warning"  # the server starts, and something will be slower or weaker than it could
    FAILED = "failed"  # the server, or what was asked to be checked, will not work
    SKIPPED = "skipped"  # not looked at, and `says` tells why

    @property
    def needs_mend(self) -> bool:
        return self in (Grade.WARNING, Grade.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check found on a machine.

    `check` is a stable name, the group before the dot, as in `host.memory`. `says` and `mend` are
    a sentence each, without the grade's word; `mend` is there for each warning and each failure.
    `facts` holds the numbers behind the sentence, as JSON has them, with units in their names.
    """

    check: str
    grade: Grade
    says: str
    mend: str = ""
    facts: _Facts = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert _CHECK.fullmatch(self.check), self.check
        assert self.says, self.check
        assert self.mend or not self.grade.needs_mend, f"{self.check} says no mend"

    @classmethod
    def ok(cls, check: str, says: str, *, facts: _Facts = _NO_FACTS) -> Self:
        return cls(check=check, grade=Grade.OK, says=says, facts=facts)

    @classmethod
    def note(cls, check: str, says: str, mend: str = "", *, facts: _Facts = _NO_FACTS) -> Self:
        return cls(check=check, grade=Grade.NOTE, says=says, mend=mend, facts=facts)

    @classmethod
    def warning(cls, check: str, says: str, mend: str, *, facts: _Facts = _NO_FACTS) -> Self:
        return cls(check=check, grade=Grade.WARNING, says=says, mend=mend, facts=facts)

    @classmethod
    def failed(cls, check: str, says: str, mend: str, *, facts: _Facts = _NO_FACTS) -> Self:
        return cls(check=check, grade=Grade.FAILED, says=says, mend=mend, facts=facts)

    @classmethod
    def skipped(cls, check: str, says: str, *, facts: _Facts = _NO_FACTS) -> Self:
        return cls(check=check, grade=Grade.SKIPPED, says=says, facts=facts)

    @property
    def group(self) -> str:
        return self.check.partition(".")[0]

    def encoded(self) -> bytes:
        """As JSON. Names and values of a machine that are not UTF-8 have "?" for such bytes."""
        try:
            return msgspec.json.encode(self)
        except UnicodeEncodeError:
            return msgspec.json.encode(_in_utf8(msgspec.to_builtins(self)))


@dataclass(frozen=True, slots=True)
class Need:
    """Whether something must be there. What keeps it from working is a failure then, and else a
    warning, whose mend also says how to serve `without`, in a sentence."""

    is_needed: bool
    without: str = ""

    def unmet(self, check: str, says: str, mend: str, *, facts: _Facts = _NO_FACTS) -> Finding:
        if self.is_needed:
            return Finding.failed(check, says, mend, facts=facts)
        return Finding.warning(check, says, f"{mend} {self.without}".rstrip(), facts=facts)


def _in_utf8(value: Any) -> Any:
    """The same JSON value; Python has lone surrogates where a name had other bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_in_utf8(key): _in_utf8(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_in_utf8(each) for each in value]
    return value
