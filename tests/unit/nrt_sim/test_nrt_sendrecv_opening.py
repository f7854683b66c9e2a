"""When async send/receive of a core may be opened and closed, on the simulator of libnrt."""

import fcntl
import os

import pytest
from nrt_sendrecv_peer import (
    CLOSED,
    FAILURE,
    INVALID,
    SUCCESS,
    UNINITIALIZED,
    Peers,
    all_ended,
    exchange,
    join,
)
from nrt_sim import build

ENABLED = "NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED"
PORT = "NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT"


@pytest.fixture
def peers(tmp_path):
    with all_ended(Peers(build.library_path(), tmp_path)) as peers:
        yield peers


def test_nothing_works_before_the_runtime_is_open_or_after(peers):
    peer = peers.start("0")
    assert peer.open_lnc(0) == UNINITIALIZED
    assert peer.limits()[:2] == [UNINITIALIZED, UNINITIALIZED]
    assert peer.open() == SUCCESS
    assert peer.open_lnc(0) == SUCCESS
    assert peer.close_lnc(0) == SUCCESS
    peer.close()
    for call in (peer.open_lnc, peer.close_lnc, peer.flush):
        assert call(0) == CLOSED
    assert peer.violations()[0] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [(ENABLED, ""), (ENABLED, "0"), (PORT, ""), (PORT, "0"), (PORT, "65536"), (PORT, "45x")],
)
def test_both_variables_open_the_gate(peers, name, value):
    peer = peers.start("0", **{name: value})
    assert peer.open() == SUCCESS
    assert peer.open_lnc(0) == FAILURE


@pytest.mark.parametrize(
    ("instance", "status"),
    [
        ("trn1.32xlarge", SUCCESS),
        ("trn2.48xlarge", SUCCESS),
        ("trn1.2xlarge", FAILURE),
        ("inf2.48xlarge", FAILURE),
    ],
)
def test_the_instance_needs_efa(peers, instance, status):
    peer = peers.start("0", NRT_SIM_INSTANCE=instance)
    assert peer.open() == SUCCESS
    assert peer.open_lnc(0) == status


def test_numbers_of_cores_are_the_hosts_not_the_process_s(peers):
    peer = peers.start("4-5", lncs=(4, 5))
    for lnc in (0, 1, 3, 6, -1, 128, 1 << 20):
        assert peer.open_lnc(lnc) == INVALID
        assert peer.connect("c", "127.0.0.1", 7, lnc) == INVALID
        assert peer.flush(lnc) == peer.close_lnc(lnc) == INVALID
    assert peer.connect("c", "127.0.0.1", 7, 4) == SUCCESS


def test_a_core_opens_once_and_again_after_a_close(peers):
    peer = peers.start("0", lncs=(0,))
    assert peer.open_lnc(0) == FAILURE
    assert peer.close_lnc(0) == SUCCESS
    for call in (peer.close_lnc, peer.flush):
        assert call(0) == UNINITIALIZED
    assert peer.connect("c", "127.0.0.1", 1, 0) == UNINITIALIZED
    assert peer.open_lnc(0) == SUCCESS


def lock_file(root):
    folder = root / "hosts" / "127.0.0.1" / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"nrt_kv_store_server_lock_uid_{os.geteuid()}"


def test_a_lock_file_of_another_user_is_in_the_way_until_it_is_gone(peers, tmp_path):
    path = lock_file(tmp_path)
    path.touch()
    path.chmod(0)
    peer = peers.start("0", KEEP_STDERR="1")
    assert peer.open() == SUCCESS
    assert peer.open_lnc(0) == FAILURE
    path.unlink()
    assert peer.open_lnc(0) == SUCCESS
    peer.process.stdin.close()
    said = peer.process.stderr.read().decode()
    assert f"bootstrap lock file {path}: Permission denied" in said


def test_a_lock_file_that_is_held_is_in_the_way(peers, tmp_path):
    peer = peers.start("0", NRT_SIM_LOCK_WAIT_MS="20")
    assert peer.open() == SUCCESS
    with lock_file(tmp_path).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert peer.open_lnc(0) == FAILURE
    assert peer.open_lnc(0) == SUCCESS


def test_what_a_dead_process_left_is_not_in_the_way(peers, tmp_path):
    peers.start("0", lncs=(0,)).kill()
    assert lock_file(tmp_path).exists()
    sender, receiver = peers.pair()
    exchange(sender, receiver, 100)


def test_the_limits_are_128_or_what_the_environment_says(peers):
    assert peers.start("0", lncs=(0,)).limits() == [SUCCESS, SUCCESS, 128, 128]
    environment = {"NRT_SIM_COMMUNICATORS_MAX": "3", "NRT_SIM_PENDING_MAX": "7"}
    assert peers.start("1", lncs=(1,), **environment).limits() == [SUCCESS, SUCCESS, 3, 7]


def test_a_core_closes_when_all_is_done_and_works_again(peers):
    sender, receiver = peers.pair()
    exchange(sender, receiver, 100)
    for peer, lnc in ((sender, 0), (receiver, 1)):
        assert peer.close_lnc(lnc) == SUCCESS
        assert peer.open_lnc(lnc) == SUCCESS
    join(sender, 0, receiver, 1)
    exchange(sender, receiver, 100)
    assert sender.violations()[0] == receiver.violations()[0] == 0


def check_broken(peer, lnc):
    """The close failed: this core is of no use until the process ends."""
    assert peer.open_lnc(lnc) == FAILURE
    assert peer.close_lnc(lnc) == peer.flush(lnc) == FAILURE
    assert peer.connect("later", "127.0.0.1", 9, lnc) == FAILURE


def test_a_core_does_not_close_while_a_communicator_waits(peers):
    peer = peers.start("0-1", lncs=(0, 1))
    assert peer.connect("c", "127.0.0.1", 9, 0) == SUCCESS
    assert peer.close_lnc(0) == FAILURE
    check_broken(peer, 0)
    assert peer.close_lnc(1) == SUCCESS  # the other core is not concerned
    peer.close()
    assert peer.open() == SUCCESS
    assert peer.open_lnc(0) == FAILURE
    assert peer.open_lnc(1) == SUCCESS


@pytest.mark.parametrize("is_sender", [True, False])
def test_a_core_does_not_close_while_a_request_is_in_flight(peers, is_sender):
    sender, receiver = peers.pair()
    peer, lnc = (sender, 0) if is_sender else (receiver, 1)
    post = peer.send if is_sender else peer.receive
    assert post("r", "t", 0, 10, "c") == SUCCESS
    assert peer.close_lnc(lnc) == FAILURE
    check_broken(peer, lnc)
    assert post("r2", "t", 10, 10, "c") == FAILURE


def test_a_done_request_is_in_flight_until_it_is_tested(peers):
    sender, receiver = peers.pair()
    assert sender.send("r", "t", 0, 10, "c") == SUCCESS
    assert receiver.receive("r", "t", 0, 10, "c") == SUCCESS
    assert sender.wait("r") == [[SUCCESS, 1, 10]]  # so the receive is done, too
    assert receiver.close_lnc(1) == FAILURE


def test_send_receive_is_closed_before_the_runtime(peers):
    peer = peers.start("0-1", lncs=(0, 1))
    assert peer.close_lnc(1) == SUCCESS
    peer.close()
    count, text = peer.violations()
    assert count == 1
    assert "lnc 0" in text
