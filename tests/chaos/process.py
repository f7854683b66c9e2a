"""One process under test: its pid, what it logs, and the signals it gets."""

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal, NamedTuple

START_TIMEOUT_S = 100.0
LINES_MAX = 5000
LINE_CHARS_MAX = 200  # of each end of a complaint

_LINE = re.compile(r"^time=(\S+) level=(\S+) process=\S+ event=(\S+) ?(.*)$")
_COMPLAINT = re.compile(r" level=error |Traceback|^\w*Error: ")


class LogLine(NamedTuple):
    """One event that a process logged."""

    unix_s: float
    level: str
    event: str
    fields: str


class TestedProcess:
    """`neuron-di` with these arguments. It ends with this process, however that ends."""

    def __init__(
        self,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._arguments = (*arguments, f"--parent-pid={os.getpid()}")
        self._pass_fds = pass_fds
        self._environ = {**os.environ, **(environ or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._due_end: Literal["none", "well", "any"] = "none"
        self.is_stopped = False
        self._complaints: list[str] = []
        self.events: deque[LogLine] = deque(maxlen=LINES_MAX)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def is_ready(self) -> bool:
        """True when it has said so, and lives."""
        return self._ready.is_set() and self.is_alive

    async def start(self) -> None:
        """Start it. It is ready later: see `ready`."""
        self._ready.clear()
        self._due_end = "none"
        self.is_stopped = False
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "neuron_di",
            *self._arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=self._environ,
            pass_fds=self._pass_fds,
        )
        assert self._process.stderr is not None
        self._reader = asyncio.create_task(self._read(self._process.stderr))

    async def ready(self) -> str:
        """Wait for its line that says so. Returns that line."""
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._ready.wait()
        for line in reversed(self.events):
            if line.event == "ready":
                return line.fields
        raise RuntimeError(f"{self._arguments[0]} ended before it was ready: {self._complaints}")

    def stop(self) -> None:
        """Freeze it (SIGSTOP)."""
        self.is_stopped = True
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """Let it run on (SIGCONT)."""
        self.is_stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        self.expect_end()
        os.kill(self.pid, signal.SIGTERM)

    def expect_end(self) -> None:
        """It was told to end, and should do so with 0: every other end is a complaint."""
        self._due_end = "well"

    async def kill(self) -> None:
        """End it at once (SIGKILL). Its ports are free on return."""
        if self.is_alive:
            self._due_end = "any"
            os.kill(self.pid, signal.SIGKILL)
        await self.gone()

    async def gone(self) -> int | None:
        """Wait for its end and the end of what it wrote. Returns the exit code."""
        if self._process is None:
            return None
        code = await self._process.wait()
        if self._reader is not None:
            await self._reader
        return code

    def new_complaints(self) -> list[str]:
        """What has told of a bug since the last call: errors, tracebacks, and an end by itself."""
        found, self._complaints = self._complaints, []
        return found

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            text = line.decode(errors="replace").rstrip("\n")
            if _COMPLAINT.search(text):
                self._complaints.append(text[:LINE_CHARS_MAX] + "..." + text[-LINE_CHARS_MAX:])
            if found := _LINE.match(text):
                moment = datetime.fromisoformat(found[1].replace("Z", "+00:00"))
                event = LogLine(moment.timestamp(), found[2], found[3], found[4])
                self.events.append(event)
                if event.event == "ready":
                    self._ready.set()
        self._ready.set()  # it will never be: whoever waits looks again
        assert self._process is not None
        code = await self._process.wait()
        if self._due_end == "none" or (self._due_end == "well" and code):
            self._complaints.append(f"{' '.join(self._arguments[:3])} ended by itself with {code}")
