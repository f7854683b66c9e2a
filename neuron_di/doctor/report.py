"""What the doctor found: for a person, line by line as it is found, and as JSON at the end.

warning  host.memlock   8 MiB of memory may be locked
                        → Set the limit memlock to unlimited for this user.
"""

import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Self

import msgspec
from rich.console import Console
from rich.text import Text

from neuron_di.doctor.amounts import counted
from neuron_di.doctor.finding import Finding, Grade
from neuron_di.terminal_text import printable
from neuron_di.version import __version__

FORMAT = 1
_STYLES = {
    Grade.OK: "green",
    Grade.NOTE: "",
    Grade.WARNING: "yellow",
    Grade.FAILED: "bold red",
    Grade.SKIPPED: "dim",
}
_WORST_FIRST = (Grade.FAILED, Grade.WARNING, Grade.NOTE, Grade.OK, Grade.SKIPPED)
_NOUNS = (Grade.WARNING, Grade.NOTE)
_GRADE_CHARS = max(map(len, Grade))
_CHECK_CHARS = 22
_WORDS_CHARS_MIN = 24  # on a narrower terminal lines are broken by it
_WORDS_CHARS_MAX = 110
_GAP = "  "
_ARROW = "→ "


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of a run, in the order of the checks."""

    is_well: bool  # nothing failed
    counts: dict[str, int]  # of findings, by grade
    duration_s: float
    findings: Sequence[Finding]
    version: str = __version__
    format: int = FORMAT

    @classmethod
    def of(cls, findings: Sequence[Finding], duration_s: float) -> Self:
        counted = Counter(finding.grade for finding in findings)
        return cls(
            is_well=counted[Grade.FAILED] == 0,
            counts={grade.value: counted[grade] for grade in Grade},
            duration_s=round(duration_s, 3),
            findings=findings,
        )

    def json(self) -> str:
        """One document, with the same keys each time."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


class FindingPrinter:
    """Prints findings on standard output, as wide as a terminal is; elsewhere a line is a line."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._words_chars: int | None = None
        if self._console.is_terminal:
            room = self._console.width - len(_GAP) * 2 - _GRADE_CHARS - _CHECK_CHARS - 1
            self._words_chars = min(max(room, _WORDS_CHARS_MIN), _WORDS_CHARS_MAX)

    def show(self, finding: Finding) -> None:
        """The sentence, and the mend below it."""
        style = _STYLES[finding.grade]
        start = f"{finding.grade:<{_GRADE_CHARS}}{_GAP}{finding.check:<{_CHECK_CHARS}}{_GAP}"
        lines = self._broken(finding.says, "")
        if finding.mend:
            lines += self._broken(finding.mend, _ARROW)
        for index, line in enumerate(lines):
            text = Text(start if index == 0 else " " * len(start))
            if index == 0:
                text.stylize(style, 0, _GRADE_CHARS)
            self._console.print(text.append(line, "dim" * (finding.grade is Grade.SKIPPED)))

    def show_summary(self, report: Report) -> None:
        """How many of which grade, and the names of what failed."""
        words = [
            counted(num, grade) if grade in _NOUNS else f"{num} {grade}"
            for grade in _WORST_FIRST
            if (num := report.counts[grade])
        ]
        counts = ", ".join(words) or "nothing was looked at"
        self._console.print(Text(f"\n{counts}, in {report.duration_s:.1f} s"))
        failed = [each.check for each in report.findings if each.grade is Grade.FAILED]
        if failed:
            names = ", ".join(dict.fromkeys(failed))
            self._console.print(Text(f"failed: {names}", _STYLES[Grade.FAILED]))

    def _broken(self, words: str, first: str) -> list[str]:
        words = first + printable(words)
        if self._words_chars is None:
            return [words]
        return textwrap.wrap(
            words,
            self._words_chars,
            subsequent_indent=" " * len(first),
            break_on_hyphens=False,
            break_long_words=False,  # a path or a command that is cut cannot be copied
        )


class Doing:
    """Says on standard error, where that is a terminal, what is being looked at now.

    Without a thread: this process forks.
    """

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, words: str) -> None:
        self._write(f"\r\x1b[2K{words} …")

    def clear(self) -> None:
        self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        if self._is_shown:
            sys.stderr.write(text)
            sys.stderr.flush()
