"""What posted sends and receives do, and may not do, on the simulator of libnrt."""

import pytest
from nrt_sendrecv_peer import (
    FAILURE,
    INVALID,
    INVALID_HANDLE,
    REQUEST,
    RESOURCE,
    SUCCESS,
    Peers,
    all_ended,
    exchange,
    join,
)
from nrt_sim import build

HERE = "127.0.0.1"
NOT_DONE = [SUCCESS, 0, 0]


@pytest.fixture
def peers(tmp_path):
    with all_ended(Peers(build.library_path(), tmp_path)) as peers:
        yield peers


def test_posting_needs_a_communicator_that_was_tested_connected(peers):
    sender, receiver = peers.start("0", lncs=(0,)), peers.start("1", lncs=(1,))
    for peer in (sender, receiver):
        assert peer.allocate("t", 100) == SUCCESS
    assert sender.connect("c", HERE, 1, 0) == receiver.accept("c", HERE, 0, 1) == SUCCESS
    assert receiver.receive("r", "t", 0, 1, "c") == INVALID_HANDLE
    assert receiver.wait_connected("c") == SUCCESS
    assert sender.send("r", "t", 0, 1, "c") == INVALID_HANDLE  # connected, but not tested
    assert sender.wait_connected("c") == SUCCESS
    exchange(sender, receiver, 1)


def test_ranges_directions_and_handles_are_checked(peers):
    sender, receiver = peers.pair()
    end = 1 << 16
    for peer, post in ((sender, sender.send), (receiver, receiver.receive)):
        for offset, size in ((0, 0), (end, 0), (0, end + 1), (end, 1), (2, 2**64 - 1)):
            assert post("r", "t", offset, size, "c") == INVALID
        assert post("r", "t", 0, 1, "t") == INVALID_HANDLE
        assert post("r", "c", 0, 1, "c") == INVALID_HANDLE
        assert peer.num_live(REQUEST) == 0
    assert sender.receive("r", "t", 0, 1, "c") == INVALID
    assert receiver.send("r", "t", 0, 1, "c") == INVALID
    assert sender.test("t")[0] == INVALID_HANDLE
    exchange(sender, receiver, end)


def test_tensors_are_of_the_communicator_s_own_core(peers):
    sender = peers.start("4-5", lncs=(4, 5))
    receiver = peers.start("6", lncs=(6,))
    join(sender, 5, receiver, 6)
    assert sender.allocate("own", 10, 1) == sender.allocate("other", 10, 0) == SUCCESS
    assert sender.allocate("host", 10, 1, 1) == SUCCESS
    assert sender.send("r", "other", 0, 10, "c") == INVALID
    assert sender.send("r", "host", 0, 10, "c") == INVALID
    assert sender.send("r", "own", 0, 10, "c") == SUCCESS


def test_a_send_waits_for_its_receive(peers):
    sender, receiver = peers.pair()
    join(receiver, 1, sender, 0, "back")
    sender.write_bytes("t", 0, b"early bird")
    assert sender.send("r", "t", 0, 10, "c") == SUCCESS
    assert receiver.send("b", "t", 0, 10, "back") == SUCCESS
    assert sender.receive("b", "t", 100, 10, "back") == SUCCESS
    assert receiver.wait("b") == sender.wait("b") == [[SUCCESS, 1, 10]]
    assert sender.test("r") == NOT_DONE
    assert receiver.receive("r", "t", 20, 10, "c") == SUCCESS
    assert sender.wait("r") == receiver.wait("r") == [[SUCCESS, 1, 10]]
    assert receiver.flush(1) == SUCCESS
    assert receiver.read_bytes("t", 19, 12) == b"\0early bird\0"


@pytest.mark.parametrize("is_receiver_first", [True, False])
def test_the_first_send_meets_the_first_receive(peers, is_receiver_first):
    sender, receiver = peers.pair()
    messages = [bytes([i]) * i for i in range(1, 21)]
    names = [f"r{i}" for i in range(20)]
    for i, message in enumerate(messages):
        sender.write_bytes("t", 20 * i, message)

    def send():
        for i, name in enumerate(names):
            assert sender.send(name, "t", 20 * i, len(messages[i]), "c") == SUCCESS

    def receive():
        for i, name in enumerate(names):
            assert receiver.receive(name, "t", 20 * (19 - i), len(messages[i]), "c") == SUCCESS

    for post in (receive, send) if is_receiver_first else (send, receive):
        post()
    results = [[SUCCESS, 1, len(message)] for message in messages]
    assert receiver.wait(*reversed(names)) == results[::-1]
    assert sender.wait(*names) == results
    assert receiver.flush(1) == SUCCESS
    expected = b"".join(message.ljust(20, b"\0") for message in reversed(messages))
    assert receiver.read_bytes("t", 0, 400) == expected


@pytest.mark.parametrize("is_receiver_first", [True, False])
@pytest.mark.parametrize(("sent", "expected"), [(10, 11), (11, 10), (60000, 1)])
def test_lengths_that_differ_fail_at_both_ends(peers, is_receiver_first, sent, expected):
    sender, receiver = peers.pair()
    posts = [
        lambda: sender.send("r", "t", 0, sent, "c"),
        lambda: receiver.receive("r", "t", 0, expected, "c"),
    ]
    for post in posts[::-1] if is_receiver_first else posts:
        assert post() == SUCCESS
    for peer in (sender, receiver):
        ((status, _, _),) = peer.wait("r")
        assert status == FAILURE
        count, text = peer.violations()
        assert count == 1
        assert str(sent) in text
        assert str(expected) in text
        assert peer.num_live(REQUEST) == 0
        assert peer.test("r")[0] == INVALID_HANDLE
    exchange(sender, receiver, 100)  # the next two meet


def test_requests_in_flight_are_limited_until_they_are_tested_done(peers):
    sender, receiver = peers.pair(NRT_SIM_PENDING_MAX="3")
    for post in (sender.send, receiver.receive):
        for i in range(3):
            assert post(f"r{i}", "t", i, 1, "c") == SUCCESS
        assert post("r3", "t", 3, 1, "c") == RESOURCE
    assert sender.wait("r0", "r1", "r2") == [[SUCCESS, 1, 1]] * 3
    assert receiver.receive("r3", "t", 3, 1, "c") == RESOURCE  # they are done, but not tested
    assert receiver.wait("r1") == [[SUCCESS, 1, 1]]
    assert receiver.receive("r3", "t", 3, 1, "c") == SUCCESS
    assert receiver.receive("r4", "t", 4, 1, "c") == RESOURCE
    assert sender.send("r3", "t", 3, 1, "c") == SUCCESS
    assert receiver.wait("r3") == [[SUCCESS, 1, 1]]


def test_the_limit_is_each_communicator_s_own(peers):
    sender, receiver = peers.pair(NRT_SIM_PENDING_MAX="1")
    join(receiver, 1, sender, 0, "back")
    assert receiver.receive("r", "t", 0, 1, "c") == SUCCESS
    assert receiver.send("r2", "t", 1, 1, "back") == SUCCESS


def test_a_request_is_not_tested_again_after_done(peers):
    sender, receiver = peers.pair()
    exchange(sender, receiver, 100)
    for peer in (sender, receiver):
        assert peer.violations()[0] == 0
        assert peer.test("exchanged")[0] == INVALID_HANDLE
        assert peer.violations()[0] == 1
    exchange(sender, receiver, 100)
    assert sender.test("exchanged")[0] == INVALID_HANDLE  # nor by its number's successor
    assert sender.violations()[0] == 2


def test_two_threads_do_not_test_one_request(peers):
    sender, receiver = peers.pair()
    assert sender.send("r", "t", 0, 10, "c") == SUCCESS
    assert sender.test_twice_at_once("r") == [NOT_DONE, [FAILURE, 0, 0]]
    count, text = sender.violations()
    assert count == 1
    assert "two threads" in text
    assert receiver.receive("r", "t", 0, 10, "c") == SUCCESS
    assert sender.wait("r") == [[SUCCESS, 1, 10]]


def test_bytes_are_seen_after_flush_only(peers):
    sender, receiver = peers.pair()
    sender.write_bytes("t", 0, b"new" * 10)
    receiver.write_bytes("t", 0, b"old" * 10)
    exchange(sender, receiver, 30)
    assert receiver.read_bytes("t", 0, 30) == b"old" * 10
    assert receiver.flush(1) == SUCCESS
    assert receiver.read_bytes("t", 0, 30) == b"new" * 10
    receiver.write_bytes("t", 0, b"own" * 10)
    assert receiver.flush(1) == SUCCESS  # once is enough
    assert receiver.read_bytes("t", 0, 30) == b"own" * 10


def test_flush_shows_only_what_was_tested_done(peers):
    sender, receiver = peers.pair()
    sender.write_bytes("t", 0, b"onetwo")
    for i, name in enumerate(("one", "two")):
        assert receiver.receive(name, "t", 3 * i, 3, "c") == SUCCESS
        assert sender.send(name, "t", 3 * i, 3, "c") == SUCCESS
    assert sender.wait("one", "two") == [[SUCCESS, 1, 3]] * 2  # both receives are done
    assert receiver.test("two") == [SUCCESS, 1, 3]
    assert receiver.flush(1) == SUCCESS
    assert receiver.read_bytes("t", 0, 6) == b"\0\0\0two"
    assert receiver.test("one") == [SUCCESS, 1, 3]
    assert receiver.read_bytes("t", 0, 6) == b"\0\0\0two"
    assert receiver.flush(1) == SUCCESS
    assert receiver.read_bytes("t", 0, 6) == b"onetwo"


def test_flush_is_of_one_core(peers):
    sender, receiver = peers.start("0", lncs=(0,)), peers.start("1-2", lncs=(1, 2))
    assert sender.allocate("t", 10) == SUCCESS
    sender.write_bytes("t", 0, b"0123456789")
    for lnc in (1, 2):
        assert receiver.allocate(f"t{lnc}", 10, lnc - 1) == SUCCESS
        join(sender, 0, receiver, lnc, f"c{lnc}")
        assert sender.send(f"r{lnc}", "t", 0, 10, f"c{lnc}") == SUCCESS
        assert receiver.receive(f"r{lnc}", f"t{lnc}", 0, 10, f"c{lnc}") == SUCCESS
    assert receiver.wait("r1", "r2") == [[SUCCESS, 1, 10]] * 2
    assert receiver.flush(2) == SUCCESS
    assert receiver.read_bytes("t1", 0, 10) == bytes(10)
    assert receiver.read_bytes("t2", 0, 10) == b"0123456789"


def test_slices_are_sent_and_received(peers):
    sender, receiver = peers.pair()
    for peer in (sender, receiver):
        assert peer.slice("t", 100, 50, "part") == SUCCESS
    sender.write_bytes("t", 100, b"x" * 50)
    assert sender.send("r", "part", 10, 40, "c") == SUCCESS
    assert sender.send("r2", "part", 10, 41, "c") == INVALID
    assert receiver.receive("r", "part", 0, 40, "c") == SUCCESS
    assert receiver.wait("r") == [[SUCCESS, 1, 40]]
    assert receiver.flush(1) == SUCCESS
    assert receiver.read_bytes("t", 99, 42) == b"\0" + b"x" * 40 + b"\0"


def test_a_tensor_is_not_freed_while_a_request_uses_it(peers):
    sender, receiver = peers.pair()
    assert sender.send("r", "t", 0, 10, "c") == SUCCESS
    sender.free("t")
    assert sender.violations()[0] == 1
    assert receiver.receive("r", "t", 0, 10, "c") == SUCCESS  # and nothing worse happens
    assert receiver.wait("r") == sender.wait("r") == [[SUCCESS, 1, 10]]


def test_a_tensor_is_not_freed_while_it_is_registered(peers):
    sender, receiver = peers.pair()
    exchange(sender, receiver, 10)
    assert receiver.flush(1) == SUCCESS
    assert sender.close_lnc(0) == SUCCESS
    for peer, expected in ((sender, 0), (receiver, 1)):
        peer.free("t")
        assert peer.violations()[0] == expected


def test_an_unused_tensor_is_freed_any_time(peers):
    sender, _ = peers.pair()
    sender.free("t")
    assert sender.violations()[0] == 0


@pytest.mark.parametrize(("offset", "is_race"), [(0, 1), (9, 1), (10, 0), (19, 0)])
def test_a_receive_does_not_race_for_bytes(peers, offset, is_race):
    _, receiver = peers.pair()
    assert receiver.receive("r", "t", 0, 10, "c") == SUCCESS
    assert receiver.receive("r2", "t", offset, 5, "c") == SUCCESS
    assert receiver.violations()[0] == is_race


def test_sends_may_share_bytes(peers):
    sender, _ = peers.pair()
    for name in ("r", "r2"):
        assert sender.send(name, "t", 0, 10, "c") == SUCCESS
    assert sender.violations()[0] == 0
