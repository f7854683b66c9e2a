"""A log that others cannot fill: for what a peer or a client can bring about as often as it likes.

event=signal_refused reason=...                 the first few of an interval are written
event=signal_refused reason=... unwritten=4711  the first of a later one says how many were not
"""

from dataclasses import dataclass

from neuron_di.clock import now_s
from neuron_di.obs.logging import EventLogger

LINES_MAX = 5
INTERVAL_S = 10.0


@dataclass(slots=True)
class _Written:
    """Of one event: since when, how many lines, and how many that were not written."""

    since_s: float
    num_lines: int = 0
    num_unwritten: int = 0


class LimitedLogger:
    """Logs at most `lines_max` lines of each event in `interval_s` seconds. For one thread.

    Event names are written in the code: there are few, and each keeps its own count.
    """

    def __init__(
        self, name: str, *, lines_max: int = LINES_MAX, interval_s: float = INTERVAL_S
    ) -> None:
        self._log = EventLogger(name)
        self._lines_max = lines_max
        self._interval_s = interval_s
        self._events: dict[str, _Written] = {}

    def info(self, event: str, **fields: object) -> None:
        if (more := self._admit(event)) is not None:
            self._log.info(event, **fields, **more)

    def warning(self, event: str, **fields: object) -> None:
        if (more := self._admit(event)) is not None:
            self._log.warning(event, **fields, **more)

    def exception(self, event: str, **fields: object) -> None:
        """A bug of ours, with the traceback of what is being handled."""
        if (more := self._admit(event)) is not None:
            self._log.exception(event, raised=None, **fields, **more)

    def _admit(self, event: str) -> dict[str, object] | None:
        """What the line says besides; None when it is not to be written."""
        now = now_s()
        written = self._events.setdefault(event, _Written(now))
        if now - written.since_s >= self._interval_s:
            written.since_s, written.num_lines = now, 0
        if written.num_lines >= self._lines_max:
            written.num_unwritten += 1
            return None
        written.num_lines += 1
        unwritten, written.num_unwritten = written.num_unwritten, 0
        return {"unwritten": unwritten} if unwritten else {}
