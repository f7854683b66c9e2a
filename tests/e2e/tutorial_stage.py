"""Where a tutorial's steps run one after another, with `--simulate`, and what they leave there.

So far this has run on a simulator of libnrt only.
"""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from tutorial_kit import EXAMPLES, run_step

HOSTS = "127.0.0.1,127.0.0.2"
NUM_PORTS = 40  # from PORT_BASE on: those of simulator.sh, and of a host's workers
PORTS = range(20_000, 32_000, NUM_PORTS)  # below what Linux gives to outgoing connections


@dataclass(frozen=True, slots=True)
class Stage:
    """One tutorial, its folder of state, and what its steps find in their environment."""

    tutorial: str
    state: Path
    environ: dict[str, str]

    def do(self, step: str, *options: str, **environ: str) -> str:
        """Run a step to its end, which is a good one. Returns what it printed."""
        path = EXAMPLES / self.tutorial / f"{step}.sh"
        ended = run_step(path, "--simulate", *options, environ=self.environ | environ)
        assert ended.returncode == 0, f"{step}\n{ended.stdout}{ended.stderr}{self.logs()}"
        return ended.stdout

    def pids(self) -> dict[str, int]:
        """What the steps say that they started."""
        return {path.stem: int(path.read_text().split()[0]) for path in self.state.glob("*.pid")}

    def logs(self) -> str:
        """The ends of what the started processes said."""
        paths = sorted(self.state.glob("*.log"))
        return "".join(f"\n--- {path.name}\n{path.read_text()[-2000:]}" for path in paths)


@contextmanager
def stage(tutorial: str, state: Path, artifacts: Path) -> Iterator[Stage]:
    """At its end nothing runs that the steps started: what does is ended, and an error."""
    environ = {
        "STATE": str(state),
        "PORT_BASE": str(_free_port_base()),
        "NEURON_DI_NEURON_ARTIFACTS": str(artifacts),
    }
    made = Stage(tutorial, state, environ)
    try:
        yield made
    finally:
        left = {name: pid for name, pid in made.pids().items() if _is_alive(pid)}
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
    assert left == {}


def _free_port_base() -> int:
    first = os.getpid() * 7 % len(PORTS)
    for base in (*PORTS[first:], *PORTS[:first]):
        with ExitStack() as stack:
            try:
                for host in HOSTS.split(","):
                    for port in range(base, base + NUM_PORTS):
                        stack.enter_context(socket.create_server((host, port)))
            except OSError:
                continue
            return base
    raise AssertionError("too few ports are free")


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # of which nobody takes note
    except psutil.NoSuchProcess:
        return False
