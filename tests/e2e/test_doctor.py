"""`neuron-di doctor` as its users run it: on this machine, whatever it is."""

import asyncio
import json
import signal
import socket
from collections.abc import Iterator

import psutil
import pytest
from openai_kit import DEADLINE_S
from process_kit import command, run

from neuron_di.doctor.checks import GROUPS
from neuron_di.doctor.finding import Grade
from neuron_di.etcd.child import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

KEYS = ["is_well", "counts", "duration_s", "findings", "version", "format"]
FEW = ("--only", "host,environment")


@pytest.fixture
def silent() -> Iterator[str]:
    """An address where connections are taken, and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield f"127.0.0.1:{sock.getsockname()[1]}"


async def test_this_machine_is_well_and_json_says_all_of_it() -> None:
    (port,) = free_ports(1)
    ended = await run("doctor", "--json", "--port", str(port))
    report = json.loads(ended.stdout)
    failed = [each for each in report["findings"] if each["grade"] == "failed"]
    assert (ended.code, failed) == (0, [])
    assert ended.stderr == ""
    assert list(report) == KEYS
    assert report["is_well"] is True
    for finding in report["findings"]:
        assert list(finding) == ["check", "grade", "says", "mend", "facts"]
        assert finding["grade"] in set(Grade)
    groups = [finding["check"].partition(".")[0] for finding in report["findings"]]
    assert list(dict.fromkeys(groups)) == list(GROUPS)
    moved = {each["check"]: each["facts"] for each in report["findings"]}
    for engine in ("shm", "tcp"):
        assert all(shape["gb_per_s"] > 0 for shape in moved[f"transfer.{engine}"]["moved"])


async def test_a_pipe_gets_plain_lines_and_the_same_names_each_time() -> None:
    first, second = await asyncio.gather(run("doctor", *FEW), run("doctor", *FEW))
    assert (first.code, second.code) == (0, 0)
    assert "\x1b" not in first.stdout + first.stderr
    lines = first.stdout.splitlines()
    grades = set(Grade) | {""}
    assert {line[:8].strip() for line in lines[:-2]} <= grades
    assert lines[-2] == ""
    assert lines[-1].endswith(" s")
    names = [line[9:31].strip() for line in lines[:-2]]
    assert names[0] == "host.system"
    assert names == [line[9:31].strip() for line in second.stdout.splitlines()[:-2]]


async def test_what_fails_ends_it_with_1_and_says_the_mend() -> None:
    (closed,) = free_ports(1)
    environ = {"NEURON_DI_PROT": "1"}
    peer = f"127.0.0.1:{closed}"
    ended = await run("doctor", "--only", "peers,environment", "--peer", peer, environ=environ)
    assert ended.code == 1
    lines = ended.stdout.splitlines()
    assert f"{peer} is not reached" in lines[-5]
    assert lines[-4].strip().startswith("→ Start what should listen there")
    assert lines[-1] == "failed: environment.ours, peers.connect"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--only", "etc"), "there is no group 'etc'; the nearest is 'etcd'"),
        (("--port", "x"), "--port must be a whole number"),
        (("--peers", "a:1"), "the nearest valid one is --peer"),
        (("--peer", "a"), "--peer must be a list of HOST:PORT"),
        (("more",), "unexpected argument 'more'"),
        (("--first-hour", "/dev/null", "--only", "efa"), "--first-hour asks its own questions"),
        (("--first-hour", "/dev/null", "--json"), "--first-hour writes its JSON into its report"),
    ],
)
async def test_wrong_flags_end_it_with_2(flags: tuple[str, ...], words: str) -> None:
    ended = await run("doctor", *flags)
    assert (ended.code, ended.stdout) == (2, "")
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


async def test_help_names_the_groups_and_the_codes() -> None:
    ended = await run("doctor", "--help")
    text = " ".join(ended.stdout.split())
    assert f"Groups of checks: {', '.join(GROUPS)}." in text
    assert "0 nothing failed, 1 something failed, 2 wrong flags" in text
    assert "--first-hour FILE" in text


async def test_who_does_not_answer_holds_nothing_up(silent: str) -> None:
    flags = ("--only", "peers,etcd,clock", "--etcd", silent, "--peer", silent, "--json")
    ended = await run("doctor", *flags)
    assert ended.code == 1
    grades = {each["check"]: each["grade"] for each in json.loads(ended.stdout)["findings"]}
    assert grades["peers.connect"] == "ok"
    assert grades["etcd.member"] == "failed"
    assert "doctor.deadline" not in grades


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_a_doctor_that_is_ended_leaves_nothing_running(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(DEADLINE_S)
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        async with command("doctor", "--only", "etcd", "--etcd", address) as process:
            asked, _ = await asyncio.to_thread(sock.accept)
            (check,) = psutil.Process(process.pid).children()  # which waits for an answer now
            process.send_signal(number)
            _, stderr = await process.communicate()
            asked.close()
        is_killed = number == signal.SIGKILL  # else it ends in order, as a shell names a signal
        assert process.returncode == (-number if is_killed else 128 + number)
        assert b"Traceback" not in stderr
        await asyncio.to_thread(psutil.wait_procs, [check], DEADLINE_S)
        assert not check.is_running()


async def test_who_has_read_enough_ends_it() -> None:
    async with command("doctor", *FEW) as process:
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"ok       host.system")
        process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
        async with asyncio.timeout(DEADLINE_S):
            await process.wait()
        assert process.stderr is not None
        assert await process.stderr.read() == b""


@pytest.mark.parametrize("flags", [(), ("--json",)])
async def test_a_full_disk_ends_it_with_1_and_a_line(flags: tuple[str, ...]) -> None:
    within = ("sh", "-c", 'exec "$@" >/dev/full', "sh")
    async with command("doctor", "--only", "host", *flags, within=within) as process:
        async with asyncio.timeout(DEADLINE_S):
            _, stderr = await process.communicate()
        assert process.returncode == 1
    assert stderr.decode() == "neuron-di: cannot write: No space left on device\n"


@pytest.mark.parametrize("flags", [(), ("--json",)])
async def test_variables_that_are_not_utf_8_end_nothing(flags: tuple[str, ...]) -> None:
    lone = "\udcff"
    environ = {f"NEURON_DI_{lone}": lone, "NEURON_RT_VISIBLE_CORES": lone, "OMP_PROC_BIND": lone}
    only = ("--only", "environment,host,neuron", "--device", "neuron")
    ended = await run("doctor", *only, *flags, environ=environ)
    assert (ended.code, ended.stderr) == (1, "")
    assert "NEURON_DI_?" in ended.stdout
    assert "NEURON_RT_VISIBLE_CORES=?" in ended.stdout
    assert "doctor." not in ended.stdout


async def test_too_few_files_are_a_finding() -> None:
    within = ("sh", "-c", 'ulimit -n 12; exec "$@"', "sh")
    async with command("doctor", "--only", "transfer", "--json", within=within) as process:
        async with asyncio.timeout(DEADLINE_S):
            stdout, stderr = await process.communicate()
    findings = json.loads(stdout)["findings"]
    assert (process.returncode, stderr) == (1, b"")
    (found,) = findings
    assert found["check"] == "transfer.test"
    assert "Too many open files" in found["says"]
    assert "ulimit -n" in found["mend"]
