"""What certificates' files hold, read again when they were renewed: a process outlives them."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from neuron_di.errors import ConfigError
from neuron_di.obs import get_logger
from neuron_di.seen_file import look_at

T = TypeVar("T")

_log = get_logger(__name__)


class CertificateFiles(Generic[T]):
    """`read` makes of the files what is wanted of them, or raises ConfigError. Thread-safe.

    At the start its error is the caller's. Later, say while only one of the files is written yet,
    what was read last stays in force, and the log says why.
    """

    def __init__(self, files: Sequence[str], read: Callable[[], T]) -> None:
        self._files = [Path(file) for file in files]
        self._read = read
        self._lock = threading.Lock()
        self._not_read = ""  # why, when it was last tried
        self._seen = self._look()
        self._latest = read()

    def latest(self) -> T:
        """As the files are now. It takes some milliseconds where they changed."""
        with self._lock:
            seen = self._look()
            if seen != self._seen:
                try:
                    self._latest = self._read()
                except ConfigError as error:  # it is tried again
                    if error.message != self._not_read:
                        _log.error("certificate_not_read", reason=error.message)
                    self._not_read = error.message
                else:
                    self._seen, self._not_read = seen, ""
                    _log.info("certificate_read")
            return self._latest

    def _look(self) -> list[object]:
        return [look_at(file) for file in self._files]
