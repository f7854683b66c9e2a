"""The processes of the registry benchmark: a registry, announcers, a watcher."""

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from benchmarks.line_process import LineProcess, ProcessFailed
from benchmarks.process_tree import cpu_s, rss_bytes, tree_of
from neuron_di.etcd.child import free_ports

_REPO = Path(__file__).parent.parent


@contextlib.contextmanager
def running(commands: list[tuple[str, ...]]) -> Iterator[list[LineProcess]]:
    """Processes that take commands, ready. Ends them all."""
    with contextlib.ExitStack() as stack:
        parts = []
        for command in commands:
            parts.append(LineProcess(command))
            stack.callback(parts[-1].end)
        for part in parts:
            part.answer()
        yield parts


class Server:
    """A registry that can be killed and started again at the same address, HOST:PORT."""

    def __init__(self, address: str, command: tuple[str, ...], log: TextIO) -> None:
        self.address = address
        self._command = command
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Does not wait until it answers: who needs it, tries."""
        self._process = subprocess.Popen(
            self._command,
            cwd=_REPO,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def kill(self) -> None:
        """As a crash: what etcd has stored stays, what the proxy's own had is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def cpu_s(self) -> float:
        assert self._process is not None
        return cpu_s(self._process.pid)

    def rss_bytes(self) -> int:
        assert self._process is not None
        return rss_bytes(tree_of(self._process.pid))


@contextlib.contextmanager
def server_of(registry: str) -> Iterator[Server]:
    """A fresh registry: an etcd of one member, or the proxy's own. Killed at the end."""
    folder = tempfile.mkdtemp(prefix="bench-registry-")
    port, peer_port = free_ports(2)
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        if registry == "etcd":
            command = _etcd(folder, address, f"127.0.0.1:{peer_port}")
        else:
            settings = json.dumps({"role": "serve", "address": address})
            command = (sys.executable, "-m", "benchmarks.registry_part", settings)
        server = Server(address, command, log)
        try:
            server.start()
            time.sleep(1.0)  # let it settle: its start is not what is measured
            yield server
        finally:
            server.kill()
            shutil.rmtree(folder, ignore_errors=True)


def _etcd(folder: str, client: str, peer: str) -> tuple[str, ...]:
    """As `--etcd auto` starts it."""
    program = shutil.which("etcd")
    if program is None:
        raise ProcessFailed("etcd is not installed: run .ci/install-etcd")
    return (
        program,
        "--name=bench",
        f"--data-dir={folder}/data",
        f"--listen-client-urls=http://{client}",
        f"--advertise-client-urls=http://{client}",
        f"--listen-peer-urls=http://{peer}",
        f"--initial-advertise-peer-urls=http://{peer}",
        f"--initial-cluster=bench=http://{peer}",
        "--heartbeat-interval=20",
        "--election-timeout=200",
        "--logger=zap",
        "--log-level=error",
    )
