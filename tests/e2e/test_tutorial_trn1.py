"""The trn1 tutorial as its page has it, on simulated NeuronCores: one host, and two with etcd.

So far this has run on a simulator of libnrt only.
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tutorial_stage import (
    HOSTS,
    MARKS,
    Stage,
    needs_etcd,
    serve_two_hosts,
    stage,
    use_one_host,
    use_two_hosts,
)

pytestmark = MARKS


@pytest.fixture
def trn1(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage("trn1", tmp_path, tmp_path_factory) as made:
        yield made


def test_one_host(trn1: Stage) -> None:
    # All of a simulated host is in order, the stand-in's packages too: else the step fails.
    checked = trn1.do("2-check")
    assert re.search(r"^ok +neuron\.cores ", checked, re.M)
    assert "\nfailed " not in checked
    assert trn1.environ["NEURON_DI_NEURON_ARTIFACTS"] in trn1.do("3-compile")
    trn1.do("4-serve")
    before = trn1.pids()
    assert list(before) == ["serve"]
    assert "serve runs already" in trn1.do("4-serve")
    assert trn1.pids() == before

    use_one_host(trn1, "nrt")
    figures = json.loads((trn1.state / "bench.json").read_text())
    assert {"1P1D", "combined"} <= set(json.dumps(figures).split('"'))
    trn1.do("8-drain")  # nothing is left to be done


@needs_etcd
def test_two_hosts(trn1: Stage) -> None:
    serve_two_hosts(trn1)
    # So the pair's test is over: who dies while KV moves by libnrt takes its peer along.
    trn1.do("5-request", "--hosts", HOSTS)
    # A worker that died is the only one to be started again.
    before = trn1.pids()
    os.kill(before["decode-0"], signal.SIGKILL)
    again = trn1.do("4-serve", "--hosts", HOSTS)
    assert again.count("runs already") == 3
    after = trn1.pids()
    assert {name for name in before if before[name] != after[name]} == {"decode-0"}

    # The key lets its owner give orders: it is in no output, and in no log.
    key = (trn1.state / "key").read_text().strip()
    for path in ("key", "authorization", "keys.toml"):
        assert (trn1.state / path).stat().st_mode & 0o077 == 0
    printed = use_two_hosts(trn1, "nrt")
    assert key not in "".join((again, printed, trn1.logs()))
