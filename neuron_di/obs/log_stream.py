"""Where log lines go: standard error, which nobody waits for.

Who reads a server's log may stand still: a pager, a terminal that was stopped, a container's
runtime whose disk is full. Lines are then dropped and counted. To wait with a line would be to stop
an event loop, and every request with it.
"""

import io
import os
import select
import socket
import stat
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TextIO

# At most that many bytes of a pipe's are written in one piece, or not at all.
_WHOLE_BYTES = select.PIPE_BUF

# How many bytes were written, without waiting. OSError where it is none.
_Write = Callable[[bytes], int]


class LogStream:
    """Writes to what an open file leads to. Owns nothing of the file, which must stay open."""

    def __init__(self, file: TextIO) -> None:
        """A file without a descriptor, as tests have, is written to as it is."""
        self.fd: int | None = None  # whose writes never wait; None: there is none
        self._own = ExitStack()
        self._write = self._writer_of(file)
        self._is_cut = False  # a line's end is missing

    def write(self, line: str) -> bool:
        """Write a line. False: it was dropped, as a whole or in part."""
        return self.write_text(line + "\n")

    def write_text(self, text: str) -> bool:
        """The same for any text, as several lines. After one that was cut a new line begins."""
        data = text.encode("utf-8", "backslashreplace")
        if self._is_cut:
            data = b"\n" + data
        try:
            num_written = self._write(data)
        except OSError:  # it would block, or nobody reads any more
            num_written = 0
        if num_written:
            self._is_cut = num_written < len(data)
        return num_written == len(data)

    def close(self) -> None:
        """Nothing is written any more."""
        self.fd = None
        self._own.close()

    def _writer_of(self, file: TextIO) -> _Write:
        try:
            fd = file.fileno()
        except (OSError, ValueError, io.UnsupportedOperation):
            return partial(_write_text, file)
        kind = os.fstat(fd).st_mode
        if stat.S_ISREG(kind):
            self.fd = fd
            return partial(os.write, fd)
        if stat.S_ISSOCK(kind):
            end = self._own.enter_context(socket.socket(fileno=os.dup(fd)))
            return lambda data: end.send(data, socket.MSG_DONTWAIT)
        try:
            # Opened anew: O_NONBLOCK would hold for every process that has the same one.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            again = self.fd = os.open(f"/proc/self/fd/{fd}", flags)
        except OSError:  # another user's, or there is no /proc
            return partial(_write_if_ready, fd)
        self._own.callback(os.close, again)
        return partial(os.write, again)


def _write_if_ready(fd: int, data: bytes) -> int:
    """It waits only where another process has filled the pipe just now."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if not poll.poll(0):
        return 0
    return os.write(fd, data[:_WHOLE_BYTES])


def _write_text(file: TextIO, data: bytes) -> int:
    file.write(data.decode())
    file.flush()
    return len(data)
