"""Logs: one line per event, to stderr, as key=value text or as JSON.

    time=2026-03-01T12:00:00.000Z level=info process=prefill-0 event=announced key=/workers/…

An event has a name and fields. Fields are ids, counts, sizes and reasons: never a prompt, an
output, token ids or a key. Values cannot forge lines: what holds anything unusual is quoted.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

_PLAIN = re.compile(r"[!-~]+")  # printable ASCII, no space
_QUOTED = re.compile(r'["=\\]')


class EventLogger:
    """Logs events under a module's name, through the standard library's logging."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """An error with the traceback of the exception being handled: a bug of ours."""
        self._emit(logging.ERROR, event, fields, with_traceback=True)

    def _emit(
        self, level: int, event: str, fields: dict[str, object], *, with_traceback: bool = False
    ) -> None:
        extra = {"event_fields": {"event": event, **fields}}
        self._logger.log(level, event, extra=extra, exc_info=with_traceback)


def get_logger(name: str) -> EventLogger:
    """The logger of a module: `_log = get_logger(__name__)`."""
    return EventLogger(name)


def setup_logging(
    process_name: str, level: LogLevel = "info", log_format: LogFormat = "text"
) -> None:
    """Send the logs of this process, other libraries' too, to stderr. Called once, at start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(process_name, log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _LineFormatter(logging.Formatter):
    def __init__(self, process_name: str, log_format: LogFormat) -> None:
        super().__init__()
        self._process_name = process_name
        self._format = log_format

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process_name,
        }
        # A library's own line has no event.
        foreign = {"event": "log", "logger": record.name}
        line |= getattr(record, "event_fields", None) or foreign | {"message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        if self._format == "json":
            return json.dumps(line, default=str)
        return " ".join(f"{key}={_as_text(value)}" for key, value in line.items())


def _as_text(value: object) -> str:
    text = str(value)
    if _PLAIN.fullmatch(text) and not _QUOTED.search(text):
        return text
    return json.dumps(text)
