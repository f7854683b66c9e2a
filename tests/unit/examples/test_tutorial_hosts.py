"""Of several hosts a step does its own part only. Who is started here says so, and no more.

Real workers take these parts in tests/e2e/test_tutorial_trn1.py, where one machine is all hosts.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest
from tutorial_kit import EXAMPLES, run_step

TRN1 = EXAMPLES / "trn1"
ELSEWHERE = "203.0.113.9"  # documentation's own address: nobody's
# Says that it is ready, as a worker does, and stays; orders and questions it answers at once.
STAYS = """#!/bin/bash
case "$1" in
    proxy | worker) echo event=ready && exec sleep 100 ;;
    key) echo a-key ;;
    status) echo "decode-1 decode ready now" ;;
esac
"""
Step = Callable[..., CompletedProcess[str]]


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    """Run a step as this host; whoever it left is ended."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {"neuron-di": STAYS, "etcd": "#!/bin/bash\nexec sleep 100\n", "curl": "#!/bin/sh\n"}
    for name, body in programs.items():
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)

    def run(name: str, hosts: str) -> CompletedProcess[str]:
        environ = {
            "PATH": os.pathsep.join([str(folder), os.environ["PATH"]]),
            "STATE": str(tmp_path / "state"),
            "PROXY_PORT": "0",  # whichever is free: nobody connects
            "ETCD_PORT": "0",
            "ETCD_PEER_PORT": "0",
        }
        return run_step(TRN1 / f"{name}.sh", "--hosts", hosts, environ=environ)

    yield run
    for pid in started(tmp_path).values():
        psutil.Process(pid).kill()


def started(tmp_path: Path) -> dict[str, int]:
    return {p.stem: int(p.read_text().split()[0]) for p in (tmp_path / "state").glob("*.pid")}


def test_the_first_host_has_etcd_the_proxy_and_its_worker(step: Step, tmp_path: Path) -> None:
    hosts = f"127.0.0.1,{ELSEWHERE}"
    ended = step("4-serve", hosts)
    assert ended.returncode == 0, ended.stderr
    assert set(started(tmp_path)) == {"etcd", "proxy", "prefill-0"}
    assert f"on {ELSEWHERE}" not in ended.stdout
    assert step("7-scale-out", hosts).returncode == 0  # the other host's: here it is only shown
    assert set(started(tmp_path)) == {"etcd", "proxy", "prefill-0"}
    ended = step("8-drain", hosts)
    assert ended.returncode == 0, ended.stderr
    assert "neuron-di drain decode-1" in ended.stdout
    assert started(tmp_path) == {}


def test_another_host_has_workers_only_and_gives_no_orders(step: Step, tmp_path: Path) -> None:
    hosts = f"{ELSEWHERE},127.0.0.1"
    assert step("4-serve", hosts).returncode == 0
    assert set(started(tmp_path)) == {"decode-0"}
    assert step("7-scale-out", hosts).returncode == 0
    assert set(started(tmp_path)) == {"decode-0", "decode-1"}
    for name in ("5-request", "6-bench"):
        ended = step(name, hosts)
        assert ended.returncode == 2
        assert f"mend: run it on {ELSEWHERE}" in ended.stderr
    assert not (tmp_path / "state/key").exists()
    ended = step("8-drain", hosts)
    assert ended.returncode == 0, ended.stderr
    assert "neuron-di drain" not in ended.stdout
    assert started(tmp_path) == {}
