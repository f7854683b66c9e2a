"""The trn1 tutorial as its page has it, on simulated NeuronCores: one host, and two with etcd.

So far this has run on a simulator of libnrt only.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from neuron_kit import has_compiler
from tutorial_stage import HOSTS, Stage, stage

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not has_compiler(), reason="the simulator is built by a C compiler"),
]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture
def trn1(tmp_path: Path, artifacts: Path) -> Iterator[Stage]:
    with stage("trn1", tmp_path, artifacts) as made:
        yield made


def test_one_host(trn1: Stage, artifacts: Path) -> None:
    # All of a simulated host is in order, the stand-in's packages too: else the step fails.
    checked = trn1.do("2-check")
    assert re.search(r"^ok +neuron\.cores ", checked, re.M)
    assert "\nfailed " not in checked
    assert str(artifacts) in trn1.do("3-compile")
    trn1.do("4-serve")
    before = trn1.pids()
    assert list(before) == ["serve"]
    assert "serve runs already" in trn1.do("4-serve")
    assert trn1.pids() == before

    asked = trn1.do("5-request")
    assert "data: [DONE]" in asked
    assert "computed by prefill-0, then decode-0" in asked
    assert "its KV went by the engine nrt" in asked

    measured = trn1.do("6-bench")
    assert "combined / 1P1D  ratio in each of 2 slices" in measured
    assert list(trn1.pids()) == ["serve"]
    figures = json.loads((trn1.state / "bench.json").read_text())
    assert {"1P1D", "combined"} <= set(json.dumps(figures).split('"'))

    grown = trn1.do("7-scale-out")
    assert "decode-1 takes KV from prefill-0 by nrt" in grown
    assert set(trn1.pids()) == {"serve", "decode-1"}
    drained = trn1.do("8-drain")
    assert "decode-1 has ended: 0 requests finished, none failed" in drained
    assert "serve has ended" in drained
    assert "terminate-instances" in drained
    assert trn1.pids() == {}
    trn1.do("8-drain")  # nothing is left to be done


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_two_hosts(trn1: Stage) -> None:
    hosts = ("--hosts", HOSTS)
    trn1.do("3-compile", *hosts)
    trn1.do("4-serve", *hosts)
    assert set(trn1.pids()) == {"etcd", "proxy", "prefill-0", "decode-0"}
    # A worker that died is the only one to be started again.
    before = trn1.pids()
    os.kill(before["decode-0"], signal.SIGKILL)
    again = trn1.do("4-serve", *hosts)
    assert again.count("runs already") == 3
    after = trn1.pids()
    assert {name for name in before if before[name] != after[name]} == {"decode-0"}

    key = (trn1.state / "key").read_text().strip()
    asked = trn1.do("5-request", *hosts)
    assert "its KV went by the engine nrt" in asked
    measured = trn1.do("6-bench", *hosts)
    assert "4 ok, 0 failed" in measured
    grown = trn1.do("7-scale-out", *hosts)
    for worker in ("decode-0", "decode-1"):
        assert f"{worker} takes KV from prefill-0 by nrt" in grown
    # The key lets its owner give orders: it is in no output, and in no log.
    for path in ("key", "authorization", "keys.toml"):
        assert (trn1.state / path).stat().st_mode & 0o077 == 0
    drained = trn1.do("8-drain", *hosts)
    assert key not in "".join((again, asked, measured, grown, drained, trn1.logs()))
    for worker in ("decode-1", "prefill-0", "decode-0"):
        assert f"{worker} has ended: 0 requests finished, none failed" in drained
    assert "proxy has ended" in drained
    assert "etcd has ended" in drained
    assert trn1.pids() == {}
    assert not (trn1.state / "tutorial-etcd").exists()
