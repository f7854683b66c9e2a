"""However a transfer over TCP ends, its tokens end, and say the truth about its bytes."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tcp_kit import (
    DECODE,
    LAYOUT,
    PATIENT,
    PREFILL,
    WAIT_S,
    TcpPair,
    hostile_decode,
    is_closed,
    runs_of,
    tcp_pair,
    wait,
)

from neuron_di.clock import Deadline
from neuron_di.errors import KvMissing, LocalProtocolError, PeerGone, PeerTimeout
from neuron_di.transfer import copy_thread, tcp_receiver
from neuron_di.transfer.copy_thread import CopyThread
from neuron_di.transfer.run_bounds import OwnMemories
from neuron_di.transfer.tcp_engine import TcpTimes
from neuron_di.transfer.tcp_frames import DATA, FRAME_BYTES, WANT, Frame, read_frame
from neuron_di.transfer.tcp_proof import answer
from neuron_di.transfer.tcp_receiver import TcpReceiver
from neuron_di.transfer.tcp_stream import Stream
from neuron_di.transfer.transfer_engine import MOVING_S_MAX, Send, TransferToken, deadline_of
from neuron_di.wire import TcpRegion

MIB = 1 << 20
TOTAL = 4 * MIB  # two pieces over two streams


@contextmanager
def prefill_of_two_streams(pair: TcpPair) -> Iterator[list[socket.socket]]:
    """`pair.decode`, connected to sockets of which the test says every byte."""
    own = b"p" * 32
    told = pair.decode.local_region(PREFILL)
    assert isinstance(told, TcpRegion)
    socks: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def prove() -> None:
            for _ in range(2):
                sock, _ = listener.accept()
                _, welcome = answer(
                    sock,
                    PREFILL,
                    lambda _: (own, told.secret),
                    1024 * LAYOUT.block_bytes,
                    tls=None,
                    deadline=Deadline.after(WAIT_S),
                )
                sock.settimeout(WAIT_S)
                sock.sendall(welcome)
                socks.append(sock)

        thread = threading.Thread(target=prove)
        thread.start()
        region = TcpRegion(host="127.0.0.1", port=port, secret=own, num_streams=2)
        pair.decode.connect(PREFILL, region, LAYOUT)
        thread.join(WAIT_S)
        yield socks
        for sock in socks:
            sock.close()


def until(is_so, *, timeout_s: float = WAIT_S) -> None:
    deadline, pause = Deadline.after(timeout_s), threading.Event()
    while not is_so():
        if deadline.has_passed():
            raise TimeoutError("it did not happen")
        pause.wait(0.001)


def test_only_bytes_that_arrived_count(monkeypatch):
    """Of a cancelled receive's two pieces one is complete, but its thread says so only when the
    other has failed."""
    is_read, go_on = threading.Event(), threading.Event()
    real = Stream.receive_runs

    def receive_runs(self, *args):
        real(self, *args)
        is_read.set()
        go_on.wait(WAIT_S)

    with (
        tcp_pair(1024, is_connected=False, transfer_streams=2) as pair,
        prefill_of_two_streams(pair) as socks,
    ):
        monkeypatch.setattr(Stream, "receive_runs", receive_runs)
        receiver = pair.decode._connected[PREFILL].receiver
        receive = pair.receive_of(runs_of([0], [0], [TOTAL]))
        token = pair.receive(receive)
        for sock in socks:
            want = read_frame(sock.recv(FRAME_BYTES, socket.MSG_WAITALL), (WANT,))
            sock.sendall(want.answered(DATA).pack() + b"A" * MIB)
        until(lambda: receiver._incoming[receive.tag].num_writing == 2)
        pair.decode.cancel(PREFILL, receive.tag)
        socks[1].sendall(b"A" * MIB)
        assert is_read.wait(WAIT_S)
        socks[0].close()
        until(lambda: receiver._incoming[receive.tag].num_writing == 1)
        go_on.set()
        assert isinstance(wait(token), KvMissing)


def test_a_send_that_ended_is_told_though_rubbish_came_behind_what_ended_it():
    with tcp_pair() as pair, hostile_decode(pair) as sock:
        receive = pair.receive_of(runs_of([0], [0], [4096]))
        sending = pair.send(receive)
        words = Frame(WANT, receive.tag, 8192, 0, 8192).pack()  # of another number of bytes
        sock.sendall(words + b"\xff" * FRAME_BYTES)
        assert wait(sending) is not None
        assert is_closed(sock)


def test_a_receive_is_read_while_another_is_verified():
    """Whoever verifies goes on only when the next one's bytes have left the prefill worker."""
    with tcp_pair(4096, times=TcpTimes(silence_s=2.0, proof_s=20.0)) as pair:
        receives = [pair.whole(), pair.whole()]
        sends = [pair.send(receive) for receive in receives]
        is_sent = threading.Event()
        first = pair.receive(receives[0])
        first.on_done(lambda _: is_sent.wait(WAIT_S))
        second = pair.receive(receives[1])
        sends[1].on_done(lambda _: is_sent.set())
        assert (wait(second), wait(first)) == (None, None)
        assert [wait(send) for send in sends] == [None, None]


def test_a_thread_completes_what_comes_after_its_end():
    thread = CopyThread("test")
    tokens = [TransferToken(), TransferToken()]
    thread.complete(tokens[0], None, is_short=False)
    thread.end()
    thread.complete(tokens[1], None, is_short=False)
    assert [wait(token) for token in tokens] == [None, None]
    thread.join(WAIT_S)


def test_a_receiving_thread_that_dies_ends_its_receives(monkeypatch):
    is_asked = threading.Event()

    def fail(_nice: int) -> None:
        is_asked.wait(WAIT_S)
        raise PermissionError("not allowed")

    monkeypatch.setattr(tcp_receiver, "lower_thread_priority", fail)
    with tcp_pair() as pair:
        token = pair.receive(pair.whole())
        is_asked.set()
        assert isinstance(wait(token), PeerGone)


def test_a_connection_for_which_no_thread_is_left_leaves_nothing_behind(monkeypatch):
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if thread.name == "kv-tcp-in":
            if started:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    with tcp_pair() as pair, socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        streams = [Stream(socket.create_connection(address), WAIT_S) for _ in range(2)]
        monkeypatch.setattr(threading.Thread, "start", start_one)
        own = OwnMemories(pair.decode_pool.memory())
        with pytest.raises(PeerGone):  # the other ends of the streams are open
            TcpReceiver(PREFILL, streams, own, 4096, pair.decode._token_thread)
        monkeypatch.undo()
        started[0].join(WAIT_S)
        assert not started[0].is_alive()
        assert [stream.fileno() for stream in streams] == [-1, -1]
        assert pair.moves()


def test_posting_never_raises(monkeypatch):
    with tcp_pair() as pair:
        receive = pair.receive_of(runs_of([0], [0], [64]))
        with monkeypatch.context() as patch:
            patch.setattr(OwnMemories, "refusal", lambda *_, **__: 1 // 0)
            assert isinstance(wait(pair.receive(receive)), LocalProtocolError)
        for tag in (-1, 1 << 64):
            sending = pair.prefill.post_send(DECODE, Send(tag=tag, runs=receive.runs))
            assert isinstance(wait(sending), LocalProtocolError)
        assert pair.is_untouched()
        assert pair.moves()


def test_a_descriptor_is_not_given_away_while_somebody_sends_on_it():
    is_inside, go_on = threading.Event(), threading.Event()
    descriptors: list[int] = []

    class Slow(socket.socket):
        def send(self, *_: object) -> int:
            is_inside.set()
            go_on.wait(WAIT_S)
            descriptors.append(self.fileno())
            return 4

    with socket.create_server(("127.0.0.1", 0)) as listener, Slow() as sock:
        sock.connect(listener.getsockname())
        stream = Stream(sock, WAIT_S)
        sending = threading.Thread(target=stream.send_frames, args=(b"want",))
        closing = threading.Thread(target=stream.close)
        sending.start()
        assert is_inside.wait(WAIT_S)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        go_on.set()
        for thread in (sending, closing):
            thread.join(WAIT_S)
        assert descriptors[0] >= 0
        assert stream.fileno() == -1
        stream.shut()


def test_whoever_reads_slowly_does_not_keep_the_blocks_for_long():
    with (
        tcp_pair(8192, times=TcpTimes(silence_s=0.2, proof_s=20.0, send_s=0.3)) as pair,
        hostile_decode(pair) as sock,
    ):
        receive = pair.whole()
        sending = pair.send(receive)
        total = receive.runs.num_bytes
        sock.sendall(Frame(WANT, receive.tag, total, 0, total).pack())
        pause, num_read = threading.Event(), 0
        while not sending.is_done() and num_read < total:  # never silent, and 6 MB/s at most
            num_read += len(sock.recv(1 << 16))
            pause.wait(0.01)
        assert isinstance(wait(sending), PeerTimeout)


def test_no_piece_has_more_time_than_there_is_for_any():
    assert deadline_of(10**15, 5.0).remaining_s() <= MOVING_S_MAX
    assert deadline_of(10**6, 5.0).remaining_s() <= 6.0


def test_a_send_that_nobody_asks_for_ends_though_all_streams_are_busy():
    times = TcpTimes(silence_s=20.0, proof_s=20.0, unclaimed_s=0.05, close_s=0.05)
    with tcp_pair(8192, times=times) as pair, hostile_decode(pair) as sock:
        busy, other = pair.whole(), pair.whole()
        total = busy.runs.num_bytes
        sock.sendall(Frame(WANT, busy.tag, total, 0, total).pack())  # and takes none of it
        sending = pair.send(busy)
        sock.recv(1)
        assert isinstance(wait(pair.send(other)), KvMissing)
        assert not sending.is_done()


def test_a_send_that_was_asked_for_waits_for_those_before_it():
    """However long they take: whoever sends does not hear what is asked meanwhile."""
    times = TcpTimes(silence_s=WAIT_S, proof_s=WAIT_S, unclaimed_s=0.05, close_s=0.05)
    with tcp_pair(8192, times=times) as pair, hostile_decode(pair) as sock:
        busy, other = pair.whole(), pair.receive_of(runs_of([0], [0], [MIB]))
        total = busy.runs.num_bytes
        sending = [pair.send(busy)]
        sock.sendall(Frame(WANT, busy.tag, total, 0, total).pack())
        sock.recv(1, socket.MSG_PEEK)
        sock.sendall(Frame(WANT, other.tag, MIB, 0, MIB).pack())
        sending.append(pair.send(other))
        threading.Event().wait(4 * times.unclaimed_s)
        left = FRAME_BYTES + total + FRAME_BYTES + MIB
        while left and (some := sock.recv(min(left, MIB))):
            left -= len(some)
        assert [wait(token) for token in sending] == [None, None]


def test_a_send_that_failed_and_is_still_read_has_no_deadline_to_wake_for():
    times = TcpTimes(silence_s=20.0, proof_s=20.0, unclaimed_s=0.05, close_s=0.05)
    with tcp_pair(8192, times=times) as pair, hostile_decode(pair) as sock:
        receive = pair.whole()
        total = receive.runs.num_bytes
        token = pair.send(receive)
        sock.sendall(Frame(WANT, receive.tag, total, 0, total // 2).pack())  # and takes none of it
        sender = pair.prefill._accepted[DECODE].sender
        until(lambda: sender._outgoing[receive.tag].error is not None)
        assert not token.is_done()
        assert sender.end_unclaimed() is None


def test_the_watch_of_sends_wakes_once_for_each_that_nobody_asks_for(monkeypatch):
    """And not at all while there is none."""
    with tcp_pair(times=PATIENT) as pair:
        sender = pair.prefill._accepted[DECODE].sender
        calls: list[object] = []
        real = type(sender).end_unclaimed
        monkeypatch.setattr(
            type(sender), "end_unclaimed", lambda self: calls.append(self) or real(self)
        )
        for _ in range(100):
            assert pair.moves()
        assert len(calls) <= 200
        unclaimed = pair.send(pair.whole())
        pair.prefill.disconnect(DECODE)
        assert isinstance(wait(unclaimed), PeerGone)


def test_a_copy_that_hangs_does_not_keep_its_engine_from_closing(monkeypatch):
    monkeypatch.setattr(copy_thread, "JOIN_S", 0.05)
    go_on = threading.Event()
    thread, token = CopyThread("test"), TransferToken()

    def hang() -> None:
        go_on.wait(WAIT_S)

    thread.post(hang, 1, token)
    thread.end()
    thread.join()
    assert thread.is_alive()
    go_on.set()
    assert wait(token) is None
    monkeypatch.undo()
    thread.join()
    assert not thread.is_alive()
