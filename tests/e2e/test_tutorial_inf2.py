"""The inf2 tutorial as its page has it, on a simulated inf2.48xlarge, which has no EFA.

So far this has run on a simulator of libnrt only.
"""

import shutil
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
def inf2(tmp_path: Path, artifacts: Path) -> Iterator[Stage]:
    with stage("inf2", tmp_path, artifacts) as made:
        yield made


def test_one_host_hands_over_by_shared_memory(inf2: Stage) -> None:
    assert "24 NeuronCores" in inf2.do("2-check", NEURON_DI_ONLY="neuron")
    inf2.do("3-compile")
    inf2.do("4-serve")
    assert list(inf2.pids()) == ["serve"]
    asked = inf2.do("5-request")
    assert "data: [DONE]" in asked
    assert "its KV went by the engine shm (" in asked
    assert "nrt: not_available" in asked
    assert "no EFA adapter beside it" in asked  # the status, on why
    # There is room for a third worker.
    grown = inf2.do("7-scale-out")
    assert "NEURON_RT_VISIBLE_CORES=4-5" in grown
    for worker in ("decode-0", "decode-1"):
        assert f"{worker} takes KV from prefill-0 by shm" in grown
    assert "ASYNC_SENDRECV" not in grown  # no mend that would not mend it
    drained = inf2.do("8-drain")
    assert "decode-1 has ended: 0 requests finished, none failed" in drained
    assert "serve has ended" in drained
    assert inf2.pids() == {}


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_two_hosts_hand_over_by_their_memory_and_tcp(inf2: Stage) -> None:
    hosts = ("--hosts", HOSTS)
    inf2.do("3-compile", *hosts)
    served = inf2.do("4-serve", *hosts)
    assert served.count("NEURON_DI_TRANSFER=tcp NEURON_DI_TRANSFER_STREAMS=10") == 2
    assert set(inf2.pids()) == {"etcd", "proxy", "prefill-0", "decode-0"}
    asked = inf2.do("5-request", *hosts)
    assert "data: [DONE]" in asked
    assert "its KV went by the engine tcp (" in asked
    measured = inf2.do("6-bench", *hosts)
    assert " ok, 0 failed" in measured
    grown = inf2.do("7-scale-out", *hosts)
    for worker in ("decode-0", "decode-1"):
        assert f"{worker} takes KV from prefill-0 by tcp" in grown
    drained = inf2.do("8-drain", *hosts)
    for worker in ("decode-1", "prefill-0", "decode-0"):
        assert f"{worker} has ended: 0 requests finished, none failed" in drained
    assert inf2.pids() == {}
