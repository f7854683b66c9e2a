"""Temporary folders that go also after their owner was killed: with the next that is made."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from neuron_di.errors import ConfigError


class OwnFolder:
    """A folder that is ours for as long as we hold its lock, which ends with our process.

    Those of owners that were killed go first. ConfigError where none can be made.
    """

    def __init__(self, prefix: str) -> None:
        while True:
            try:
                sweep(prefix)
                self.path = tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-")
            except OSError as error:  # all are read-only, or this one is full
                raise ConfigError(
                    f"no folder for temporary files can be written ({error.strerror}): name one "
                    "with TMPDIR"
                ) from None
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # swept in this moment
                continue
            with contextlib.suppress(BlockingIOError):  # somebody is about to sweep it
                _lock(self._lock)
                if os.path.isdir(self.path):
                    return
            os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _lock(folder: int) -> bool:
    """BlockingIOError where somebody else holds this folder; False where there are no locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def sweep(prefix: str) -> None:
    """Remove the folders of owners that were killed and could not.

    An owner is known by its lock: its process may be out of our sight, in another container.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*-*"):
        with contextlib.suppress(OSError):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(folder).st_uid == os.getuid() and _lock(folder):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(folder)
