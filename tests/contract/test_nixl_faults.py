"""What NIXL alone has: transfers without an end of their own, lanes, settings that cannot work."""

from collections import Counter
from dataclasses import replace
from types import ModuleType

import pytest

from neuron_di.clock import Deadline, now_s
from neuron_di.errors import ConfigError, PeerGone, PeerTimeout
from neuron_di.transfer import nixl_agent, nixl_engine, nixl_reader, transfer_engine
from neuron_di.transfer.nixl_engine import NixlEngine

from .engine_kinds import KINDS, EngineKind
from .peer_process import peer_process
from .test_processes import LARGE, NUM_LARGE, scene_of
from .transfer_pair import DECODE, LAYOUT, PREFILL, UNTOUCHED, connected_pair, one_end

OVER_TCP = KINDS["nixl over tcp"]
HASTE_S = 0.3  # of a read from a peer that stands still; any other has time


@pytest.fixture(autouse=True)
def _installed():
    if KINDS["nixl"].why_not is not None:
        pytest.skip(KINDS["nixl"].why_not)


def test_a_peer_that_stands_still_costs_its_receives_and_no_later_byte_comes(monkeypatch):
    block_ids = range(NUM_LARGE)
    with scene_of(OVER_TCP, LARGE, NUM_LARGE) as scene:
        assert scene.move([0], [0]).error() is None
        scene.received[:] = UNTOUCHED
        receive = scene.receive_of(block_ids, block_ids)
        late = replace(receive, tag=receive.tag + 2)
        scene.peer.stop()
        with monkeypatch.context() as hasty:
            hasty.setattr(nixl_reader, "deadline_of", lambda *_: Deadline.after(HASTE_S))
            stuck, queued = scene.post(receive), scene.post(replace(receive, tag=receive.tag + 1))
            assert isinstance(stuck.error(), PeerTimeout)
            assert isinstance(queued.error(), PeerGone)
        scene.received[:] = UNTOUCHED  # the blocks are another request's now
        scene.peer.go_on()
        with peer_process(OVER_TCP.name, LARGE, NUM_LARGE) as successor:
            assert isinstance(scene.post(late).error(), PeerGone)
            assert (scene.received == UNTOUCHED).all()
            scene.engine.connect(PREFILL, successor.region, LARGE)
            scene.peer = successor
            assert scene.move([1], [1]).error() is None
        assert (scene.received[1] == scene.sent[1]).all()
        assert (scene.received[[0, *range(2, NUM_LARGE)]] == UNTOUCHED).all()


def test_what_a_peer_that_stands_still_owes_does_not_outlive_the_connection_by_long(monkeypatch):
    """However long the read was given for its bytes."""
    monkeypatch.setattr(nixl_reader, "ENDING_S", 0.3)
    block_ids = range(NUM_LARGE)
    with scene_of(OVER_TCP, LARGE, NUM_LARGE) as scene:
        receive = scene.receive_of(block_ids, block_ids)
        scene.peer.stop()
        outcome = scene.post(receive)
        assert not outcome.has_ended(0.0)
        scene.engine.disconnect(PREFILL)
        assert isinstance(outcome.error(), PeerTimeout)
        scene.peer.go_on()


def test_a_read_has_time_for_its_bytes_too(monkeypatch):
    deadlines = []

    def read_blocks(agent, own, peers, deadline):
        deadlines.append(deadline.at_s)
        read(agent, own, peers, deadline)

    read = nixl_agent.NixlAgent.read_blocks
    monkeypatch.setattr(nixl_agent.NixlAgent, "read_blocks", read_blocks)
    start_s = now_s()
    with connected_pair("nixl") as pair:
        assert pair.move([0, 9, 4], [3, 5, 7]).error() is None
    time_s = (
        nixl_engine.TRANSFER_TIMEOUT_S + 3 * LAYOUT.block_bytes / transfer_engine.BYTES_PER_S_MIN
    )
    assert [at_s >= start_s + time_s for at_s in deadlines] == [True]
    assert transfer_engine.deadline_of(10**15, 30.0).remaining_s() <= transfer_engine.MOVING_S_MAX


def test_the_blocks_are_described_once_for_all_receives_of_a_connection(monkeypatch):
    calls = Counter()
    nixl = spied(nixl_agent.load_nixl(), calls)
    monkeypatch.setattr(nixl_agent, "load_nixl", lambda: nixl)
    with connected_pair("nixl") as pair:
        described = calls["createXferReq"]
        for n in range(1, 6):
            assert pair.move([0, 9, 4], [3, 5, 7]).error() is None
            assert (calls["prepXferDlist"], calls["makeXferReq"]) == (2, n)  # its blocks, and ours
        assert calls["createXferReq"] - described == 5  # the generations after each, and no blocks
        pair.decode.connect(PREFILL, pair.prefill.local_region(DECODE), LAYOUT)
        assert calls["prepXferDlist"] == 4


def spied(nixl, calls):
    """NIXL, whose agents count how often each of their functions is called."""

    class Agent:
        def __init__(self, *args):
            self._agent = nixl.nixlAgent(*args)

        def __getattr__(self, name):
            calls[name] += 1
            return getattr(self._agent, name)

    module = ModuleType("nixl")
    vars(module).update(vars(nixl), nixlAgent=Agent)
    return module


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
            pytest.raises(ConfigError, match=r"pip install '.\[nixl\]'"),
            one_end(KINDS["nixl"], DECODE, LAYOUT, 4),
        ):
            pass
    finally:
        nixl_agent.load_nixl.cache_clear()
