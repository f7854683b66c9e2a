"""The steps of each Neuron tutorial: what they show, what they refuse, whom they end."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tutorial_kit import (
    EXAMPLES,
    HOSTS,
    copied,
    neuron_di_words,
    real_parser,
    run_step,
    shown_commands,
    steps_of,
)

TUTORIALS = sorted(path.parent.name for path in EXAMPLES.glob("*/settings.sh"))
STEPS = [step for name in TUTORIALS for step in steps_of(name)]
NAMES = [f"{step.parent.name}/{step.name}" for step in STEPS]
TRN1 = EXAMPLES / "trn1"
IDS = {"REGION": "us-west-2", "SUBNET": "subnet-1", "KEY_NAME": "mine"}
# What steps call that every system has.
TOOLS = (
    *("bash", "basename", "cat", "curl", "dirname", "env", "flock", "grep", "kill", "ls", "mkdir"),
    *("mktemp", "mv", "nohup", "readlink", "rm", "sed", "setsid", "sleep", "tail", "touch", "tr"),
)


def test_every_tutorial_has_every_step() -> None:
    assert "trn1" in TUTORIALS
    for name in TUTORIALS:
        assert [step.name for step in steps_of(name)] == [
            "1-launch.sh",
            "2-check.sh",
            "3-compile.sh",
            "4-serve.sh",
            "5-request.sh",
            "6-bench.sh",
            "7-scale-out.sh",
            "8-drain.sh",
            "install.sh",
        ]


@pytest.mark.parametrize("step", STEPS, ids=NAMES)
def test_help_says_what_the_step_does_and_takes(step: Path) -> None:
    ended = run_step(step, "--help")
    assert ended.returncode == 0, ended.stderr
    first = step.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ")
    assert ended.stdout.startswith(first)
    for option in ("--dry-run", "--simulate", "--hosts", "--state"):
        assert option in ended.stdout


@pytest.mark.parametrize("step", STEPS, ids=NAMES)
@pytest.mark.parametrize("options", [[], ["--hosts", HOSTS], ["--simulate"]], ids=str)
def test_a_dry_run_shows_commands_that_are_accepted_and_leaves_nothing(
    step: Path, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = real_parser(monkeypatch)
    state = tmp_path / "state"
    # So that a third worker has room everywhere, and half of it is a number that the runtime joins.
    environ = {"TP": "2"}
    ended = run_step(step, "--dry-run", "--state", str(state), *options, environ=environ)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    commands = shown_commands(ended.stdout)
    assert commands
    for command in commands:
        assert command[0] != "sudo"
        if (words := neuron_di_words(command)) is not None:
            accept(words)
    assert not state.exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--simulated"], "unknown option --simulated"),
        (["--state"], "--state needs a value"),
        (["--hosts", "10.1.0.11"], "two addresses or more"),
        (["--hosts", "trn-a,trn-b"], "trn-a is none"),
        (["--hosts", "10.1.0.11,10.1.0.11"], "--hosts has 10.1.0.11 twice"),
        (["--hosts", "10.1.0.11,10.1.0.256"], "10.1.0.256 is none"),
        (["--simulate", "--hosts", HOSTS], "hosts are this machine"),
        (["--state", "/proc/none"], "nothing can be written to /proc/none: say --state FOLDER"),
    ],
)
def test_wrong_options_are_refused(options: list[str], says: str, tmp_path: Path) -> None:
    ended = run_step(TRN1 / "4-serve.sh", *options, environ={"STATE": str(tmp_path)})
    assert ended.returncode == 2
    assert says in ended.stderr


def test_a_step_is_found_by_a_link_and_whatever_CDPATH_says(tmp_path: Path) -> None:
    (tmp_path / "step").symlink_to(TRN1 / "4-serve.sh")
    ended = run_step(tmp_path / "step", "--dry-run", environ={"CDPATH": "/:.", "HOME": "/none"})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("$ env NEURON_RT_VISIBLE_CORES=0-31")


def refused(
    step: str, *options: str, state: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    """A step that lacks something: it says what and how to get it, and has started nothing."""
    ended = run_step(TRN1 / step, *options, environ={"STATE": str(state)} | environ)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "\n  mend: " in ended.stderr
    assert list(state.glob("*.pid")) == []
    return ended


def test_what_is_missing_is_said_with_its_mend(tmp_path: Path) -> None:
    elsewhere = "203.0.113.1,203.0.113.2"  # documentation's own addresses: nobody's
    ended = refused("4-serve.sh", "--hosts", elsewhere, state=tmp_path)
    assert f"none of {elsewhere} is an address of this machine" in ended.stderr
    ended = refused("7-scale-out.sh", "--dry-run", state=tmp_path)
    assert "48 NeuronCores are needed, and trn1.32xlarge has 32" in ended.stderr
    ended = refused("4-serve.sh", state=tmp_path, TP="17")
    assert "34 NeuronCores are needed" in ended.stderr
    # Before anything is shown, or done, on cores that there are not.
    ended = refused("3-compile.sh", "--dry-run", state=tmp_path, TP="4")
    assert "4 NeuronCores cannot be joined on trn1.32xlarge" in ended.stderr
    assert "mend: one of 1 2 8 16 32 for a worker" in ended.stderr
    ended = refused("6-bench.sh", "--dry-run", state=tmp_path, TP="32")
    assert "64 NeuronCores are needed" in ended.stderr
    assert ended.stdout == ""
    ended = refused("1-launch.sh", state=tmp_path, PATH=_tools(tmp_path / "aws", aws=""))
    assert "REGION is not set" in ended.stderr


def test_a_missing_program_is_said_with_its_mend(tmp_path: Path) -> None:
    """In a copy of the examples: there is no environment beside it in which neuron-di could be."""
    copy = copied("trn1", tmp_path)
    state = {"STATE": str(tmp_path / "state"), "HOME": str(tmp_path)}
    for step, hosts, program in [
        ("2-check.sh", "", "neuron-di"),
        ("4-serve.sh", "", "neuron-di"),
        ("3-compile.sh", "", "neuronx-cc"),
        ("4-serve.sh", "127.0.0.1,127.0.0.2", "etcd"),
        ("1-launch.sh", "", "aws"),
    ]:
        there = {} if program == "neuron-di" else {"neuron_di": "exit 0"}
        path = _tools(tmp_path / f"bin-{program}-{step}", **there)
        environ = state | IDS | {"HOSTS": hosts, "PATH": path}
        ended = run_step(copy / step, environ=environ)
        assert ended.returncode == 2, ended.stderr
        assert f"the program {program} is not here\n  mend: " in ended.stderr


def test_what_install_needs_is_said_with_its_mend(tmp_path: Path) -> None:
    sdk = tmp_path / "sdk"
    environ = {"STATE": str(tmp_path / "state"), "SDK_ENVIRONMENT": str(sdk)}
    copy = copied("trn1", tmp_path)
    ended = run_step(copy / "install.sh", environ=environ)
    assert ended.returncode == 2
    assert f"there is no {sdk}\n  mend: SDK_ENVIRONMENT=" in ended.stderr
    (sdk / "bin").mkdir(parents=True)
    python = sdk / "bin/python"
    python.write_text(f"#!/bin/sh\necho {tmp_path}/no-headers\n")
    python.chmod(0o755)
    ended = run_step(copy / "install.sh", environ=environ)
    assert ended.returncode == 2
    assert f"{sdk} has no neuronx-cc\n  mend: SDK_ENVIRONMENT=" in ended.stderr
    (sdk / "bin/neuronx-cc").symlink_to("/bin/true")
    ended = run_step(copy / "install.sh", environ=environ)
    assert ended.returncode == 2
    assert "no-headers/Python.h\n  mend: sudo apt-get install python3-dev" in ended.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_port_that_somebody_has_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = refused("4-serve.sh", state=tmp_path, PROXY_PORT=port)
    assert f"port {port} of 127.0.0.1 is taken" in ended.stderr
    assert "PROXY_PORT" in ended.stderr


def test_only_processes_that_the_steps_started_are_ended(tmp_path: Path) -> None:
    """A pid file whose start time is another's: the number was given to somebody else since."""
    with _sleeper() as stranger, _sleeper() as ours:
        (tmp_path / "serve.pid").write_text(f"{stranger.pid} 1\n")
        (tmp_path / "decode-1.pid").write_text(f"{ours.pid} {_start_ticks(ours.pid)}\n")
        (tmp_path / "etcd.pid").write_text("\n")  # a step that was broken off while it wrote
        # What else is in the folder is not theirs.
        (tmp_path / "postgres.pid").write_text(f"{stranger.pid}\n")
        (tmp_path / "etcd").mkdir()
        ended = run_step(TRN1 / "8-drain.sh", environ={"STATE": str(tmp_path), "PROXY_PORT": "1"})
        assert ended.returncode == 0, ended.stderr
        assert ours.wait(timeout=10) < 0
        assert "decode-1 has ended" in ended.stdout
        assert "serve has ended" not in ended.stdout
        assert stranger.poll() is None
    assert list(tmp_path.glob("*.pid")) == [tmp_path / "postgres.pid"]
    assert (tmp_path / "etcd").is_dir()


def _start_ticks(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


@contextmanager
def _sleeper() -> Iterator[psutil.Popen]:
    process = psutil.Popen(["sleep", "100"])
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _tools(folder: Path, **programs: str) -> str:
    """A PATH with what every system has, and programs of our own with these bodies."""
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        os.symlink(found, folder / name)
    os.symlink(sys.executable, folder / "python3")
    for name, body in programs.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    return str(folder)
