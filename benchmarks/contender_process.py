"""A contender's process as the benchmark sees it: started, pinned, timed, ended."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmarks.contenders.command_loop import Settings
from benchmarks.line_process import LineProcess, ProcessFailed
from benchmarks.process_tree import peak_rss_bytes, tree_of


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


class ContenderProcess:
    """A loaded contender. It waits for the next line of its input and uses no CPU meanwhile.

    ProcessFailed when it ends before it has answered.
    """

    def __init__(self, contender: Contender, settings: Settings) -> None:
        self.name = contender.name
        fields = asdict(settings) | {"compiled": contender.compiled}
        command = (contender.python, "-m", contender.module, json.dumps(fields))
        self._process = LineProcess(command, {"OMP_NUM_THREADS": str(settings.threads)})
        try:
            self.version: str = self._process.answer(timeout_s=None)["ready"]
        except ProcessFailed:
            self.end()
            raise
        self._rested = (time.monotonic(), self._process.cpu_s())
        self.idle_share_max = 0.0  # of one core, while others had their turns

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timed:
        """Answer a batch of prompts with `num_tokens` tokens each. Blocks."""
        self._note_idle()
        before_s = self._process.cpu_s()
        self._process.tell(json.dumps({"prompts": prompts, "num_tokens": num_tokens}))
        answer = self._process.answer(timeout_s=None)
        after_s = self._process.cpu_s()
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
        self._process.end()

    def _note_idle(self) -> None:
        then_s, then_cpu_s = self._rested
        elapsed_s = time.monotonic() - then_s
        if elapsed_s > 1.0:  # shorter rests say little
            share = (self._process.cpu_s() - then_cpu_s) / elapsed_s
            self.idle_share_max = max(self.idle_share_max, share)


@contextlib.contextmanager
def loaded(contenders: Sequence[Contender], settings: Settings) -> Iterator[list[ContenderProcess]]:
    """All contenders with one model in memory, one loaded after the other. Ends them all."""
    with contextlib.ExitStack() as stack:
        processes = []
        for contender in contenders:
            process = ContenderProcess(contender, settings)
            stack.callback(process.end)
            processes.append(process)
        yield processes
