"""Where a tutorial's steps run one after another, with `--simulate`, and what they leave there.

So far this has run on a simulator of libnrt only.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from neuron_kit import has_compiler
from tutorial_kit import EXAMPLES, Patience, step_environ

HOSTS = "127.0.0.1,127.0.0.2"
NUM_PORTS = 40  # from PORT_BASE on: those of simulator.sh, and of a host's workers
PORTS = range(20_000, 32_000, NUM_PORTS)  # below what Linux gives to outgoing connections
STEP_S = 900  # of one step, however much it prints
SILENCE_S = 150  # of a step that neither prints, nor do those log whom it waits for

MARKS = [
    pytest.mark.e2e,
    pytest.mark.timeout(8 * STEP_S),  # the steps have deadlines of their own, which come before
    pytest.mark.skipif(not has_compiler(), reason="the simulator is built by a C compiler"),
]
needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")


@dataclass(frozen=True, slots=True)
class Stage:
    """One tutorial, its folder of state, and what its steps find in their environment."""

    tutorial: str
    state: Path
    environ: dict[str, str]

    def do(self, step: str, *options: str, **environ: str) -> str:
        """Run a step to its end, which is a good one. Returns what it printed."""
        paths = [self.state / f"{step}.{kind}" for kind in ("stdout", "stderr")]
        with ExitStack() as stack:
            out, error = (stack.enter_context(path.open("wb")) for path in paths)
            process = subprocess.Popen(
                [EXAMPLES / self.tutorial / f"{step}.sh", "--simulate", *options],
                env=step_environ(self.environ | environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=error,
                process_group=0,
            )
            is_over = self._is_over_in_time(process)
        printed, complained = (path.read_text() for path in paths)
        said = f"{step}\n{printed}{complained}{self.logs()}"
        assert is_over, f"no sign of life any more, or too long: {said}"
        assert process.returncode == 0, said
        return printed

    def _is_over_in_time(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether the step ends while it, or who writes into the folder, shows signs of life."""
        patience = Patience(time.monotonic(), silence_s=SILENCE_S, total_s=STEP_S)
        while True:
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                if patience.lasts(time.monotonic(), self._sizes()):
                    continue
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return False
            return True

    def _sizes(self) -> dict[str, int]:
        """Of what is written in the folder of state. A file may be gone since it was listed."""
        with os.scandir(self.state) as entries:
            kinds = (".log", ".stdout", ".stderr", ".pid")
            names = [entry.name for entry in entries if entry.name.endswith(kinds)]
        paths = [self.state / name for name in names]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def pids(self) -> dict[str, int]:
        """What the steps say that they started."""
        return {path.stem: int(path.read_text().split()[0]) for path in self.state.glob("*.pid")}

    def logs(self) -> str:
        """The ends of what the started processes said."""
        paths = sorted(self.state.glob("*.log"))
        return "".join(f"\n--- {path.name}\n{path.read_text()[-2000:]}" for path in paths)


@contextmanager
def stage(tutorial: str, state: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """At its end nothing runs that the steps started: what does is ended, and an error.

    What is compiled is for all tests of the tutorial.
    """
    environ = {
        "STATE": str(state),
        "PORT_BASE": str(_free_port_base()),
        "NEURON_DI_NEURON_ARTIFACTS": str(tmp_path_factory.getbasetemp() / f"{tutorial}-artifacts"),
        # A busy machine is slow. Who stands still is found by `Stage.do`.
        "READY_TIMEOUT_S": str(STEP_S),
        "STOP_TIMEOUT_S": str(STEP_S),
    }
    made = Stage(tutorial, state, environ)
    try:
        yield made
    finally:
        left = {name: pid for name, pid in made.pids().items() if _is_alive(pid)}
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
    assert left == {}


def drain(staged: Stage, *hosts: str, workers: tuple[str, ...]) -> str:
    """The last step: these workers drain, and everybody has ended."""
    drained = staged.do("8-drain", *hosts)
    for worker in workers:
        assert f"{worker} has ended: 0 requests finished, none failed" in drained
    for server in ("proxy", "etcd") if hosts else ("serve",):
        assert f"{server} has ended" in drained
    assert "terminate-instances" in drained
    assert staged.pids() == {}
    return drained


def use_one_host(staged: Stage, engine: str) -> tuple[str, str]:
    """From the first request to the end. Returns what steps 5 and 7 printed."""
    assert list(staged.pids()) == ["serve"]
    asked = staged.do("5-request")
    assert "data: [DONE]" in asked
    assert "computed by prefill-0, then decode-0" in asked
    assert f"its KV went by the engine {engine} (" in asked
    measured = staged.do("6-bench")
    assert "combined / 1P1D  ratio in each of 2 slices" in measured
    assert list(staged.pids()) == ["serve"]
    # There is room for a third worker.
    grown = staged.do("7-scale-out")
    assert "NEURON_RT_VISIBLE_CORES=4-5" in grown
    assert set(staged.pids()) == {"serve", "decode-1"}
    for worker in ("decode-0", "decode-1"):
        assert f"{worker} takes KV from prefill-0 by {engine}" in grown
    drain(staged, workers=("decode-1",))
    return asked, grown


def serve_two_hosts(staged: Stage) -> str:
    staged.do("3-compile", "--hosts", HOSTS)
    served = staged.do("4-serve", "--hosts", HOSTS)
    assert set(staged.pids()) == {"etcd", "proxy", "prefill-0", "decode-0"}
    return served


def use_two_hosts(staged: Stage, engine: str) -> str:
    """From the first request to the end. Returns what the steps printed."""
    hosts = ("--hosts", HOSTS)
    asked = staged.do("5-request", *hosts)
    assert "data: [DONE]" in asked
    assert "computed by prefill-0, then decode-0" in asked
    assert f"its KV went by the engine {engine} (" in asked
    measured = staged.do("6-bench", *hosts)
    # As many NeuronCores for the one as for the other.
    assert "1P1D, 4 NeuronCores, beside 2 combined workers, 4 NeuronCores" in measured
    assert measured.count("4 ok, 0 failed") == 2
    assert "combined / 1P1D  ratio in each of 2 slices" in measured
    assert set(staged.pids()) == {"etcd", "proxy", "prefill-0", "decode-0"}
    grown = staged.do("7-scale-out", *hosts)
    for worker in ("decode-0", "decode-1"):
        assert f"{worker} takes KV from prefill-0 by {engine}" in grown
    drained = drain(staged, *hosts, workers=("decode-1", "prefill-0", "decode-0"))
    assert not (staged.state / "tutorial-etcd").exists()
    return asked + measured + grown + drained


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
