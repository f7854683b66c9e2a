"""What one part of the device check found. The standard library only, and JSON at both ends."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

State = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. `target` is a key of TARGETS; empty: nothing was promised of it."""

    target: str
    label: str  # what it is of: model, batch, shape
    value: float


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of words, the first column's to the left, the others' to the right."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, slots=True)
class Origin:
    """What ran, and where. Parts of one report may come from several runs."""

    source: str  # the commit, or a digest of the files
    machine: str
    command: str
    is_rehearsal: bool  # without a GPU: its figures mean nothing


@dataclass(slots=True, kw_only=True)
class PartResult:
    """One part. `reason` says why it did not pass; a part that was cut off keeps what it had."""

    name: str
    origin: Origin
    started_unix_s: float
    state: State = "failed"
    reason: str = "it did not end"
    wall_s: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: list[str] = field(default_factory=list)  # names of files beside the report
    last_lines: list[str] = field(default_factory=list)  # of its output, where it failed

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """KeyError or TypeError where it is none."""
        return cls(
            **{
                **fields,
                "origin": Origin(**fields["origin"]),
                "figures": [Figure(**each) for each in fields["figures"]],
                "tables": [Table(**each) for each in fields["tables"]],
            }
        )
