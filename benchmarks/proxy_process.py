"""The processes of the proxy benchmark: stub workers, proxies, and a client for each load."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from benchmarks.contenders.proxies import ProxyCommand, StubPorts
from benchmarks.process_tree import cpu_s, rss_bytes, tree_of
from benchmarks.proxy_load import Load

_REPO = Path(__file__).parent.parent
_LOG_TAIL_CHARS = 3000
START_TIMEOUT_S = 60.0
_MEMORY_INTERVAL_S = 0.25


class ProxyFailed(Exception):
    """Raised when a process of the benchmark does not do its part. Says what it printed last."""


class RunningProxy:
    """A started contender."""

    def __init__(self, command: ProxyCommand, log: TextIO) -> None:
        self.name = command.name
        self.port = command.port
        self.note = command.note
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        if command.command:
            self._process = _start(command.command, log)

    def until_ready(self) -> None:
        """Wait until a small load passes through it whole. ProxyFailed when none does."""
        probe = Load(self.port, 1, 1, reply_tokens=3, prompt_tokens=8, timeout_s=5.0)
        end_s = time.monotonic() + START_TIMEOUT_S
        while True:
            self._check()
            with contextlib.suppress(ProxyFailed, OSError):
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                if apply_load(probe)["complete"] == 1:
                    return
            if time.monotonic() > end_s:
                raise ProxyFailed(f"{self.name} answers no request:\n{_tail(self._log)}")
            time.sleep(0.25)

    def measure(self, load: Load) -> dict[str, Any]:
        """Apply a load; what the client saw, and what the proxy's processes used meanwhile."""
        self._check()
        load = replace(load, port=self.port)
        if self._process is None:
            return apply_load(load) | {"cpu_s": 0.0, "rss_bytes": 0}
        before_s = self.cpu_s()
        with _memory_of(self._process.pid) as sizes:
            seen = apply_load(load)
        seen["cpu_s"] = self.cpu_s() - before_s
        seen["rss_bytes"] = max(sizes)
        return seen

    def cpu_s(self) -> float:
        """CPU time of its processes so far."""
        return 0.0 if self._process is None else cpu_s(self._process.pid)

    def end(self) -> None:
        if self._process is not None:
            _end(self._process)

    def _check(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise ProxyFailed(f"{self.name} ended:\n{_tail(self._log)}")


def apply_load(load: Load) -> dict[str, Any]:
    """Run a client to its end. ProxyFailed when it broke, as when nobody listens."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.proxy_load", json.dumps(asdict(load))],
        cwd=_REPO,
        capture_output=True,
        text=True,
        check=False,
        timeout=load.timeout_s + 120,
    )
    if done.returncode:
        raise ProxyFailed(f"the client broke:\n{done.stderr[-_LOG_TAIL_CHARS:]}")
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@contextlib.contextmanager
def stub_workers(tick_s: float) -> Iterator[StubPorts]:
    """Stub workers, running."""
    ports = free_ports(4)
    stubs = StubPorts(http=(ports[0], ports[1]), link=(ports[2], ports[3]))
    settings = {"tick_s": tick_s, "http_ports": stubs.http, "link_ports": stubs.link}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        command = (sys.executable, "-m", "benchmarks.proxy_stub", json.dumps(settings))
        process = _start(command, log, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise ProxyFailed(f"the stub workers ended:\n{_tail(log)}")
            yield replace(stubs, pid=process.pid)
        finally:
            _end(process)


@contextlib.contextmanager
def running(commands: list[ProxyCommand]) -> Iterator[list[RunningProxy]]:
    """All proxies, started together and ready. Ends them all."""
    with contextlib.ExitStack() as stack:
        proxies = []
        for command in commands:
            log = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            proxies.append(RunningProxy(command, log))
            stack.callback(proxies[-1].end)
        for proxy in proxies:
            proxy.until_ready()
        yield proxies


def free_ports(count: int) -> list[int]:
    """Ports below the range that the system takes for outgoing connections, free just now."""
    ports: list[int] = []
    for port in range(21_000, 32_768):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
            if len(ports) == count:
                return ports
    raise ProxyFailed("too few ports are free")


@contextlib.contextmanager
def _memory_of(pid: int) -> Iterator[list[int]]:
    """Looks at a tree's resident memory now and then; fills the list."""
    # Who is in the tree is asked once: that walks all processes of the machine, which would show.
    tree = tree_of(pid)
    is_over = threading.Event()
    sizes = [rss_bytes(tree)]

    def look() -> None:
        while not is_over.wait(_MEMORY_INTERVAL_S):
            sizes.append(rss_bytes(tree))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes
    finally:
        is_over.set()
        thread.join()


def _start(command: tuple[str, ...], log: TextIO, stdout: Any = None) -> subprocess.Popen[str]:
    # Its own session, so that whatever it starts can be ended with it.
    return subprocess.Popen(
        command,
        cwd=_REPO,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=log if stdout is None else stdout,
        stderr=log,
        text=True,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _tail(log: TextIO) -> str:
    log.seek(0)
    return log.read()[-_LOG_TAIL_CHARS:]
