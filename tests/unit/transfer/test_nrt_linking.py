"""How two devices are linked: who may, what proves it, what is counted, what a refusal says."""

import socket
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from nrt_kit import (
    DECODE,
    DRIVERS,
    LAYOUT,
    PREFILL,
    NrtTimes,
    driven_by,
    ended,
    one_end,
    two_ends,
    until,
)

from neuron_di.errors import (
    PeerError,
    PeerGone,
    PeerRefused,
    PeerTimeout,
    RemoteProtocolError,
)
from neuron_di.types import Incarnation
from neuron_di.wire import NrtRegion, TcpRegion

OTHER = Incarnation("ab" * 16)


# What a driver by torch-neuronx's classes cannot tell apart: test_nrt_drivers.py.
BY_LIBNRT = pytest.mark.parametrize("driver", ["libnrt"], indirect=True)


@pytest.fixture(autouse=True, params=DRIVERS)
def driver(request):
    """What both ends send and receive by."""
    with driven_by(request.param) as name:
        yield name


def changed(region, **fields):
    return msgspec.structs.replace(region, **fields)


def accept(two, layout=LAYOUT):
    two.prefill.engine.accept(DECODE, two.decode.engine.local_region(PREFILL), layout)
    return two.prefill.engine.local_region(DECODE)


def check_refused(two, region, error=PeerRefused, layout=LAYOUT, match=None):
    with pytest.raises(error, match=match):
        two.decode.engine.connect(PREFILL, region, layout)


def check_moves(two):
    assert two.move([3, 1], [2, 5]).error() is None
    assert (two.decode.blocks[[2, 5]] == two.prefill.blocks[[3, 1]]).all()


@pytest.fixture
def two():
    with two_ends(is_linked=False) as two:
        yield two


def test_only_a_device_with_a_control_port_is_linked(two):
    region = accept(two)
    tcp = TcpRegion(host="127.0.0.1", port=region.port, secret=bytes(32), num_streams=1)
    for wrong in (tcp, changed(region, port=0)):
        check_refused(two, wrong, match="control port")
    with pytest.raises(PeerRefused, match="no Neuron device"):
        two.prefill.engine.accept(DECODE, tcp, LAYOUT)
    check_refused(two, changed(region, is_tls=True), match="TLS")
    two.decode.engine.connect(PREFILL, region, LAYOUT)
    check_moves(two)


def test_an_address_that_nobody_may_connect_to_is_not_dialled():
    """By the runtime neither."""
    ports = []

    def why_refused(host, port):
        ports.append(port)
        return "" if host == "127.0.0.1" else host

    with two_ends(is_linked=False, engine={"why_refused": why_refused}) as two:
        away = {"host": "169.254.169.254"}
        check_refused(two, changed(accept(two), **away), match="nobody connects: 169")
        region = changed(two.decode.engine.local_region(PREFILL), **away)
        with pytest.raises(PeerRefused, match="nobody connects: 169"):
            two.prefill.engine.accept(OTHER, region, LAYOUT)
        assert set(ports) == {two.prefill.engine.local_region(DECODE).port}


def test_slots_of_another_length_or_model_are_not_linked(two):
    region = accept(two)
    for name, value in (("block_size", 8), ("dtype", "bfloat16"), ("num_layers", 4)):
        layout = replace(LAYOUT, **{name: value})
        check_refused(two, region, layout=layout, match="another length")
        with pytest.raises(PeerRefused, match="another length"):
            accept(two, layout)


def test_devices_that_keep_keys_in_another_order_are_not_linked():
    with two_ends(is_linked=False, decode={"keys": "HDS"}) as two:
        with pytest.raises(PeerRefused, match="orders"):
            accept(two)
        region = changed(two.prefill.engine.local_region(DECODE), port=1)
        check_refused(two, region, match="orders")


BAD_REGIONS = {
    "fewer cores than ranks": {"lncs": [0]},
    "a core twice": {"lncs": [0, 0]},
    "ranks of different numbers of heads": {"heads": [[0], [1, 2]]},
    "a head that nobody holds": {"heads": [[0], [2]]},
    "no heads": {"heads": [[-1], [-1]]},
    "other heads than the model's": {"heads": [[0], [0]]},
    "more heads than there are": {"heads": [[0, 1] * 128] * 128, "lncs": list(range(128))},
    "short slots": {"block_size": LAYOUT.block_size - 1},
    "too large": {"block_size": 1 << 24, "num_blocks": 1 << 24},
}


@pytest.mark.parametrize("fields", BAD_REGIONS.values(), ids=BAD_REGIONS)
def test_a_device_that_cannot_be_is_refused_by_both_ends(two, fields):
    region = accept(two)
    own = two.decode.engine.local_region(PREFILL)
    if fields.get("num_blocks"):
        fields = {**fields, "block_size": 1 << 24}
        huge = replace(LAYOUT, head_dim=1 << 16)
        with pytest.raises((RemoteProtocolError, PeerRefused)):
            two.prefill.engine.accept(OTHER, changed(own, **fields), huge)
        return
    check_refused(two, changed(region, **fields), RemoteProtocolError)
    with pytest.raises(RemoteProtocolError):
        two.prefill.engine.accept(OTHER, changed(own, **fields), LAYOUT)


def test_a_pool_of_another_size_than_was_said_is_not_linked(two):
    region = accept(two)
    check_refused(two, changed(region, num_blocks=region.num_blocks - 1), match="as many blocks")


def test_who_has_not_the_secret_is_not_linked(two):
    region = accept(two)
    check_refused(two, changed(region, secret=bytes(32)))
    with one_end(OTHER) as stranger, pytest.raises(PeerError):
        stranger.engine.connect(PREFILL, region, LAYOUT)
    two.decode.engine.connect(PREFILL, region, LAYOUT)
    check_moves(two)


def test_cores_that_are_not_the_ones_that_were_told_are_noticed(two):
    """The proof goes through the device: rank by rank, core by core."""
    region = accept(two)
    swapped = changed(region, lncs=region.lncs[::-1])
    settings = NrtTimes(connect_s=0.5)
    two.decode.engine._links._times = settings
    check_refused(two, swapped, PeerError)
    two.decode.pool.is_stuck = two.prefill.pool.is_stuck = True  # communicators that never meet


def test_a_proof_that_comes_damaged_is_no_link(two):
    two.decode.place.fault("function=sendrecv.corrupt status=1")
    check_refused(two, accept(two), match="other cores")
    assert two.decode.pool.lost is None


def test_a_proof_that_never_comes_is_no_link_and_costs_no_device():
    with two_ends(NrtTimes(connect_s=0.5, proof_s=0.5), is_linked=False) as two:
        two.prefill.place.fault("function=sendrecv.send status=5")
        check_refused(two, accept(two), PeerTimeout)
        for end in (two.decode, two.prefill):
            assert end.pool.lost is None
            end.pool.is_stuck = True


def test_connecting_that_takes_too_long_goes_on_at_the_next_attempt():
    slow = {"settings": {"NRT_SIM_CONNECT_DELAY_MS": "1000"}}
    with two_ends(NrtTimes(connect_s=0.5), is_linked=False, prefill=slow, decode=slow) as two:
        region = accept(two)
        before = two.decode.num_calls("accept"), two.prefill.num_calls("connect")
        check_refused(two, region, PeerTimeout)

        def is_linked():
            with suppress(PeerError):
                two.decode.engine.connect(PREFILL, region, LAYOUT)
                return True

        until(is_linked)
        check_moves(two)
        made = two.decode.num_calls("accept"), two.prefill.num_calls("connect")
        assert made == (before[0] + 2, before[1] + 2)


@BY_LIBNRT
@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("function=nrt_async_sendrecv_accept status=4", PeerRefused, "no more connections"),
        ("function=nrt_async_sendrecv_accept status=1", PeerGone, "cannot be connected"),
        ("function=nrt_async_sendrecv_test_comm status=1", PeerGone, "cannot be connected"),
        ("function=nrt_async_sendrecv_accept status=6", PeerGone, "cannot be connected"),
    ],
)
def test_a_runtime_that_does_not_connect_says_why(two, fault, error, words):
    region = accept(two)
    two.decode.place.fault(fault)
    check_refused(two, region, error, match=words)
    two.decode.pool.is_stuck = two.prefill.pool.is_stuck = True
    assert (two.decode.pool.lost is not None) == ("status=6" in fault)


def test_connections_that_the_peer_never_met_are_met_at_the_next_attempt(two):
    """The runtime knows a connection by its cores: a second one beside it would be refused."""
    region = accept(two)
    before = two.decode.num_calls("accept")
    two.prefill.place.fault("function=nrt_async_sendrecv_connect status=1")
    check_refused(two, region, PeerGone, match="gave up")  # and not after the whole time
    assert two.decode.num_calls("accept") == before + 2
    two.decode.engine.connect(PREFILL, region, LAYOUT)
    check_moves(two)
    assert two.decode.num_calls("accept") == before + 2


@pytest.mark.parametrize("peer", [DECODE, OTHER])
def test_connections_that_were_never_begun_are_not_counted(peer):
    few = {"settings": {"NRT_SIM_COMMUNICATORS_MAX": "1"}}
    with two_ends(is_linked=False, prefill=few) as two:
        region = accept(two)
        two.prefill.place.fault("function=nrt_async_sendrecv_connect status=1")
        check_refused(two, region, PeerGone)
        if peer == DECODE:
            two.decode.engine.connect(PREFILL, region, LAYOUT)
            check_moves(two)
            return
        pairs = [(0, two.decode.pool.device.lncs[0]), (1, two.decode.pool.device.lncs[1])]
        connections = two.prefill.engine._connections
        assert len(connections.take(OTHER, "send", "127.0.0.1", 1, pairs).places) == 2
        two.decode.pool.is_stuck = True  # its accepts are not met


def test_a_peer_that_never_uses_its_connections_again_gets_only_so_many(two):
    two.link()
    connections, pairs = two.prefill.engine._connections, [(0, 60)]
    for epoch in range(1, 10):
        made = connections.take(OTHER, "send", "127.0.0.1", epoch, pairs)
        made.places[0].communicator = SimpleNamespace(was_connected=True)
    with pytest.raises(PeerRefused, match="given up too many"):
        connections.take(OTHER, "send", "127.0.0.1", 10, pairs)
    check_moves(two)


def test_connections_are_used_again_for_the_same_cores_only(two):
    two.link()
    connections = two.prefill.engine._connections
    known = connections._sets[DECODE, "send"]
    pairs = [(place.rank, place.peer_lnc) for place in known.places]
    assert connections.epoch_of(DECODE, "send", "127.0.0.1", pairs) == known.epoch
    assert connections.take(DECODE, "send", "127.0.0.1", known.epoch, pairs) is known
    for host, others in (("127.0.0.2", pairs), ("127.0.0.1", pairs[:1]), ("127.0.0.1", pairs * 2)):
        assert connections.epoch_of(DECODE, "send", host, others) == 0
        assert connections.agree(DECODE, "send", host, others, known.epoch) != known.epoch
    other = connections.take(DECODE, "send", "127.0.0.1", known.epoch, pairs[:1])
    assert other is not known
    assert len(other.places) == 1


def test_a_runtime_that_is_late_to_say_that_it_is_connected_is_asked_again(two):
    region = accept(two)
    two.decode.place.fault("function=nrt_async_sendrecv_test_comm status=5 times=3")
    two.decode.engine.connect(PREFILL, region, LAYOUT)
    check_moves(two)


@contextmanager
def linked_to_another(two):
    """Prefill is linked to decode; then another decode worker comes."""
    two.link()
    check_moves(two)
    with one_end(OTHER) as other:
        yield other


def test_communicators_are_counted_and_who_finds_none_left_is_told():
    few = {"settings": {"NRT_SIM_COMMUNICATORS_MAX": "1"}}
    with two_ends(is_linked=False, prefill=few) as two, linked_to_another(two) as other:
        before = two.prefill.num_calls("connect")
        two.prefill.engine.accept(OTHER, other.engine.local_region(PREFILL), LAYOUT)
        with pytest.raises(PeerError):
            other.engine.connect(PREFILL, two.prefill.engine.local_region(OTHER), LAYOUT)
        assert two.prefill.num_calls("connect") == before  # the runtime was not asked
        with pytest.raises(PeerRefused, match=r"1 of 1 were made, of which 1 are in use"):
            two.prefill.engine._connections.take(OTHER, "send", "127.0.0.1", 1, [(0, 9)])
        check_moves(two)


def test_each_decode_worker_has_connections_of_its_own(two):
    with linked_to_another(two) as other:
        two.prefill.engine.accept(OTHER, other.engine.local_region(PREFILL), LAYOUT)
        other.engine.connect(PREFILL, two.prefill.engine.local_region(OTHER), LAYOUT)
        receive = replace(two.receive([4], [1]), memory=other.pool.memory())
        token = other.engine.post_receive(PREFILL, receive)
        send = two.prefill.engine.post_send(OTHER, _send_of(receive))
        assert ended(token) is None
        assert ended(send) is None
        assert (other.blocks[1] == two.prefill.blocks[4]).all()
        check_moves(two)


def _send_of(receive):
    from neuron_di.transfer import Send

    ids = {"block_ids": receive.source.block_ids, "exchange": receive.block_ids}
    return Send(tag=receive.tag, runs=receive.runs, **ids)


def test_a_decode_worker_that_starts_anew_gets_new_connections_of_the_same_prefill(two):
    """As another process on other cores; the old one's are lost to the count."""
    two.link()
    check_moves(two)
    two.decode.engine.close()
    with one_end(OTHER) as successor:
        two.prefill.engine.disconnect(DECODE)
        two.prefill.engine.accept(OTHER, successor.engine.local_region(PREFILL), LAYOUT)
        successor.engine.connect(PREFILL, two.prefill.engine.local_region(OTHER), LAYOUT)
        receive = replace(two.receive([4], [1]), memory=successor.pool.memory())
        token = successor.engine.post_receive(PREFILL, receive)
        assert ended(two.prefill.engine.post_send(OTHER, _send_of(receive))) is None
        assert ended(token) is None
        assert (successor.blocks[1] == two.prefill.blocks[4]).all()


def test_a_stranger_at_the_control_port_is_told_nothing(two):
    region = accept(two)
    with socket.create_connection((region.host, region.port), timeout=10.0) as sock:
        sock.sendall(bytes(4096))
        with suppress(ConnectionResetError):  # it did not read all of that
            assert sock.recv(1) == b""
    two.decode.engine.connect(PREFILL, region, LAYOUT)
    check_moves(two)


def test_the_secret_of_a_region_is_not_shown(two):
    region = accept(two)
    assert isinstance(region, NrtRegion)
    assert region.secret.hex() not in repr(region)
    assert repr(region.secret) not in repr(region)
