"""A run as a table: one line per event, the sums, and what was wrong."""

from collections import Counter
from collections.abc import Sequence

from .findings import Findings


def table(title: str, found: Findings, start_s: float) -> list[str]:
    """Times count from `start_s`, the Unix time at which the load began."""
    lines = [title, ""]
    for row in found.rows:
        event = row.event
        what = f"{event.kind} {event.worker}" if event.role else event.words
        if event.kind == "role":
            what += f" -> {event.role}"
        elif event.role and event.role not in event.worker:
            what += f" ({event.role})"
        lines.append(f"{event.begun_s - start_s:7.2f} s  {what:<30}  {row.measured}")
    sums = (
        f"{found.num_requests} requests: {found.num_failed} failed, {found.num_wrong} wrong, "
        f"{found.num_equal} equal to the last bit to undisturbed ones; "
        f"{found.num_retried} took several attempts, {found.num_continued} went on in mid-stream"
    )
    return [*lines, "", sums, *_flaws(found.flaws)]


def _flaws(flaws: Sequence[str]) -> list[str]:
    """Each once, and how often it was."""
    return [
        f"VIOLATION {words}" + (f", {num} times" if num > 1 else "")
        for words, num in Counter(flaws).items()
    ] or ["no violation"]
