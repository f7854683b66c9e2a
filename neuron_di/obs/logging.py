"""Logs: one line per event, to stderr, as key=value text or as JSON.

    time=2026-03-01T12:00:00.000Z level=info process=prefill-0 event=announced key=/workers/…

An event has a name and fields. Fields are ids, counts, sizes and reasons: never a prompt, an
output, token ids or a key. Values cannot forge lines: what holds anything unusual is quoted.
"""

import json
import logging
import re
import sys
import traceback
from datetime import UTC, datetime
from typing import Literal

from neuron_di.errors import NeuronDiError
from neuron_di.obs.log_stream import LogStream

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

MEMBERS_MAX = 3  # of a group of exceptions, that are shown

_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")  # printable ASCII but for the space, ", = and \


class EventLogger:
    """Logs events under a module's name, through the standard library's logging."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def shows_info(self) -> bool:
        """Whether `info` says anything now: for fields that cost something to find."""
        return self._logger.isEnabledFor(logging.INFO)

    def debug(self, event: str, **fields: object) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._emit(logging.ERROR, event, fields)

    def exception(
        self, event: str, *, raised: BaseException | None = None, **fields: object
    ) -> None:
        """A bug of ours, with the traceback of `raised`; None: of what is being handled."""
        self._emit(logging.ERROR, event, fields, raised=raised or True)

    def _emit(
        self,
        level: int,
        event: str,
        fields: dict[str, object],
        *,
        raised: BaseException | bool = False,
    ) -> None:
        extra = {"event_fields": {"event": event, **fields}}
        self._logger.log(level, event, extra=extra, exc_info=raised)


def get_logger(name: str) -> EventLogger:
    """The logger of a module: `_log = get_logger(__name__)`."""
    return EventLogger(name)


def log_descriptor() -> int | None:
    """Where logs go, for what writes without the interpreter. None: not set up, or it may wait."""
    handlers = logging.getLogger().handlers
    found = (each.fd for each in handlers if isinstance(each, _LineHandler))
    return next(found, None)


def setup_logging(
    process_name: str, level: LogLevel = "info", log_format: LogFormat = "text"
) -> None:
    """Send the logs of this process, other libraries' too, to stderr. Called once, at start."""
    handler = _LineHandler(LogStream(sys.stderr))
    handler.setFormatter(_LineFormatter(process_name, log_format))
    # No line says where it was written, nor on which thread: so nobody need find it out.
    logging._srcfile = None  # noqa: SLF001 - as logging's own documentation has it
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _LineHandler(logging.Handler):
    """Says how many lines were dropped, once lines are taken again."""

    def __init__(self, stream: LogStream) -> None:
        super().__init__()
        self._stream = stream
        self._num_dropped = 0

    @property
    def fd(self) -> int | None:
        return self._stream.fd

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if self._num_dropped and self._stream.write(self._words_of_dropped()):
            self._num_dropped = 0
        if self._num_dropped or not self._stream.write(line):
            self._num_dropped += 1

    def close(self) -> None:
        self._stream.close()
        super().close()

    def _words_of_dropped(self) -> str:
        fields = {"event": "log_lines_dropped", "num_lines": self._num_dropped}
        told = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
        return self.format(logging.makeLogRecord({**told, "event_fields": fields}))


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
        line |= getattr(record, "event_fields", None) or foreign | {"message": _words_of(record)}
        if record.exc_info:
            line["traceback"] = _traceback_of(record.exc_info[1])
        if self._format == "json":
            return json.dumps(line, default=str)
        return " ".join(
            [
                f"{key}={text if _PLAIN.fullmatch(text := str(value)) else json.dumps(text)}"
                for key, value in line.items()
            ]
        )


def _words_of(record: logging.LogRecord) -> str:
    """A library's own words. asyncio's go on, in further lines, with the repr of an exception."""
    message = record.getMessage()
    return message.partition("\n")[0] if record.name == "asyncio" else message


def _traceback_of(error: BaseException | None) -> str:
    """Where it was raised, with its causes, the first of them first; of a group, its members.

    Without the words of what is not ours: a KeyError's are the key, which may be a prompt.
    """
    if error is None:
        return ""
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    frames = "".join(traceback.format_tb(error.__traceback__))
    words = f": {error.message}" if isinstance(error, NeuronDiError) else ""
    own = f"{frames}{type(error).__qualname__}{words}"
    members = error.exceptions[:MEMBERS_MAX] if isinstance(error, BaseExceptionGroup) else ()
    causes = members if earlier is None else (earlier, *members)
    return "\n".join([*map(_traceback_of, causes), own])
