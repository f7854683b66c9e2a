"""Many messages between two and three processes, checked byte by byte, on the simulator."""

import random
import time
from itertools import pairwise

import pytest
from nrt_sendrecv_peer import (
    REQUEST,
    SUCCESS,
    WAIT_S,
    Peers,
    all_ended,
    exchange,
    join,
)
from nrt_sim import build

TENSOR_BYTES = 3 << 20
BURST_BYTES = 64 << 10


@pytest.fixture
def peers(tmp_path):
    with all_ended(Peers(build.library_path(), tmp_path)) as peers:
        yield peers


class Route:
    """A communicator from one process to another, and the messages that go over it.

    Each message comes from a random place of the source and has a place of its own at the
    target. Both ends post their messages in order, each in pieces of any length.
    """

    def __init__(self, rng, source, target, name, places):
        self.source, self.target, self.name = source, target, name
        self.messages = []
        for offset, size in places:
            start = rng.randrange(TENSOR_BYTES // 2 - size + 1)
            self.messages.append((f"{name}-{len(self.messages)}", start, offset, size))
        self.num_sent = self.num_received = 0

    def post(self, rng, *, is_send):
        num_posted = self.num_sent if is_send else self.num_received
        end = min(num_posted + rng.randrange(1, 5), len(self.messages))
        for request, start, offset, size in self.messages[num_posted:end]:
            if is_send:
                status = self.source.send("s " + request, "t", start, size, self.name)
            else:
                status = self.target.receive("r " + request, "t", offset, size, self.name)
            assert status == SUCCESS
        if is_send:
            self.num_sent = end
        else:
            self.num_received = end
        return end == len(self.messages)


def cut(rng, start, end, count):
    """`count` ranges without gaps: most are short, one is long."""
    marks = sorted(rng.randrange(1, 2000 * count) for _ in range(count - 1))
    bounds = [start, *(start + mark for mark in marks), end]
    return [(a, b - a) for a, b in pairwise(bounds) if b > a]


def run_exchange(peers, num_processes, num_messages, seed):
    """All to all. The lower half of each tensor is sent, the upper half received into."""
    rng = random.Random(seed)
    half = TENSOR_BYTES // 2
    processes = [peers.start(str(i), lncs=(i,)) for i in range(num_processes)]
    contents = [rng.randbytes(half) for _ in processes]
    for process, written in zip(processes, contents, strict=True):
        assert process.allocate("t", TENSOR_BYTES) == SUCCESS
        process.write_bytes("t", 0, written)
    routes, room = [], half // (num_processes - 1)
    for i, target in enumerate(processes):
        others = [j for j in range(num_processes) if j != i]
        for place, j in enumerate(others):
            start = half + place * room
            places = cut(rng, start, start + room, num_messages)
            routes.append(Route(rng, processes[j], target, f"{j}to{i}", places))
            join(processes[j], j, target, i, f"{j}to{i}")
    todo = [(route, is_send) for route in routes for is_send in (True, False)]
    while todo:
        one = rng.choice(todo)
        if one[0].post(rng, is_send=one[1]):
            todo.remove(one)
    for i, process in enumerate(processes):
        wait_and_flush(rng, process, i, routes)
    for route in routes:
        sent = contents[processes.index(route.source)]
        for _, start, offset, size in route.messages:
            assert route.target.read_bytes("t", offset, size) == sent[start : start + size]
    for i, process in enumerate(processes):
        assert process.num_live(REQUEST) == process.violations()[0] == 0
        assert process.close_lnc(i) == SUCCESS
    return processes


def wait_and_flush(rng, process, lnc, routes):
    names = {}
    for route in routes:
        for request, _, _, size in route.messages:
            if route.source is process:
                names["s " + request] = size
            if route.target is process:
                names["r " + request] = size
    order = rng.sample(sorted(names), len(names))
    assert process.wait(*order) == [[SUCCESS, 1, names[name]] for name in order]
    assert process.flush(lnc) == SUCCESS


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_processes", [2, 3])
def test_all_bytes_arrive_where_they_belong(peers, num_processes, seed):
    run_exchange(peers, num_processes, 60, seed)


def test_a_window_of_two_requests_moves_all(peers):
    """Post until the limit says no, wait for the oldest, go on: as a poster does."""
    sender, receiver = peers.pair(NRT_SIM_PENDING_MAX="2")
    contents = random.Random(5).randbytes(1 << 16)
    sender.write_bytes("t", 0, contents)
    size, num_refused = (1 << 16) // 40, 0
    for i in range(40):
        for peer, post in ((receiver, receiver.receive), (sender, sender.send)):
            if post(f"r{i}", "t", i * size, size, "c") == SUCCESS:
                continue
            num_refused += 1
            assert peer.wait(f"r{i - 2}") == [[SUCCESS, 1, size]]
            assert post(f"r{i}", "t", i * size, size, "c") == SUCCESS
    for peer in (sender, receiver):
        assert peer.wait("r38", "r39") == [[SUCCESS, 1, size]] * 2
    assert num_refused == 2 * 38
    assert receiver.flush(1) == SUCCESS
    assert receiver.read_bytes("t", 0, 40 * size) == contents[: 40 * size]


def move_by_threads(sender, receiver):
    """Which message a receive gets is a matter of chance; that each comes once is not."""
    count, size = 4 * 50, 64
    messages = [bytes([i]) * size for i in range(count)]
    sender.write_bytes("t", 0, b"".join(messages))
    sender.ask("move_by_threads", "send", 4, 50, size)
    assert receiver.move_by_threads("receive", 4, 50, size) == count
    assert sender.answer() == count
    assert receiver.flush(1) == SUCCESS
    found = receiver.read_bytes("t", 0, count * size)
    assert sorted(found[i * size : (i + 1) * size] for i in range(count)) == messages
    assert sender.violations()[0] == receiver.violations()[0] == 0


def test_threads_may_share_a_communicator(peers):
    move_by_threads(*peers.pair(NRT_SIM_PENDING_MAX="3"))


def wait_for_bytes(peer, lnc, num_bytes):
    deadline = time.monotonic() + WAIT_S
    while peer.bytes_sent(lnc) < num_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_slow_core_sends_what_its_bandwidth_allows(peers):
    """At one byte a second a burst goes, and the rest for the rest of the day."""
    slow = {"NRT_SIM_BYTES_PER_S": "1"}
    sender = peers.start("0-1", lncs=(0, 1), **slow)
    receiver = peers.start("2", lncs=(2,))
    for lnc in (0, 1):
        assert sender.allocate(f"t{lnc}", 2 * BURST_BYTES, lnc) == SUCCESS
    assert receiver.allocate("t", 4 * BURST_BYTES) == SUCCESS
    for lnc in (0, 1):
        join(sender, lnc, receiver, 2, f"c{lnc}")
    assert sender.send("long", "t0", 0, 2 * BURST_BYTES, "c0") == SUCCESS
    assert receiver.receive("long", "t", 0, 2 * BURST_BYTES, "c0") == SUCCESS
    wait_for_bytes(sender, 0, BURST_BYTES)
    assert sender.send("short", "t1", 0, 1000, "c1") == SUCCESS  # the other core has its own
    assert receiver.receive("short", "t", 2 * BURST_BYTES, 1000, "c1") == SUCCESS
    assert receiver.wait("short") == sender.wait("short") == [[SUCCESS, 1, 1000]]
    assert sender.test("long") == receiver.test("long") == [SUCCESS, 0, 0]
    assert sender.bytes_sent(0) < BURST_BYTES + WAIT_S * 10


def test_a_bandwidth_that_suffices_hides_nothing(peers):
    sender, receiver = peers.pair(NRT_SIM_BYTES_PER_S=str(10 << 20))
    sender.write_bytes("t", 0, b"slow" * 16384)
    for _ in range(4):  # more than a burst
        exchange(sender, receiver, 1 << 16)
    assert receiver.flush(1) == SUCCESS
    assert receiver.read_bytes("t", 0, 1 << 16) == b"slow" * 16384
    assert sender.bytes_sent(0) == 4 << 16
