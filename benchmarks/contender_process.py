"""A contender's process as the benchmark sees it: started, pinned, timed, ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from benchmarks.contenders.command_loop import Settings
from benchmarks.process_tree import cpu_s, peak_rss_bytes, tree_of

_REPO = Path(__file__).parent.parent
_LOG_TAIL_CHARS = 3000


@dataclass(frozen=True, slots=True)
class Contender:
    """One column of the comparison: which module, run by which Python."""

    name: str
    module: str
    python: str = sys.executable
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """One generation. `cpu_s` is what all processes of the contender used meanwhile."""

    wall_s: float
    cpu_s: float
    token_ids: list[list[int]]


class ContenderFailed(Exception):
    """Raised when a contender ends before it has answered. Says what it printed last."""


class ContenderProcess:
    """A loaded contender. It waits for the next line of its input and uses no CPU meanwhile."""

    def __init__(self, contender: Contender, settings: Settings, log: TextIO) -> None:
        self.name = contender.name
        self._log = log
        fields = asdict(settings) | {"compiled": contender.compiled}
        # Its own session, so that whatever it starts can be ended with it.
        self._process = subprocess.Popen(
            [contender.python, "-m", contender.module, json.dumps(fields)],
            cwd=_REPO,
            env=os.environ | {"OMP_NUM_THREADS": str(settings.threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        self.version: str = self._answer()["ready"]
        self._rested = (time.monotonic(), cpu_s(self._process.pid))
        self.idle_share_max = 0.0  # of one core, while others had their turns

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timed:
        """Answer a batch of prompts with `num_tokens` tokens each. Blocks."""
        self._note_idle()
        before_s = cpu_s(self._process.pid)
        assert self._process.stdin is not None
        command = {"prompts": prompts, "num_tokens": num_tokens}
        with contextlib.suppress(BrokenPipeError):  # `_answer` says why
            print(json.dumps(command), file=self._process.stdin, flush=True)
        answer = self._answer()
        after_s = cpu_s(self._process.pid)
        self._rested = (time.monotonic(), after_s)
        return Timed(answer["wall_s"], after_s - before_s, answer["token_ids"])

    def pin(self, cores: set[int]) -> None:
        """Keep every thread of every process of it on these cores."""
        for process in tree_of(self._process.pid):
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
                    os.sched_setaffinity(thread.id, cores)

    def peak_rss_bytes(self) -> int:
        """The most memory each of its processes ever had resident, added up."""
        return peak_rss_bytes(self._process.pid)

    def end(self) -> None:
        """Kill it and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _note_idle(self) -> None:
        then_s, then_cpu_s = self._rested
        elapsed_s = time.monotonic() - then_s
        if elapsed_s > 1.0:  # shorter rests say little
            share = (cpu_s(self._process.pid) - then_cpu_s) / elapsed_s
            self.idle_share_max = max(self.idle_share_max, share)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise ContenderFailed(f"{self.name} ended:\n{self._log.read()[-_LOG_TAIL_CHARS:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def loaded(contenders: Sequence[Contender], settings: Settings) -> Iterator[list[ContenderProcess]]:
    """All contenders with one model in memory, one loaded after the other. Ends them all."""
    with contextlib.ExitStack() as stack:
        processes = []
        for contender in contenders:
            log = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            process = ContenderProcess(contender, settings, log)
            stack.callback(process.end)
            processes.append(process)
        yield processes
