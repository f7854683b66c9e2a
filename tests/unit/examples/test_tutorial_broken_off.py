"""Steps that were broken off, or go wrong, and are run again: nothing is lost, or done twice.

In neuron-di's place is a program that stays, or ends, as it is told.
"""

import fcntl
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest
from tutorial_kit import EXAMPLES, run_step

TRN1 = EXAMPLES / "trn1"
NEURON_DI = """#!/bin/bash
case "$1" in
    serve) [ -z "$ENDS" ] && exec sleep 100 ;;
    bench) [ -z "$BROKEN" ] ;;
esac
"""


class Host:
    """A state folder, and programs that answer at once."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        programs = {"neuron-di": NEURON_DI, "curl": "#!/bin/sh\n", "neuronx-cc": "#!/bin/sh\n"}
        (folder / "bin").mkdir()
        for name, body in programs.items():
            (folder / "bin" / name).write_text(body)
            (folder / "bin" / name).chmod(0o755)
        path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
        self.environ = {"PATH": path, "STATE": str(self.state), "PROXY_PORT": "0"}
        self.environ |= {"PAIR_PORT": "0", "COMBINED_PORT": "0"}

    def do(self, step: str, **environ: str) -> CompletedProcess[str]:
        return run_step(TRN1 / f"{step}.sh", environ=self.environ | environ)

    def running(self) -> dict[str, int]:
        found = {p.stem: int(p.read_text().split()[0]) for p in self.state.glob("*.pid")}
        return {name: pid for name, pid in found.items() if psutil.pid_exists(pid)}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    for pid in made.running().values():
        psutil.Process(pid).kill()


def test_a_server_runs_on_where_it_cannot_be_measured(host: Host) -> None:
    assert host.do("4-serve").returncode == 0
    before = host.running()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for name in ("PAIR_PORT", "COMBINED_PORT"):
            ended = host.do("6-bench", **{name: str(taken.getsockname()[1])})
            assert ended.returncode == 2
            assert f"or set {name}" in ended.stderr
            assert host.running() == before


def test_the_server_is_back_after_a_measurement_that_was_broken_off(host: Host) -> None:
    assert host.do("4-serve").returncode == 0
    assert host.do("6-bench", BROKEN="yes").returncode == 1
    assert set(host.running()) == {"pair", "combined"}
    ended = host.do("6-bench")
    assert ended.returncode == 0, ended.stderr
    assert set(host.running()) == {"serve"}
    assert host.do("8-drain").returncode == 0
    # One that was not there before is not there afterwards.
    ended = host.do("6-bench")
    assert ended.returncode == 0, ended.stderr
    assert host.running() == {}


def test_what_ended_at_once_is_not_taken_for_running(host: Host) -> None:
    ended = host.do("4-serve", ENDS="yes", PATH=without_curl(host))
    assert ended.returncode == 1
    assert "serve has ended" in ended.stderr
    # As a step writes it that is too late to see when the process started.
    process = subprocess.Popen(["true"])
    process.wait()
    (host.state / "serve.pid").write_text(f"{process.pid} \n")
    ended = host.do("4-serve")
    assert ended.returncode == 0, ended.stderr
    assert "runs already" not in ended.stdout
    assert set(host.running()) == {"serve"}


def without_curl(host: Host) -> str:
    """As where nobody answers yet."""
    folder = host.state.parent / "nobody"
    folder.mkdir()
    (folder / "curl").write_text("#!/bin/sh\nexit 7\n")
    (folder / "curl").chmod(0o755)
    return os.pathsep.join([str(folder), host.environ["PATH"]])


def test_two_steps_at_once_are_refused_and_what_they_started_refuses_none(host: Host) -> None:
    host.state.mkdir()
    with (host.state / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ended = host.do("4-serve")
    assert ended.returncode == 2
    assert "another step is at work" in ended.stderr
    assert host.running() == {}
    assert host.do("4-serve").returncode == 0
    assert host.do("4-serve").returncode == 0  # the server has not kept the lock


def test_where_nothing_was_started_the_last_step_needs_nothing(host: Host) -> None:
    """As on the machine of step 1: it says in which order things go, and where."""
    host.state.mkdir()
    (host.state / "instances").write_text("i-1\ni-2\n")
    (host.state.parent / "bin/neuron-di").unlink()
    ended = host.do("8-drain", REGION="us-west-2")
    assert ended.returncode == 0, ended.stderr
    orders = [line.split() for line in ended.stdout.splitlines() if "aws ec2" in line]
    verbs = [words[2] for words in orders]
    assert verbs[:2] == ["terminate-instances", "wait"]
    assert all("--region us-west-2" in " ".join(words) for words in orders)
    assert all(words[-2:] == ["i-1", "i-2"] for words in orders[:2])
    assert {"delete-placement-group", "delete-security-group"} <= set(verbs[2:])
