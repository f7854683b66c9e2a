"""The trn2 tutorial as its page has it, on a simulated trn2.48xlarge with its logical cores.

So far this has run on a simulator of libnrt only. Two hosts, and step 6, are the same scripts as
trn1's, where they run.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from neuron_kit import has_compiler
from tutorial_stage import Stage, stage

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not has_compiler(), reason="the simulator is built by a C compiler"),
]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture
def trn2(tmp_path: Path, artifacts: Path) -> Iterator[Stage]:
    with stage("trn2", tmp_path, artifacts) as made:
        yield made


def test_one_host_hands_over_from_device_to_device(trn2: Stage) -> None:
    # The runtime counts logical cores, two physical ones each.
    assert "64 NeuronCores" in trn2.do("2-check", NEURON_DI_ONLY="neuron")
    trn2.do("3-compile")
    trn2.do("4-serve")
    asked = trn2.do("5-request")
    assert "data: [DONE]" in asked
    assert "computed by prefill-0, then decode-0" in asked
    assert "its KV went by the engine nrt (" in asked
    grown = trn2.do("7-scale-out")
    assert "NEURON_RT_VISIBLE_CORES=4-5" in grown
    for worker in ("decode-0", "decode-1"):
        assert f"{worker} takes KV from prefill-0 by nrt" in grown
    drained = trn2.do("8-drain")
    assert "decode-1 has ended: 0 requests finished, none failed" in drained
    assert trn2.pids() == {}
