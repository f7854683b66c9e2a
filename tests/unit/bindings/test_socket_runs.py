"""Both ways to move runs through a socket, and the compiled one under the address sanitizer."""

import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import sanitized

from neuron_di.clock import Deadline
from neuron_di_bindings import socket_runs

SOURCE = Path(socket_runs.__file__).with_name("socket_runs.c")
WAIT_S = 30.0


@pytest.fixture(params=["compiled", "plain"])
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(socket_runs, "_library", lambda: None)
    elif not socket_runs.is_compiled():
        pytest.skip("the extension is not built")


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        for sock in (near, far):
            socket_runs.limit_silence(sock, WAIT_S)
        yield near, far


def rows(*numbers):
    return np.array(numbers, np.int64)


def soon() -> Deadline:
    return Deadline.after(WAIT_S)


def address(array):
    return int(array.ctypes.data)


@pytest.mark.parametrize("seed", range(6))
def test_runs_arrive_and_no_other_byte_changes(way, ends, seed):
    """Lists of any shape at either end: only the order of the bytes is the same."""
    random = np.random.default_rng(seed)
    total = [1, 5000, 1 << 20, 3 << 20, 9 << 20, 9 << 20][seed]

    def cut(count):
        ends_ = np.sort(random.integers(0, total + 1, count))
        lengths = np.diff(np.concatenate([[0], ends_, [total]])).astype(np.int64)  # some are empty
        gaps = random.integers(0, 3, len(lengths)) * 8
        return (np.cumsum(lengths + gaps) - lengths).astype(np.int64), lengths

    (source_offsets, source_lengths), (offsets, lengths) = cut(3000), cut(2000)
    order = random.permutation(len(offsets))
    source = random.integers(0, 256, total + 100_000, np.uint8)
    received = np.full(total + 100_000, 0xEE, np.uint8)
    near, far = ends
    sender = threading.Thread(
        target=socket_runs.send_runs,
        args=(near, b"head", address(source), source_offsets, source_lengths),
        kwargs={"deadline": soon()},
    )
    sender.start()
    head = np.zeros(4, np.uint8)
    socket_runs.receive_runs(far, address(head), rows(0), rows(4), deadline=soon())
    offsets, lengths = offsets[order].copy(), lengths[order].copy()
    every_other = [row.repeat(2)[::2] for row in (offsets, lengths)]  # numbers with gaps between
    socket_runs.receive_runs(far, address(received), *every_other, deadline=soon())
    sender.join(WAIT_S)
    assert head.tobytes() == b"head"
    pairs = zip(source_offsets, source_lengths, strict=True)
    sent = np.concatenate([source[o : o + n] for o, n in pairs])
    expected = np.full_like(received, 0xEE)
    ends_ = np.cumsum(lengths)
    for offset, length, end in zip(offsets, lengths, ends_, strict=True):
        expected[offset : offset + length] = sent[end - length : end]
    assert (received == expected).all()
    far.sendall(b"x")  # and the socket wakes for one byte again
    assert near.recv(1) == b"x"


def test_a_peer_that_closes_ends_the_receive_where_it_was(way, ends):
    near, far = ends
    near.sendall(b"ab")
    near.close()
    received = np.zeros(8, np.uint8)
    with pytest.raises(ConnectionError):
        socket_runs.receive_runs(far, address(received), rows(6, 0), rows(2, 2), deadline=soon())
    assert received.tobytes() == b"\0" * 6 + b"ab"


def test_silence_ends_both_directions(way, ends):
    near, _ = ends
    socket_runs.limit_silence(near, 0.05)
    received = np.zeros(1 << 26, np.uint8)
    with pytest.raises(TimeoutError):
        socket_runs.receive_runs(near, address(received), rows(0), rows(9), deadline=soon())
    with pytest.raises(TimeoutError):
        socket_runs.send_runs(near, b"", address(received), rows(0), rows(1 << 26), deadline=soon())


def test_a_deadline_ends_a_receive_that_trickles(way, ends):
    near, far = ends
    socket_runs.limit_silence(far, 0.1)
    is_over = threading.Event()

    def trickle():
        while not is_over.wait(0.005):
            near.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    received = np.zeros(1 << 20, np.uint8)
    with pytest.raises(TimeoutError):
        socket_runs.receive_runs(
            far, address(received), rows(0), rows(1 << 20), deadline=Deadline.after(0.1)
        )
    is_over.set()
    thread.join(WAIT_S)


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        (rows(0), rows(-1)),
        (rows(0, 1), rows(1)),
        (np.zeros(1, np.int32), rows(1)),
        (rows(0).reshape(1, 1), rows(1)),
        (rows(0), rows(-(2**63))),
    ],
)
def test_arrays_that_c_would_misread_are_refused(way, ends, offsets, lengths):
    memory = np.zeros(8, np.uint8)
    near, far = ends
    for call in (
        lambda: socket_runs.send_runs(
            near, b"", address(memory), offsets, lengths, deadline=soon()
        ),
        lambda: socket_runs.receive_runs(far, address(memory), offsets, lengths, deadline=soon()),
    ):
        with pytest.raises(ValueError):
            call()


_EXERCISE = """
import sys
from pathlib import Path
import pytest
from neuron_di_bindings import socket_runs
library = socket_runs.load(Path(sys.argv[1]))
socket_runs._library = lambda: library
sys.exit(pytest.main([sys.argv[2], "-q", "-k", "compiled", "-p", "no:cacheprovider"]))
"""


@pytest.mark.timeout(300)
def test_nothing_outside_is_touched_under_the_address_sanitizer(tmp_path):
    """The tests of this file, with numpy's memory between red zones."""
    library = sanitized.build(SOURCE, tmp_path)
    done = sanitized.run(_EXERCISE, library, __file__, timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
