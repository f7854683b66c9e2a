"""NIXL beside the rest of the process: what it leaves alone. What it moves, tests/contract says."""

import hashlib
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from types import ModuleType

import msgspec
import psutil
import pytest

from neuron_di.config import TransferOptions
from neuron_di.errors import ConfigError, PeerGone, PeerRefused, RemoteProtocolError
from neuron_di.kv import ArenaPool, KvLayout, KvPool, create_arena, whole_block_runs
from neuron_di.transfer import (
    BlockSource,
    LaneSet,
    Receive,
    ShmEngine,
    TransferToken,
    make_engines,
    nixl_agent,
    nixl_engine,
)
from neuron_di.transfer.nixl_agent import NixlAgent
from neuron_di.transfer.nixl_devices import devices_of
from neuron_di.transfer.nixl_engine import NixlEngine
from neuron_di.types import BlockId, Incarnation, WorkerId
from neuron_di.wire import NixlRegion, Offer

pytestmark = pytest.mark.skipif(
    find_spec("nixl_cu12") is None, reason="the package nixl-cu12 is not installed"
)

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=4, dtype="float32")
NUM_BLOCKS = 16


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[KvPool, KvPool]]:
    with (
        closing(KvPool.create(LAYOUT, NUM_BLOCKS, Incarnation("peer"))) as peer,
        closing(KvPool.create(LAYOUT, NUM_BLOCKS, Incarnation("own"))) as own,
    ):
        for n in range(NUM_BLOCKS):
            peer.view(BlockId(n))[:] = bytes([n + 1]) * LAYOUT.block_bytes
        yield own, peer


@pytest.fixture(scope="module")
def engines(pools: tuple[KvPool, KvPool]) -> Iterator[tuple[NixlEngine, NixlEngine]]:
    with closing(NixlEngine(pools[0])) as own, closing(NixlEngine(pools[1])) as peer:
        yield own, peer


def receive_of(own: KvPool, peer: KvPool, source_ids: list[int], own_ids: list[int]) -> Receive:
    return Receive(
        tag=0,
        runs=whole_block_runs(LAYOUT, source_ids, own_ids),
        memory=own.memory(),
        source=BlockSource(source_ids, peer.generations(source_ids)),
    )


def ended(token: TransferToken) -> TransferToken:
    is_over = threading.Event()
    token.on_done(lambda _: is_over.set())
    assert is_over.wait(30.0)
    return token


@pytest.mark.parametrize(
    "own_ids",
    [[3, 1, 7, 5], [4, 5, 6, 7], [2, 3, 9, 10]],
    ids=["single blocks", "one run", "some of both"],
)
def test_blocks_arrive_whether_prepared_or_described(pools, engines, own_ids):
    own, peer = pools
    engines[0].connect(peer.incarnation, engines[1].local_region(own.incarnation), LAYOUT)
    for n in range(NUM_BLOCKS):
        own.view(BlockId(n))[:] = bytes(LAYOUT.block_bytes)
    source_ids = [8, 9, 10, 11]
    receive = receive_of(own, peer, source_ids, own_ids)
    assert ended(engines[0].post_receive(peer.incarnation, receive)).error() is None
    for n in range(NUM_BLOCKS):
        value = source_ids[own_ids.index(n)] + 1 if n in own_ids else 0
        assert own.view(BlockId(n)) == bytes([value]) * LAYOUT.block_bytes


def test_a_region_goes_over_the_wire(pools, engines):
    region = engines[1].local_region(pools[0].incarnation)
    assert Offer.of("nixl", region).read() == region


@pytest.mark.parametrize("num_bytes", [1, 100, None])
def test_damaged_metadata_is_refused_before_nixl_sees_it(pools, engines, num_bytes, monkeypatch):
    """NIXL itself ends the process at some of it."""
    own, peer = pools
    monkeypatch.delattr(NixlAgent, "connect")
    region = engines[1].local_region(own.incarnation)
    metadata = region.metadata
    damages = [metadata[:num_bytes][:-1], metadata + b"\0"] + [
        metadata[:n] + bytes([metadata[n] ^ 1]) + metadata[n + 1 :]
        for n in range(0, len(metadata), 41)
    ]
    for damaged in damages:
        changed = msgspec.structs.replace(region, metadata=damaged)
        with pytest.raises(PeerRefused, match="damaged"):
            engines[0].connect(peer.incarnation, changed, LAYOUT)


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": b""},
        {"metadata": b"\xff" * 100},
        {"metadata": b"nixlSerDes|garbage"},
        {"agent": "another"},
        {"address": 0},
        {"address": 4096},
        {"address": 2**63 - 1},
        {"num_bytes": LAYOUT.block_bytes * NUM_BLOCKS - 1},
        {"num_bytes": LAYOUT.block_bytes * (NUM_BLOCKS - 1)},
        {"num_bytes": LAYOUT.block_bytes * (NUM_BLOCKS + 1)},
        {"num_bytes": 1 << 40},
        {"num_bytes": 1},
        {"kind": "VRAM"},
    ],
    ids=str,
)
def test_a_region_that_is_not_the_peers_pool_is_no_connection(pools, engines, changes):
    own, peer = pools
    engine = engines[0]
    region = engines[1].local_region(own.incarnation)
    assert isinstance(region, NixlRegion)
    engine.disconnect(peer.incarnation)
    if "metadata" in changes:  # not damaged on the way: made so
        changes = {**changes, "digest": hashlib.sha256(changes["metadata"]).digest()}
    with pytest.raises((PeerGone, PeerRefused, RemoteProtocolError)):
        engine.connect(peer.incarnation, msgspec.structs.replace(region, **changes), LAYOUT)
    token = engine.post_receive(peer.incarnation, receive_of(own, peer, [0], [0]))
    assert isinstance(token.error(), PeerGone)
    engine.connect(peer.incarnation, region, LAYOUT)
    receive = receive_of(own, peer, [1], [1])
    assert ended(engine.post_receive(peer.incarnation, receive)).error() is None


def test_a_region_of_another_engine_is_refused(pools, engines):
    with pytest.raises(PeerRefused):
        engines[0].connect(pools[1].incarnation, pools[1].region(), LAYOUT)


def test_another_backend_is_refused_and_another_lane_taken(pools, engines):
    own, peer = pools
    region = msgspec.structs.replace(engines[1].local_region(own.incarnation), backend="LIBFABRIC")
    with pytest.raises(PeerRefused, match="--nixl-backend is UCX here and LIBFABRIC at"):
        engines[0].connect(peer.incarnation, region, LAYOUT)
    shm = ShmEngine(own)
    offers = [Offer.of("nixl", region), Offer.of("shm", peer.region())]
    lane = LaneSet([engines[0], shm]).connect(peer.incarnation, offers, LAYOUT)
    with closing(shm):
        assert lane.name == "shm"
        assert "--nixl-backend is UCX here and LIBFABRIC at" in lane.reason
        assert not lane.is_fallback  # it will not be better later


def test_a_backend_whose_plugin_cannot_be_loaded_is_named(pools, monkeypatch):
    class Agent:
        def __init__(self, *args):
            self._agent = nixl.nixlAgent(*args)

        def getPluginParams(self, name):
            return self._agent.getPluginParams(f"{name}_NOT_THERE")

    nixl = nixl_agent.load_nixl()
    module = ModuleType("nixl")
    vars(module).update(vars(nixl), nixlAgent=Agent)
    monkeypatch.setattr(nixl_agent, "load_nixl", lambda: module)
    with pytest.raises(ConfigError, match="LIBFABRIC") as caught:
        make_engines(
            pools[0],
            TransferOptions(transfer=("nixl",), nixl_backend="LIBFABRIC"),
            "127.0.0.1",
        )
    assert "libfabric" in caught.value.message
    assert caught.value.param == "nixl_backend"


def hosts_listened_at() -> Counter[str]:
    connections = psutil.Process().net_connections("tcp")
    return Counter(one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN)


@pytest.fixture
def net_devices(monkeypatch):
    """Of the user: not set."""
    monkeypatch.setenv("UCX_NET_DEVICES", "")  # so that it is put back
    monkeypatch.delenv("UCX_NET_DEVICES")


@pytest.mark.usefixtures("net_devices")
@pytest.mark.parametrize("rdma", [[], ["mlx5_99:1"]], ids=["none", "rdma"])
def test_it_listens_at_its_host_alone(pools, monkeypatch, rdma):
    own, peer = pools
    monkeypatch.setattr(nixl_engine, "devices_of", lambda host: [*devices_of(host), *rdma])
    before = hosts_listened_at()
    with closing(NixlEngine(own)) as reading, closing(NixlEngine(peer)) as serving:
        reading.connect(peer.incarnation, serving.local_region(own.incarnation), LAYOUT)
        opened = hosts_listened_at() - before
        assert set(opened) == {"127.0.0.1"}
        receive = receive_of(own, peer, [1], [1])
        assert ended(reading.post_receive(peer.incarnation, receive)).error() is None


@pytest.mark.usefixtures("net_devices")
def test_the_host_is_that_of_the_options(pools, monkeypatch):
    asked = []
    monkeypatch.setattr(nixl_engine, "devices_of", lambda host: asked.append(host) or ["lo"])
    for host in (None, "127.0.0.3"):
        options = TransferOptions(transfer=("nixl",), transfer_host=host)
        for engine in make_engines(pools[0], options, "127.0.0.2"):
            engine.close()
    assert asked == ["127.0.0.2", "127.0.0.3"]


@pytest.mark.usefixtures("net_devices")
def test_where_the_host_names_no_interface_ucx_chooses_and_it_is_said(pools, caplog):
    with closing(NixlEngine(pools[0], host="0.0.0.0")):
        assert [one.getMessage() for one in caplog.records] == ["nixl_listens_everywhere"]


def test_what_the_user_says_of_devices_holds(pools, monkeypatch):
    monkeypatch.setattr(nixl_engine, "devices_of", pytest.fail)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    NixlEngine(pools[0], host="192.0.2.1").close()
    monkeypatch.delenv("UCX_NET_DEVICES")
    NixlEngine(pools[0], host="192.0.2.1", ucx_config="TLS=tcp,NET_DEVICES=lo").close()


def test_a_pool_without_a_header_of_its_own_is_refused_when_the_worker_starts():
    arena_fd = create_arena()
    try:
        pool = ArenaPool.join(arena_fd, WorkerId("w"), LAYOUT, 4, Incarnation("ab" * 16))
        with closing(pool), pytest.raises(ConfigError, match="--transfer"):
            NixlEngine(pool)
    finally:
        os.close(arena_fd)


def test_how_this_process_logs_is_not_changed(engines):
    assert logging.raiseExceptions
    assert os.environ["UCX_LOG_FILE"] != ""


def test_the_package_is_loaded_only_by_who_makes_an_engine():
    program = (
        "import sys, neuron_di.transfer, neuron_di.transfer.nixl_engine;"
        "sys.exit(any(name.startswith('nixl') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_worker_that_waits_for_peers_computes_nothing(engines):
    """NIXL's own settings let its thread spin. Here it sleeps until a peer comes."""
    pause = threading.Event()
    before = os.times()
    pause.wait(0.5)
    after = os.times()
    spent_s = after.user + after.system - before.user - before.system
    assert spent_s < 0.25  # two threads that spin: 0.5 and more
