"""A process of a benchmark that takes a command a line, and answers with one of JSON."""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.process_tree import cpu_s, rss_bytes, tree_of

_REPO = Path(__file__).parent.parent
_ANSWER_TIMEOUT_S = 150.0
_LOG_TAIL_CHARS = 3000


class ProcessFailed(Exception):
    """Raised when a process does not answer. Says what it printed last."""


class LineProcess:
    """Owns the process: `end` kills it, and whatever it started."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - until `end`
        self._name = " ".join(command[:3])
        self._process = subprocess.Popen(
            command,
            cwd=_REPO,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (environ or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, timeout_s: float | None = _ANSWER_TIMEOUT_S) -> Any:
        """Of the oldest command. ProcessFailed when there is none; None: as long as it lives."""
        assert self._process.stdout is not None
        is_readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if is_readable else b""
        if not line:
            self._log.seek(0)
            said = self._log.read()[-_LOG_TAIL_CHARS:]
            raise ProcessFailed(f"{self._name} does not answer:\n{said}")
        return json.loads(line)

    def tell_to(self, do: str, **more: Any) -> None:
        self.tell(json.dumps({"do": do, **more}))

    def ask_to(self, do: str, **more: Any) -> Any:
        self.tell_to(do, **more)
        return self.answer()

    def cpu_s(self) -> float:
        """What it and its children have used so far."""
        return cpu_s(self.pid)

    def rss_bytes(self) -> int:
        return rss_bytes(tree_of(self.pid))

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.communicate()
        self._log.close()
