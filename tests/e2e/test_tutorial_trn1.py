"""The trn1 tutorial as its page has it, on simulated NeuronCores: one host, and two with etcd.

So far this has run on a simulator of libnrt only.
"""

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from neuron_kit import has_compiler
from tutorial_kit import EXAMPLES, run_step

TRN1 = EXAMPLES / "trn1"
HOSTS = "127.0.0.1,127.0.0.2"
NUM_PORTS = 40  # from PORT_BASE on: those of simulator.sh, and of a host's workers
PORTS = range(20_000, 32_000, NUM_PORTS)  # below what Linux gives to outgoing connections
ENDED = psutil.STATUS_ZOMBIE  # where nobody waits for orphans

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),  # many processes start, one after the other
    pytest.mark.skipif(not has_compiler(), reason="the simulator is built by a C compiler"),
]
Do = Callable[..., str]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture
def do(tmp_path: Path, artifacts: Path) -> Iterator[Do]:
    """`do(step, option…)`: run a step to its end, which is a good one. Returns what it printed."""
    environ = {
        "STATE": str(tmp_path),
        "PORT_BASE": str(free_port_base()),
        "NEURON_DI_NEURON_ARTIFACTS": str(artifacts),
    }

    def run(step: str, *options: str) -> str:
        ended = run_step(TRN1 / f"{step}.sh", "--simulate", *options, environ=environ)
        assert ended.returncode == 0, f"{step}\n{ended.stdout}{ended.stderr}{logs(tmp_path)}"
        return ended.stdout

    try:
        yield run
    finally:
        left = [pid for pid in pids(tmp_path).values() if is_alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert left == []


def free_port_base() -> int:
    first = os.getpid() % len(PORTS)
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


def pids(state: Path) -> dict[str, int]:
    """What the steps say that they started."""
    return {path.stem: int(path.read_text().split()[0]) for path in state.glob("*.pid")}


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != ENDED
    except psutil.NoSuchProcess:
        return False


def logs(state: Path) -> str:
    return "".join(f"\n--- {p.name}\n{p.read_text()[-2000:]}" for p in sorted(state.glob("*.log")))


def test_one_host(do: Do, tmp_path: Path, artifacts: Path) -> None:
    assert "neuron.cores" in do("2-check")
    assert str(artifacts) in do("3-compile")
    do("4-serve")
    before = pids(tmp_path)
    assert list(before) == ["serve"]
    assert "serve runs already" in do("4-serve")
    assert pids(tmp_path) == before

    asked = do("5-request")
    assert "data: [DONE]" in asked
    assert "computed by prefill-0, then decode-0" in asked
    assert "its KV went by the engine nrt" in asked

    measured = do("6-bench")
    assert "combined / 1P1D  ratio in each of 2 slices" in measured
    assert list(pids(tmp_path)) == ["serve"]
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert {"1P1D", "combined"} <= set(json.dumps(figures).split('"'))

    grown = do("7-scale-out")
    assert "decode-1 takes KV from prefill-0 by nrt" in grown
    assert set(pids(tmp_path)) == {"serve", "decode-1"}
    drained = do("8-drain")
    assert "decode-1 has ended: 0 requests finished, none failed" in drained
    assert "serve has ended" in drained
    assert "terminate-instances" in drained
    assert pids(tmp_path) == {}
    do("8-drain")  # nothing is left to be done


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_two_hosts(do: Do, tmp_path: Path) -> None:
    hosts = ("--hosts", HOSTS)
    do("3-compile", *hosts)
    do("4-serve", *hosts)
    assert set(pids(tmp_path)) == {"etcd", "proxy", "prefill-0", "decode-0"}
    # A worker that died is the only one to be started again.
    before = pids(tmp_path)
    os.kill(before["decode-0"], signal.SIGKILL)
    again = do("4-serve", *hosts)
    assert again.count("runs already") == 3
    after = pids(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"decode-0"}

    key = (tmp_path / "key").read_text().strip()
    asked = do("5-request", *hosts)
    assert "its KV went by the engine nrt" in asked
    measured = do("6-bench", *hosts)
    assert "4 ok, 0 failed" in measured
    grown = do("7-scale-out", *hosts)
    for worker in ("decode-0", "decode-1"):
        assert f"{worker} takes KV from prefill-0 by nrt" in grown
    # The key lets its owner give orders: it is in no output, and in no log.
    for path in ("key", "authorization", "keys.toml"):
        assert (tmp_path / path).stat().st_mode & 0o077 == 0
    drained = do("8-drain", *hosts)
    assert key not in "".join((again, asked, measured, grown, drained, logs(tmp_path)))
    for worker in ("decode-1", "prefill-0", "decode-0"):
        assert f"{worker} has ended: 0 requests finished, none failed" in drained
    assert "proxy has ended" in drained
    assert "etcd has ended" in drained
    assert pids(tmp_path) == {}
    assert not (tmp_path / "etcd").exists()
