"""What NIXL alone has: transfers without an end of their own, lanes, settings that cannot work."""

from dataclasses import replace

import pytest

from neuron_di.errors import ConfigError, PeerGone, PeerTimeout
from neuron_di.transfer import nixl_agent
from neuron_di.transfer.nixl_engine import NixlEngine

from .engine_kinds import KINDS, EngineKind
from .peer_process import peer_process
from .test_processes import LARGE, NUM_LARGE, scene_of
from .transfer_pair import DECODE, LAYOUT, PREFILL, UNTOUCHED, one_end

HASTY = EngineKind(
    name="nixl over tcp",  # what the peer takes
    make=lambda pool: NixlEngine(pool, ucx_config="TLS=tcp", timeout_s=0.3),
)


@pytest.fixture(autouse=True)
def _installed():
    if KINDS["nixl"].why_not is not None:
        pytest.skip(KINDS["nixl"].why_not)


def test_a_peer_that_stands_still_costs_its_receives_and_no_later_byte_comes():
    block_ids = range(NUM_LARGE)
    with scene_of(HASTY, LARGE, NUM_LARGE) as scene:
        assert scene.move([0], [0]).error() is None
        scene.received[:] = UNTOUCHED
        receive = scene.receive_of(block_ids, block_ids)
        late = replace(receive, tag=receive.tag + 2)
        scene.peer.stop()
        stuck, queued = scene.post(receive), scene.post(replace(receive, tag=receive.tag + 1))
        assert isinstance(stuck.error(), PeerTimeout)
        assert isinstance(queued.error(), PeerGone)
        scene.received[:] = UNTOUCHED  # the blocks are another request's now
        scene.peer.go_on()
        with peer_process(HASTY.name, LARGE, NUM_LARGE) as successor:
            assert isinstance(scene.post(late).error(), PeerGone)
            assert (scene.received == UNTOUCHED).all()
            scene.engine.connect(PREFILL, successor.region, LARGE)
            scene.peer = successor
            assert scene.move([1], [1]).error() is None
        assert (scene.received[1] == scene.sent[1]).all()
        assert (scene.received[[0, *range(2, NUM_LARGE)]] == UNTOUCHED).all()


def test_lanes_that_notice_no_peers_end_are_refused_when_the_worker_starts():
    kind = EngineKind(name="nixl", make=lambda pool: NixlEngine(pool, ucx_config="TLS=shm,self"))
    with pytest.raises(ConfigError, match="UCX_TLS"), one_end(kind, DECODE, LAYOUT, 4):
        pass


def test_without_the_package_the_extra_is_named(monkeypatch):
    def import_module(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    nixl_agent.load_nixl.cache_clear()
    monkeypatch.setattr(nixl_agent.importlib, "import_module", import_module)
    try:
        with (
            pytest.raises(ConfigError, match=r"pip install 'neuron-di\[nixl\]'"),
            one_end(KINDS["nixl"], DECODE, LAYOUT, 4),
        ):
            pass
    finally:
        nixl_agent.load_nixl.cache_clear()
