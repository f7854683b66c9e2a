"""How communicators of two or three processes find each other, on the simulator of libnrt."""

import time

import pytest
from nrt_sendrecv_peer import (
    COMMUNICATOR,
    FAILURE,
    INVALID,
    INVALID_HANDLE,
    RESOURCE,
    SUCCESS,
    TIMEOUT,
    WAIT_S,
    Peers,
    all_ended,
    exchange,
    join,
    stop_thread,
    stop_thread_by_guest,
    wait_for_guests,
)
from nrt_sim import build

HERE = "127.0.0.1"


@pytest.fixture
def peers(tmp_path):
    with all_ended(Peers(build.library_path(), tmp_path)) as peers:
        yield peers


def test_a_connect_returns_at_once_and_is_done_when_both_are_there(peers):
    sender = peers.start("0", lncs=(0,))
    assert sender.connect("c", HERE, 1, 0) == SUCCESS
    assert sender.test_communicator("c") == [SUCCESS, 0]
    receiver = peers.start("1", lncs=(1,))
    assert sender.test_communicator("c") == [SUCCESS, 0]
    assert receiver.accept("c", HERE, 0, 1) == SUCCESS
    assert sender.wait_connected("c") == receiver.wait_connected("c") == SUCCESS
    assert sender.test_communicator("c") == [SUCCESS, 1]


def test_an_accept_returns_at_once_and_is_done_when_both_are_there(peers):
    receiver = peers.start("1", lncs=(1,))
    assert receiver.accept("c", HERE, 0, 1) == SUCCESS
    sender = peers.start("0", lncs=(0,))
    assert receiver.test_communicator("c") == [SUCCESS, 0]
    assert sender.connect("c", HERE, 1, 0) == SUCCESS
    assert sender.wait_connected("c") == receiver.wait_connected("c") == SUCCESS


def test_a_pair_takes_its_time(peers, tmp_path):
    trace = tmp_path / "trace"
    slow = {"NRT_SIM_CONNECT_DELAY_MS": "1000000", "NRT_SIM_TRACE": str(trace)}
    sender = peers.start("0", lncs=(0,), **slow)
    receiver = peers.start("1", lncs=(1,), **slow)
    assert sender.connect("c", HERE, 1, 0) == receiver.accept("c", HERE, 0, 1) == SUCCESS
    deadline = time.monotonic() + WAIT_S
    while trace.read_text().count('"event": "paired"') < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for peer in (sender, receiver):
        assert peer.test_communicator("c") == [SUCCESS, 0]
    assert sender.close_lnc(0) == FAILURE  # not connected yet


@pytest.mark.parametrize(
    ("connect", "accept"),
    [
        ((HERE, 5, 4), ("127.0.0.2", 4, 5)),  # another host was meant
        ((HERE, 5, 4), (HERE, 0, 5)),  # a process-relative number of the sender's core
        ((HERE, 0, 4), (HERE, 4, 5)),  # one of the receiver's
        (("127.0.0.2", 5, 4), (HERE, 4, 5)),
    ],
)
def test_who_was_not_meant_never_connects(peers, connect, accept):
    peers.start("0", lncs=(0,))  # a bystander, who is rung up by mistake
    sender, receiver = peers.start("4", lncs=(4,)), peers.start("5", lncs=(5,))
    assert sender.connect("wrong", *connect) == receiver.accept("wrong", *accept) == SUCCESS
    join(receiver, 5, sender, 4, "c")  # the other way: so both threads have looked at all
    for peer in (sender, receiver):
        assert peer.test_communicator("wrong") == [SUCCESS, 0]


@pytest.mark.parametrize("method", ["connect", "accept"])
def test_two_of_one_direction_never_connect(peers, method):
    one, other = peers.start("0", lncs=(0,)), peers.start("1", lncs=(1,))
    assert getattr(one, method)("wrong", HERE, 1, 0) == SUCCESS
    assert getattr(other, method)("wrong", HERE, 0, 1) == SUCCESS
    third = peers.start("2", lncs=(2,))
    for peer, lnc in ((one, 0), (other, 1)):
        join(third, 2, peer, lnc, f"in{lnc}")
        join(peer, lnc, third, 2, f"out{lnc}")
        assert peer.test_communicator("wrong") == [SUCCESS, 0]


def test_another_bootstrap_port_is_another_world(peers):
    sender = peers.start("0", lncs=(0,), NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT="45646")
    receiver, third = peers.start("1", lncs=(1,)), peers.start("2", lncs=(2,))
    assert sender.connect("c", HERE, 1, 0) == receiver.accept("c", HERE, 0, 1) == SUCCESS
    join(third, 2, receiver, 1, "other")
    assert sender.test_communicator("c") == receiver.test_communicator("c") == [SUCCESS, 0]


def test_hosts_are_told_apart_by_their_address(peers):
    """Both have an lnc 0, and one of them an address of the other family, oddly spelled."""
    sender = peers.start("0", lncs=(0,), NRT_SIM_HOST="10.0.0.1")
    receiver = peers.start("0", lncs=(0,), NRT_SIM_HOST="fd00::2")
    for peer in (sender, receiver):
        peer.allocate("t", 100)
    assert sender.connect("c", "fd00:0:0::0002", 0, 0) == SUCCESS
    assert receiver.accept("c", "10.0.0.1", 0, 0) == SUCCESS
    assert sender.wait_connected("c") == receiver.wait_connected("c") == SUCCESS
    exchange(sender, receiver, 100)


def test_a_core_connects_to_another_of_its_process_and_to_itself(peers):
    peer = peers.start("0-1", lncs=(0, 1))
    for there in (0, 1):
        assert peer.connect(f"send{there}", HERE, there, 0) == SUCCESS
        assert peer.accept(f"receive{there}", HERE, 0, there) == SUCCESS
    assert peer.wait_connected("send0", "send1", "receive0", "receive1") == SUCCESS


@pytest.mark.parametrize("method", ["connect", "accept"])
def test_addresses_and_numbers_are_checked(peers, method):
    call = getattr(peers.start("0", lncs=(0,)), method)
    for address in ("", "localhost", "127.0.0", "../127.0.0.1", "1.2.3.4.5", "::x"):
        assert call("c", address, 1, 0) == INVALID
    for peer_lnc in (-1, 128, 1 << 30):
        assert call("c", HERE, peer_lnc, 0) == INVALID
    assert call("c", HERE, 127, 0) == SUCCESS


def test_the_rendezvous_has_one_entry_for_each_pair_and_direction(peers):
    sender, receiver = peers.pair()
    assert sender.connect("waiting", HERE, 2, 0) == SUCCESS
    assert sender.connect("again", HERE, 1, 0) == INVALID  # connected
    assert sender.connect("again", HERE, 2, 0) == INVALID  # still waiting
    assert receiver.accept("again", HERE, 0, 1) == INVALID
    join(receiver, 1, sender, 0, "back")  # the other direction is another entry
    stop_thread(sender, receiver)  # it cannot see that its peer dies
    receiver.kill()
    assert sender.connect("again", HERE, 1, 0) == SUCCESS


def test_communicators_count_until_the_process_ends(peers):
    peer = peers.start("0-1", lncs=(0, 1), NRT_SIM_COMMUNICATORS_MAX="3")
    for name in ("connect", "accept"):
        assert getattr(peer, name)(name, HERE, 0, 0) == SUCCESS
    assert peer.wait_connected("connect", "accept") == SUCCESS
    assert peer.close_lnc(0) == SUCCESS
    assert peer.num_live(COMMUNICATOR) == 0
    assert peer.open_lnc(0) == SUCCESS
    assert peer.connect("third", HERE, 0, 0) == SUCCESS
    assert peer.accept("fourth", HERE, 0, 0) == RESOURCE
    assert peer.accept("other core", HERE, 0, 1) == SUCCESS


def test_handles_end_with_their_core(peers):
    sender, _ = peers.pair()
    assert sender.close_lnc(0) == SUCCESS
    assert sender.test_communicator("c")[0] == INVALID_HANDLE
    assert sender.send("r", "t", 0, 1, "c") == INVALID_HANDLE
    assert sender.test_communicator("t")[0] == INVALID_HANDLE
    assert sender.calls_with_null() == [INVALID] * 7 + [INVALID_HANDLE] * 4


def test_a_test_that_hangs_says_so_and_may_be_repeated(peers):
    sender, _ = peers.pair()
    assert sender.schedule("function=nrt_async_sendrecv_test_comm hang_ms=1 times=2") == 0
    assert [sender.test_communicator("c")[0] for _ in range(3)] == [TIMEOUT, TIMEOUT, SUCCESS]


def test_who_is_turned_away_comes_again(peers):
    sender, receiver = peers.start("0", lncs=(0,)), peers.start("1", lncs=(1,))
    assert receiver.fault("sendrecv.guest", FAILURE, 3) == 0
    join(sender, 0, receiver, 1)
    assert receiver.num_calls("sendrecv.guest") == 4


def test_a_core_that_closes_sends_its_guests_away(peers):
    """Also when its thread sees only later that it was closed and is open again."""
    sender, receiver = peers.start("0", lncs=(0,)), peers.start("1", lncs=(1,))
    assert sender.connect("c", HERE, 1, 0) == SUCCESS
    wait_for_guests(receiver, 1)
    stop_thread_by_guest(receiver, 1, peers.start("9", lncs=(9,)))
    assert receiver.close_lnc(1) == receiver.open_lnc(1) == SUCCESS
    wait_for_guests(receiver, 4)  # both come again
    assert receiver.close_lnc(1) == SUCCESS
    assert receiver.open_lnc(1) == SUCCESS
    assert receiver.accept("c", HERE, 0, 1) == SUCCESS
    assert sender.wait_connected("c") == SUCCESS


def test_a_peer_that_starts_again_pairs_again(peers):
    """Also with one that waited for its predecessor, which died before it was there."""
    sender = peers.start("0", lncs=(0,))
    peers.start("1", lncs=(1,)).kill()
    assert sender.connect("c", HERE, 1, 0) == SUCCESS
    gone = peers.start("1", lncs=(1,))
    wait_for_guests(gone, 1)
    gone.kill()
    receiver = peers.start("1", lncs=(1,))
    assert receiver.accept("c", HERE, 0, 1) == SUCCESS
    assert sender.wait_connected("c") == receiver.wait_connected("c") == SUCCESS
    sender.kill()
    successor = peers.start("0", lncs=(0,))
    join(successor, 0, receiver, 1, "c2")
    assert receiver.test_communicator("c")[0] == FAILURE


def test_three_processes_connect_in_all_directions(peers):
    three = [peers.start(str(i), lncs=(i,)) for i in range(3)]
    for i, peer in enumerate(three):
        for j in {0, 1, 2} - {i}:
            assert peer.connect(f"to{j}", HERE, j, i) == SUCCESS
            assert peer.accept(f"from{j}", HERE, j, i) == SUCCESS
    for i, peer in enumerate(three):
        names = [f"{way}{j}" for j in {0, 1, 2} - {i} for way in ("to", "from")]
        assert peer.wait_connected(*names) == SUCCESS
