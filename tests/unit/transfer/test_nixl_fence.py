"""One agent reads all that came back, whoever sent it; where that fails nothing is believed.

Real agents over UCX; the tensors lie in host memory (tests/contract/nixl_end.py).
"""

from contextlib import closing
from importlib.util import find_spec

import numpy as np
import pytest
from contract import nixl_end
from nixl_kit import (
    DECODE,
    LAYOUT,
    NUM_BLOCKS,
    PREFILL,
    Native,
    one_end,
    record_reads,
    two_ends,
    use_native,
)

from neuron_di.errors import PeerGone, PeerTimeout
from neuron_di.transfer.nixl_agent import NixlAgent
from neuron_di.types import Incarnation

pytestmark = pytest.mark.skipif(
    find_spec("nixl_cu12") is None, reason="the package nixl-cu12 is not installed"
)

OTHER = Incarnation("ab" * 16)
FENCE = f"{DECODE}-fence"


def fences(asked):
    return [one.reader for one in asked if one.reader.startswith(FENCE)]


def test_one_fence_is_for_all_peers(monkeypatch):
    asked = record_reads(monkeypatch)
    with two_ends() as two, one_end(OTHER) as other:
        other.engine.accept(DECODE, two.decode.engine.local_region(OTHER), LAYOUT)
        two.decode.engine.connect(OTHER, other.engine.local_region(DECODE), LAYOUT)
        assert two.move([1], [0]).error() is None
        assert set(fences(asked)) == {f"{FENCE}-0"}
        assert len(fences(asked)) == 3  # two connections, one request


def test_a_worker_that_receives_nothing_has_none(monkeypatch):
    names = []

    class Named(Native):
        def __init__(self, name, config):
            names.append(name)
            super().__init__(name, config)

    use_native(monkeypatch, Named)
    with two_ends():
        pass
    assert sorted(names) == sorted([PREFILL, DECODE, f"{FENCE}-0", f"{DECODE}-{PREFILL}-0"])


def test_what_cannot_be_read_back_is_not_taken_and_the_next_connection_has_a_new_fence(monkeypatch):
    asked = record_reads(monkeypatch)
    with two_ends() as two:
        two.decode.pool.retire(range(NUM_BLOCKS))
        with monkeypatch.context() as patch:

            def read_none(agent, *args, **kinds):
                if agent.name.startswith(FENCE):
                    raise PeerTimeout("a transfer from the prefill worker came to a halt")
                read(agent, *args, **kinds)

            read = NixlAgent.read
            patch.setattr(NixlAgent, "read", read_none)
            assert isinstance(two.move([1], [0]).error(), PeerTimeout)
        assert not two.decode.pool.is_on_device(0)
        assert isinstance(two.move([1], [0]).error(), PeerGone)  # that connection is over
        asked.clear()
        two.connect()
        assert two.move([1], [0]).error() is None
        assert set(fences(asked)) == {f"{FENCE}-1"}
        assert (two.decode.blocks[0] == two.prefill.blocks[1]).all()


def test_a_fence_that_cannot_be_opened_is_no_connection_and_may_be_the_next_time(monkeypatch):
    with two_ends(is_connected=False) as two:
        region = two.accept()
        with monkeypatch.context() as patch:

            class Deaf(Native):
                def makeConnection(self, agent, backends):
                    raise RuntimeError("no way")

            use_native(patch, Deaf)
            with pytest.raises(PeerGone, match="no way"):
                two.connect(region)
        two.connect(region)
        assert two.move([1], [0]).error() is None


def test_who_waits_for_others_numbers_waits_for_so_long_only():
    with closing(nixl_end.make_pool(LAYOUT, NUM_BLOCKS, DECODE)) as pool:
        engine = nixl_end.make_engine(pool, timeout_s=0.05)
        fence = engine._fence
        with closing(engine), fence._lock, pytest.raises(PeerTimeout):
            fence.read_back(np.arange(1), np.zeros(1, np.int64))
        with pytest.raises(PeerGone, match="closed"):
            fence.read_back(np.arange(1), np.zeros(1, np.int64))
