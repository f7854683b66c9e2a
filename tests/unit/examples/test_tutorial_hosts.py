"""Of several hosts a step does its own part only. Who is started here says so, and no more.

Real workers take these parts in tests/e2e/test_tutorial_trn1.py, where one machine is all hosts.
"""

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest
from tutorial_kit import EXAMPLES, copied, neuron_di_words, run_step, shown_commands

TRN1 = EXAMPLES / "trn1"
ELSEWHERE = "203.0.113.9"  # documentation's own address: nobody's
# Says that it is ready, as a worker does, and stays; orders and questions it answers at once.
STAYS = """#!/bin/bash
case "$1" in
    proxy | worker) echo event=ready && exec sleep 100 ;;
    key) echo a-key ;;
    status)
        for name in decode-1 $LISTED; do echo "$name its-role ready now"; done
        echo "decode-1 takes KV from prefill-0 by it"
        ;;
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

    def run(name: str, hosts: str, **more: str) -> CompletedProcess[str]:
        environ = {
            "PATH": os.pathsep.join([str(folder), os.environ["PATH"]]),
            "STATE": str(tmp_path / "state"),
            "PROXY_PORT": "0",  # whichever is free: nobody connects
            "COMBINED_PORT": "0",
            "ETCD_PORT": "0",
            "ETCD_PEER_PORT": "0",
        }
        return run_step(TRN1 / f"{name}.sh", "--hosts", hosts, environ=environ | more)

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
    ended = step("5-request", hosts)
    assert ended.returncode == 2
    assert f"mend: run it on {ELSEWHERE}" in ended.stderr
    assert not (tmp_path / "state/key").exists()
    ended = step("8-drain", hosts)
    assert ended.returncode == 0, ended.stderr
    assert "neuron-di drain" not in ended.stdout
    assert started(tmp_path) == {}


def test_the_first_host_measures_once_the_others_have_their_workers(
    step: Step, tmp_path: Path
) -> None:
    hosts = f"127.0.0.1,{ELSEWHERE}"
    assert step("4-serve", hosts).returncode == 0
    before = started(tmp_path)
    ended = step("6-bench", hosts)
    assert ended.returncode == 2
    assert f"combined-1 does not run yet\n  mend: first this step on {ELSEWHERE}" in ended.stderr
    assert started(tmp_path) == before
    ended = step("6-bench", hosts, LISTED="combined-0 combined-1")
    assert ended.returncode == 0, ended.stderr
    assert "1P1D, 32 NeuronCores, beside 2 combined workers, 32 NeuronCores" in ended.stdout
    bench, *drains = (
        words
        for words in map(neuron_di_words, shown_commands(ended.stdout))
        if words and words[0] in ("bench", "drain")
    )
    urls = [word for flag, word in pairwise(bench) if flag == "--url"]
    assert urls == ["http://127.0.0.1:0", "http://127.0.0.1:0"]
    assert [word for flag, word in pairwise(bench) if flag == "--name"] == ["1P1D", "combined"]
    assert [words[1] for words in drains] == ["combined-0", "combined-1"]
    assert started(tmp_path) == before


def test_another_host_gives_its_cores_to_steps_6_and_7_in_turn(step: Step, tmp_path: Path) -> None:
    hosts = f"{ELSEWHERE},127.0.0.1"
    assert step("4-serve", hosts).returncode == 0
    ended = step("6-bench", hosts)
    assert ended.returncode == 0, ended.stderr
    assert f"next: this step on {ELSEWHERE}" in ended.stdout
    assert set(started(tmp_path)) == {"decode-0", "combined-1"}
    # Nobody measured: the worker is in the way, and goes.
    assert step("7-scale-out", hosts).returncode == 0
    assert set(started(tmp_path)) == {"decode-0", "decode-1"}
    ended = step("6-bench", hosts)
    assert ended.returncode == 2
    assert "decode-1 of step 7 has NeuronCores of this step\n  mend: on the first" in ended.stderr
    assert step("8-drain", hosts).returncode == 0
    assert started(tmp_path) == {}


def test_without_combined_workers_it_says_that_it_compares_with_nothing(tmp_path: Path) -> None:
    """As where a worker has a whole host."""
    copy = copied("trn1", tmp_path)
    settings = copy / "settings.sh"
    settings.write_text(settings.read_text() + "COMBINED_WORKERS=()\n")
    hosts = f"127.0.0.1,{ELSEWHERE}"
    ended = run_step(copy / "6-bench.sh", "--dry-run", "--hosts", hosts)
    assert ended.returncode == 0, ended.stderr
    assert "what step 4 started is measured alone, beside nothing" in ended.stdout
    assert "combined" not in ended.stdout.replace("COMBINED", "").replace(str(tmp_path), "")
