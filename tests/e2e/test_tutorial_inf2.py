"""The inf2 tutorial as its page has it, on a simulated inf2.48xlarge, which has no EFA.

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
def inf2(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage("inf2", tmp_path, tmp_path_factory) as made:
        yield made


def test_one_host_hands_over_by_shared_memory(inf2: Stage) -> None:
    assert "24 NeuronCores" in inf2.do("2-check", NEURON_DI_ONLY="neuron")
    inf2.do("3-compile")
    inf2.do("4-serve")
    asked, grown = use_one_host(inf2, "shm")
    assert "(shm: chosen)" in asked  # nothing else was asked for
    assert "ASYNC_SENDRECV" not in asked + grown  # no mend that would not mend it


@needs_etcd
def test_two_hosts_hand_over_by_their_memory_and_tcp(inf2: Stage) -> None:
    served = serve_two_hosts(inf2)
    assert served.count("NEURON_DI_TRANSFER=tcp NEURON_DI_TRANSFER_STREAMS=10") == 2
    use_two_hosts(inf2, "tcp")
