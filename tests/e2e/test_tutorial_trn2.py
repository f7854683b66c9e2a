"""The trn2 tutorial as its page has it, on a simulated trn2.48xlarge with its logical cores.

So far this has run on a simulator of libnrt only.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tutorial_stage import (
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
def trn2(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage("trn2", tmp_path, tmp_path_factory) as made:
        yield made


def test_one_host_hands_over_from_device_to_device(trn2: Stage) -> None:
    # The runtime counts logical cores, two physical ones each.
    assert "64 NeuronCores" in trn2.do("2-check", NEURON_DI_ONLY="neuron")
    trn2.do("3-compile")
    trn2.do("4-serve")
    use_one_host(trn2, "nrt")


@needs_etcd
def test_two_hosts_hand_over_from_device_to_device(trn2: Stage) -> None:
    served = serve_two_hosts(trn2)
    assert served.count("NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED=1") == 2
    use_two_hosts(trn2, "nrt")
