"""One child process of `neuron-di serve`: started, heard until it is ready, started again."""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any

from neuron_di.clock import Deadline, now_s
from neuron_di.config import CONFIG_VARIABLE, child_environment
from neuron_di.errors import ConfigError, NeuronDiError, PeerGone, PeerTimeout
from neuron_di.obs import LaunchReport, get_logger, heard

_log = get_logger(__name__)

BACKOFF_S_MIN = 0.2
BACKOFF_S_MAX = 10.0
LONG_LIFE_S = 60.0  # who lived so long starts again without having to wait for earlier ends
STARTS_REFUSED_MAX = 5
REPORT_BYTES_MAX = 4096
LAST_WORDS_TIMEOUT_S = 1.0  # a process that ended may have left its output to one that has not

OnReport = Callable[[str, LaunchReport], None]  # the child's name and what it said
Tell = Callable[[str], None]  # a line for whoever sits at the terminal


class Backoff:
    """How long to wait before the next start: doubling, until a life was long."""

    def __init__(self, min_s: float = BACKOFF_S_MIN, max_s: float = BACKOFF_S_MAX) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._next_s = min_s

    def after(self, lived_s: float) -> float:
        """Seconds to wait after a life of `lived_s` seconds; 0 for one that never was ready."""
        if lived_s >= LONG_LIFE_S:
            self._next_s = self._min_s
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return wait_s


class Child:
    """A process under one name, by whatever pid. Whoever made it ends it with `end`.

    `command` is asked for the arguments, the program first, at each start. `on_said` hears every
    report of every life. The child inherits the descriptors `pass_fds`, under their numbers, and
    finds in its environment what `environment` says at each start. It sits in a session of its
    own, so Ctrl-C does not reach it.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        *,
        on_said: OnReport = lambda _name, _report: None,
        pass_fds: Callable[[], Sequence[int]] = tuple,
        environment: Callable[[], Mapping[str, str]] = child_environment,
        backoff: Backoff | None = None,
    ) -> None:
        self.name = name
        self.is_ready = False
        self.was_drained = False  # its last words were that an operator wanted it to end
        self._command = command
        self._on_said = on_said
        self._pass_fds = pass_fds
        self._environment = environment
        self._backoff = backoff or Backoff()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def start(self, deadline: Deadline, on_report: OnReport) -> LaunchReport:
        """Start the process and follow its reports until it is ready.

        ConfigError when it says that it cannot start, PeerGone or PeerTimeout when it ends or
        is late without a word, or the system starts none. What was started was killed then: `gone`
        waits for that.
        """
        self.was_drained = False
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                pass_fds=self._pass_fds(),
                # Its options are all written out: a file that was edited since says nothing here.
                env={**self._environment(), CONFIG_VARIABLE: ""},
            )
        except OSError as error:  # no memory, or too many processes or files: that may pass
            raise PeerGone(f"{self.name} could not be started: {error.strerror}") from None
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                report = await self._heard_ready(process, on_report)
        except TimeoutError:
            self.kill()
            raise PeerTimeout(f"{self.name} was not ready in time") from None
        except BaseException:
            self.kill()
            raise
        self.is_ready = True
        return report

    async def life(self) -> str:
        """Wait for its end. Returns what to say about it."""
        assert self._process is not None
        code = await self._process.wait()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=LAST_WORDS_TIMEOUT_S)
        self.is_ready = False
        return f"{self.name} ended by itself with code {code}" if code >= 0 else self._ended(code)

    async def while_it_lives(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what needs this process. PeerGone, and it is given up, once the process has ended."""
        life, doing = asyncio.create_task(self.life()), asyncio.create_task(work)
        try:
            await asyncio.wait((life, doing), return_when=asyncio.FIRST_COMPLETED)
            if life.done():  # the reason for whatever else has failed
                raise PeerGone(life.result())
            doing.result()
        finally:
            for task in (life, doing):
                task.cancel()
            await asyncio.gather(life, doing, return_exceptions=True)

    async def keep_up(
        self, start_timeout_s: float, tell: Tell, *, gives_up: Callable[[], bool] = lambda: True
    ) -> str:
        """Start the process again whenever it ends. Returns why, when it refuses to start.

        Only if it `gives_up` then: what is refused now may be taken later. One that was drained on
        purpose stays away: this waits for ever then.
        """
        assert self._process is not None
        words, lived_s, num_refused = await self.life(), 0.0, 0
        while True:
            if self.was_drained and self._process.returncode == 0:
                _log.info("child_drained", child=self.name)
                tell(f"{self.name} was drained and has ended; it is not started again")
                await asyncio.get_running_loop().create_future()
            wait_s = self._backoff.after(lived_s)
            _log.warning("child_ended", child=self.name, reason=words, restart_in_s=wait_s)
            tell(f"{words}; starting it again in {wait_s:g} s")
            await asyncio.sleep(wait_s)
            lived_s = 0.0
            try:
                await self.start(Deadline.after(start_timeout_s), lambda _name, _report: None)
            except NeuronDiError as error:
                await self.gone()
                words = error.message
                num_refused += isinstance(error, ConfigError)
                if num_refused >= STARTS_REFUSED_MAX and gives_up():
                    return words
                continue
            num_refused = 0
            _log.info("child_restarted", child=self.name, pid=self.pid)
            tell(f"{self.name} is back (pid {self.pid})")
            since_s = now_s()
            words = await self.life()
            lived_s = now_s() - since_s

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and the processes it started, whatever they do."""
        if self._process is None or self._process.returncode is not None:
            return
        children = _children_of(self._process.pid)
        self._signal(signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Wait until nothing of it is left."""
        if self._process is not None:
            await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            # Its own send_signal looks first whether the process has ended, and where it has, takes
            # the code that it ended with away from whoever waits for that.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def _heard_ready(
        self, process: asyncio.subprocess.Process, on_report: OnReport
    ) -> LaunchReport:
        assert process.stdout is not None
        lines = _Lines(process.stdout)
        while (line := await lines.next()) is not None:
            report = _report(line)
            if report is None:
                continue
            self._on_said(self.name, report)
            on_report(self.name, report)
            if report.event == "failed":
                raise ConfigError(f"{self.name}: {report.message}")
            if report.event == "ready":
                self._reader = asyncio.create_task(self._read_on(lines))
                return report
        code = await process.wait()
        hint = ", as the kernel does where memory is short" if code == -signal.SIGKILL else ""
        raise PeerGone(f"{self._ended(code)} before it was ready{hint}")

    def _ended(self, code: int) -> str:
        how = f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}"
        return f"{self.name} {how}"

    async def _read_on(self, lines: "_Lines") -> None:
        """A child that prints must never block on a full pipe. Any of its lines may be a report."""
        while (line := await lines.next()) is not None:
            report = _report(line)
            self.was_drained = report is not None and report.event == "drained"
            if report is not None:
                self._on_said(self.name, report)


class _Lines:
    """The lines of a child's output. Of one that is too long for a report a part is kept."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._whole: deque[bytes] = deque()
        self._begun = b""

    async def next(self) -> bytes | None:
        """None: the output has ended."""
        while not self._whole:
            data = await self._stream.read(65536)
            if not data:
                begun, self._begun = self._begun, b""
                return begun or None
            *lines, begun = (self._begun + data).split(b"\n")
            self._whole.extend(lines)
            self._begun = begun[: REPORT_BYTES_MAX + 1]
        return self._whole.popleft()


def _report(line: bytes) -> LaunchReport | None:
    return heard(line) if len(line) <= REPORT_BYTES_MAX else None


async def run_together(starts: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run all at once. Raises the first refusal, once all others were given up: one says it all."""
    refusal: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for start in starts:
                group.create_task(start)
    except* NeuronDiError as refusals:
        refusal = refusals.exceptions[0]  # raised here, Python before 3.11.4 makes a group of it
    if refusal is not None:
        raise refusal


async def end(children: Sequence[Child], timeout_s: float) -> None:
    """Ask children to end, wait, then end those that did not. Nothing of them is left."""
    running = [child for child in children if child.pid is not None]
    for child in running:
        child.terminate()
    if running:
        await _wait_all([child.gone() for child in running], timeout_s)
        for child in running:
            child.kill()
    await asyncio.gather(*(child.gone() for child in children))


async def _wait_all(waits: Sequence[Awaitable[None]], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*waits)


def _children_of(pid: int) -> list[int]:
    """The processes that this one started and that run (Linux); none where it has ended."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def reap_adopted(own: Collection[int]) -> None:
    """Where this is a container's first process, let go of the processes that it was given when
    their parents ended, and that have ended: nobody else does. `own` are our children."""
    if os.getpid() != 1:
        return
    with contextlib.suppress(ChildProcessError):  # there are no children at all
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own:  # whoever waits for it wants to know its code
                return
            os.waitpid(ended.si_pid, 0)
