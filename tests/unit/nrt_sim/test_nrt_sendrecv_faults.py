"""Lost peers and scheduled faults of async send/receive, on the simulator of libnrt."""

import signal

import pytest
from nrt_sendrecv_peer import (
    DMA_ABORT,
    FAILURE,
    NETWORK_PROXY_FAILURE,
    SUCCESS,
    TIMEOUT,
    WAIT_S,
    Peers,
    all_ended,
    exchange,
    join,
    stop_thread,
    stop_thread_by_guest,
)
from nrt_sim import build

CHUNK = 256 << 10
NOT_DONE = [SUCCESS, 0, 0]


@pytest.fixture
def peers(tmp_path):
    with all_ended(Peers(build.library_path(), tmp_path)) as peers:
        yield peers


def check_lost(peer, lnc, is_sender, other):
    """The request "r" is in flight for ever; `other` is a peer to connect to."""
    post = peer.send if is_sender else peer.receive
    assert post("later", "t", 100, 10, "c") == FAILURE
    assert peer.test_communicator("c")[0] == FAILURE
    join(peer, lnc, other, 2, "c2")
    exchange(peer, other, 100, "c2")
    assert peer.test("r") == NOT_DONE
    assert peer.violations()[0] == 0
    assert peer.close_lnc(lnc) == FAILURE


@pytest.mark.parametrize("is_sender_left", [True, False])
def test_requests_of_a_dead_peer_never_end(peers, is_sender_left):
    sender, receiver = peers.pair()
    other = peers.start("2", lncs=(2,))
    assert other.allocate("t", 100) == SUCCESS
    if is_sender_left:
        assert sender.send("r", "t", 0, 10, "c") == SUCCESS
        receiver.kill()
        check_lost(sender, 0, True, other)
    else:
        assert receiver.receive("r", "t", 200, 10, "c") == SUCCESS
        sender.kill()
        check_lost(receiver, 1, False, other)


@pytest.mark.parametrize("is_sender_left", [True, False])
def test_a_peer_may_die_in_the_middle_of_a_message(peers, is_sender_left):
    """The program is not ended by a signal, and what came in part is not seen."""
    size = 8 * CHUNK
    sender, receiver = peers.pair()
    other = peers.start("2", lncs=(2,))
    for peer in (sender, receiver, other):
        assert peer.allocate("long", size) == peer.allocate("t", 1000) == SUCCESS
    sender.write_bytes("long", 0, b"x" * size)
    assert receiver.receive("r", "long", 0, size, "c") == SUCCESS
    if is_sender_left:
        sender.schedule("function=sendrecv.chunk call=2 delay_us=300000")
        assert sender.send("r", "long", 0, size, "c") == SUCCESS
        while sender.num_calls("sendrecv.chunk") < 2:
            pass
        receiver.kill()
        check_lost(sender, 0, True, other)
    else:
        sender.schedule("function=sendrecv.chunk call=3 die")
        sender.ask("send", "r", "long", 0, size, "c")  # it may die before it answers
        assert sender.process.wait(WAIT_S) == -signal.SIGKILL
        check_lost(receiver, 1, False, other)
        assert receiver.read_bytes("long", 0, size) == bytes(size)


def test_a_dead_peer_is_noticed_by_the_next_call(peers):
    sender, receiver = peers.pair()
    stop_thread(sender, receiver)  # so that it is the call, not the thread
    receiver.kill()
    assert sender.test_communicator("c")[0] == FAILURE
    assert sender.send("r", "t", 0, 10, "c") == FAILURE


def test_what_came_whole_from_a_peer_that_is_gone_counts(peers):
    """Nor does it end this process that its word of thanks finds nobody."""
    sender, receiver = peers.pair()
    sender.write_bytes("t", 0, b"last words")
    assert receiver.schedule("function=sendrecv.receive delay_us=300000") == 0
    assert receiver.receive("r", "t", 0, 10, "c") == SUCCESS
    assert sender.send("r", "t", 0, 10, "c") == SUCCESS
    while receiver.num_calls("sendrecv.receive") == 0:
        pass
    sender.kill()
    assert receiver.wait("r") == [[SUCCESS, 1, 10]]
    assert receiver.flush(1) == SUCCESS
    assert receiver.read_bytes("t", 0, 10) == b"last words"


def test_the_last_answer_goes_before_a_core_closes(peers):
    """Its thread sleeps: so the answer is sent by the close."""
    sender, receiver = peers.pair()
    join(receiver, 1, sender, 0, "back")
    assert sender.send("r", "t", 0, 10, "c") == SUCCESS
    assert receiver.send("b", "t", 0, 1, "back") == sender.receive("b", "t", 50, 1, "back") == 0
    assert receiver.wait("b") == [[SUCCESS, 1, 1]]  # by now it has heard of "r", too
    stop_thread_by_guest(receiver, 1, peers.start("9", lncs=(9,)))
    assert receiver.receive("r", "t", 100, 11, "c") == SUCCESS
    assert receiver.test("r")[0] == FAILURE  # the lengths differ
    assert receiver.close_lnc(1) == SUCCESS
    assert sender.wait("r", "b")[0][0] == FAILURE


def test_a_core_closes_although_a_peer_is_gone_when_nothing_was_in_flight(peers):
    sender, receiver = peers.pair()
    exchange(sender, receiver, 10)
    receiver.kill()
    assert sender.test_communicator("c")[0] == FAILURE
    assert sender.close_lnc(0) == SUCCESS
    assert sender.open_lnc(0) == SUCCESS


def test_a_peer_that_closes_its_core_is_as_gone_as_a_dead_one(peers):
    sender, receiver = peers.pair()
    assert sender.send("r", "t", 0, 10, "c") == SUCCESS
    assert receiver.close_lnc(1) == SUCCESS
    other = peers.start("2", lncs=(2,))
    assert other.allocate("t", 1000) == SUCCESS
    check_lost(sender, 0, True, other)


def test_a_link_that_is_cut_loses_both_ends(peers):
    size = 2 * CHUNK
    sender, receiver = peers.pair()
    for peer in (sender, receiver):
        assert peer.allocate("long", size) == SUCCESS
    assert sender.fault("sendrecv.chunk", FAILURE) == 0
    assert receiver.receive("r", "long", 0, size, "c") == SUCCESS
    assert sender.send("r", "long", 0, size, "c") == SUCCESS
    for peer in (sender, receiver):
        while peer.test_communicator("c")[0] != FAILURE:
            pass
        assert peer.test("r") == NOT_DONE
    assert sender.num_calls("sendrecv.chunk") == 1


@pytest.mark.parametrize("is_sender_s", [True, False])
def test_a_fault_of_one_end_is_a_network_failure_at_the_other(peers, is_sender_s):
    sender, receiver = peers.pair()
    peer, other = (sender, receiver) if is_sender_s else (receiver, sender)
    assert peer.fault("sendrecv.send" if is_sender_s else "sendrecv.receive", DMA_ABORT) == 0
    assert receiver.receive("r", "t", 0, 10, "c") == SUCCESS
    assert sender.send("r", "t", 0, 10, "c") == SUCCESS
    assert peer.wait("r")[0][0] == DMA_ABORT
    assert other.wait("r")[0][0] == NETWORK_PROXY_FAILURE
    exchange(sender, receiver, 100)
    assert sender.violations()[0] == receiver.violations()[0] == 0


@pytest.mark.parametrize("is_sender_s", [True, False])
def test_a_request_that_hangs_never_ends_and_others_do(peers, is_sender_s):
    sender, receiver = peers.pair()
    peer = sender if is_sender_s else receiver
    assert peer.fault("sendrecv.send" if is_sender_s else "sendrecv.receive", TIMEOUT) == 0
    assert receiver.receive("r", "t", 1000, 10, "c") == SUCCESS
    assert sender.send("r", "t", 0, 10, "c") == SUCCESS
    exchange(sender, receiver, 100)
    assert sender.test("r") == receiver.test("r") == NOT_DONE
    assert receiver.close_lnc(1) == FAILURE


def test_a_message_goes_although_nothing_comes_back_for_the_one_before(peers):
    """Two are cleared at once, as the sender's thread slept, and the first gets no answer."""
    sender, receiver = peers.pair()
    assert sender.schedule("function=sendrecv.send hang_ms=500") == 0
    assert receiver.fault("sendrecv.receive", TIMEOUT) == 0
    for i in range(3):
        assert receiver.receive(f"r{i}", "t", 10 * i, 10, "c") == SUCCESS
        assert sender.send(f"r{i}", "t", 10 * i, 10, "c") == SUCCESS
        while sender.num_calls("sendrecv.send") == 0:
            pass
    assert receiver.wait("r2") == sender.wait("r2") == [[SUCCESS, 1, 10]]
    assert [receiver.test(f"r{i}") for i in range(2)] == [NOT_DONE] * 2


def test_a_fault_may_be_of_one_core_only(peers):
    sender, receiver = peers.pair()
    assert sender.schedule("function=sendrecv.send status=1203 core=1") == 0
    exchange(sender, receiver, 10)
    assert sender.schedule("function=sendrecv.send status=1203 core=0") == 0
    assert sender.send("r", "t", 0, 10, "c") == receiver.receive("r", "t", 0, 10, "c") == SUCCESS
    assert sender.wait("r")[0][0] == DMA_ABORT


def test_bytes_may_be_damaged_on_their_way(peers):
    sender, receiver = peers.pair()
    sender.write_bytes("t", 0, bytes(range(200)))
    assert receiver.fault("sendrecv.corrupt", FAILURE) == 0
    exchange(sender, receiver, 200)
    assert receiver.flush(1) == SUCCESS
    found = receiver.read_bytes("t", 0, 200)
    assert [i for i in range(200) if found[i] != i] == [100]


CALLS = {
    "get_max_num_pending_request": lambda peer: peer.limits()[1],
    "get_max_num_communicators_per_lnc": lambda peer: peer.limits()[0],
    "init": lambda peer: peer.open_lnc(1),
    "connect": lambda peer: peer.connect("d", "127.0.0.1", 9, 0),
    "accept": lambda peer: peer.accept("d", "127.0.0.1", 9, 0),
    "test_comm": lambda peer: peer.test_communicator("c")[0],
    "send_tensor": lambda peer: peer.send("s", "t", 0, 10, "c"),
    "recv_tensor": lambda peer: peer.receive("s", "t", 20, 10, "back"),
    "test_request": lambda peer: peer.test("r")[0],
    "flush": lambda peer: peer.flush(0),
    "close": lambda peer: peer.close_lnc(0),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_function_fails_as_scheduled_and_then_works(peers, name):
    """A call that fails so does nothing: it can be made again."""
    peer, receiver = peers.start("0-1", lncs=(0,)), peers.start("2", lncs=(2,))
    assert peer.allocate("t", 100) == receiver.allocate("t", 100) == SUCCESS
    join(peer, 0, receiver, 2)
    join(receiver, 2, peer, 0, "back")
    if name != "close":
        assert peer.send("r", "t", 0, 10, "c") == SUCCESS
    function = f"nrt_async_sendrecv_{name}"
    before = peer.num_calls(function)
    faults = f"function={function} status={DMA_ABORT}; function={function} call=2 hang_ms=1"
    assert peer.schedule(faults) == 0
    assert [CALLS[name](peer) for _ in range(3)] == [DMA_ABORT, TIMEOUT, SUCCESS]
    assert peer.num_calls(function) == before + 3


def test_a_delayed_thread_delays_and_loses_nothing(peers):
    sender, receiver = peers.pair()
    assert sender.schedule("function=sendrecv.send delay_us=20000 times=3") == 0
    assert receiver.schedule("function=sendrecv.receive delay_us=20000 times=3") == 0
    names = ["r0", "r1", "r2"]
    for i, name in enumerate(names):
        assert sender.send(name, "t", 10 * i, 10, "c") == SUCCESS
        assert receiver.receive(name, "t", 10 * i, 10, "c") == SUCCESS
    assert sender.wait(*names) == receiver.wait(*names) == [[SUCCESS, 1, 10]] * 3
