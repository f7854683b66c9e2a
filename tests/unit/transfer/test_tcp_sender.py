"""Prefill's end of a data connection, beside what ends it or reads the same blocks."""

import socket
import threading
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest
from contract.fake_cuda import WHY_NOT, make_pool
from gpu_kit import mirror_bytes
from tcp_kit import LAYOUT, PREFILL, WAIT_S, bytes_of, runs_of, wait

from neuron_di.errors import BackendLost, PeerGone, RemoteProtocolError
from neuron_di.kv import KvLayout, KvPool
from neuron_di.transfer.tcp_frames import DATA, FRAME_BYTES, WANT, Frame, read_frame
from neuron_di.transfer.tcp_sender import TcpSender
from neuron_di.transfer.tcp_stream import Stream
from neuron_di.transfer.transfer_engine import Send
from neuron_di.types import BlockId

PAGED = KvLayout(num_layers=2, num_kv_heads=4, head_dim=64, block_size=4, dtype="float32")
NUM_BLOCKS = 4


class HeldStream(Stream):
    """What is to be sent of memory waits until `before` returns, and is accounted for after
    `after`."""

    def __init__(self, sock, *, before=lambda: None, after=lambda: None):
        super().__init__(sock, WAIT_S)
        self.before, self.after = before, after

    def send_runs(self, header, address, offsets, lengths, deadline):
        if not len(lengths):
            super().send_runs(header, address, offsets, lengths, deadline)
            return
        self.before()
        super().send_runs(header, address, offsets, lengths, deadline)
        self.after()


class Reader:
    """A decode worker's end: asks for all of a send, and reads it."""

    def __init__(self, sock):
        self.sock = sock

    def ask(self, num_bytes):
        self.sock.sendall(Frame(WANT, 1, num_bytes, 0, num_bytes).pack())

    def read(self, num_bytes):
        frame = read_frame(self._exactly(FRAME_BYTES), (DATA,))
        assert frame.length == num_bytes
        return self._exactly(num_bytes)

    def _exactly(self, num_bytes):
        found = b""
        while len(found) < num_bytes:
            some = self.sock.recv(num_bytes - len(found))
            assert some, "the connection ended"
            found += some
        return found


@contextmanager
def serving(pool, **held):
    """A sender of the pool's, and a decode worker's end of its only stream."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sock = stack.enter_context(socket.create_connection(listening.getsockname(), WAIT_S))
        sender = TcpSender(pool, unclaimed_s=WAIT_S, send_s=WAIT_S)
        stream = HeldStream(listening.accept()[0], **held)
        thread = threading.Thread(target=sender.serve, args=(stream, 1, 1, b"welcome"))
        thread.start()
        stack.callback(thread.join, WAIT_S)
        stack.callback(sender.fail, PeerGone("the test is over"))
        assert sock.recv(7, socket.MSG_WAITALL) == b"welcome"
        yield sender, Reader(sock)


@pytest.fixture
def gpu_pool():
    with closing(make_pool(PAGED, NUM_BLOCKS, PREFILL)) as pool:
        whole = bytes_of(pool.device_memory())
        whole[:] = np.random.default_rng(1).integers(0, 256, whole.shape, np.uint8)
        pool.mark_on_device([BlockId(n) for n in range(NUM_BLOCKS)])
        yield pool


def send_of(pool):
    """All of its blocks."""
    num_bytes = pool.memory().num_bytes
    return Send(
        tag=1,
        runs=runs_of([0], [0], [num_bytes]),
        block_ids=[BlockId(n) for n in range(pool.num_blocks)],
        num_tokens=pool.num_blocks * pool.layout.block_size,
    )


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_connection_that_ends_once_all_is_sent_fails_no_send(is_sent):
    """Another stream's thread sees that end before this one can say that all is sent."""
    with closing(KvPool.create(LAYOUT, NUM_BLOCKS, PREFILL)) as pool:
        moment = "after" if is_sent else "before"
        held = {moment: lambda: sender.fail(PeerGone("the decode worker closed"))}
        with serving(pool, **held) as (sender, reader):
            token = sender.post(send_of(pool))
            num_bytes = pool.memory().num_bytes
            reader.ask(num_bytes)
            if is_sent:
                assert reader.read(num_bytes) == bytes(bytes_of(pool.memory()))
                assert (wait(token), token.kv_bytes) == (None, num_bytes)
            else:
                assert isinstance(wait(token), PeerGone)


def test_another_error_than_the_peers_end_stays():
    with closing(KvPool.create(LAYOUT, NUM_BLOCKS, PREFILL)) as pool:
        lost = BackendLost("the device failed")
        with serving(pool, after=lambda: sender.fail(lost)) as (sender, reader):
            token = sender.post(send_of(pool))
            reader.ask(pool.memory().num_bytes)
            assert wait(token) is lost


def test_whoever_had_a_part_and_asks_for_all_keeps_no_blocks():
    with closing(KvPool.create(LAYOUT, NUM_BLOCKS, PREFILL)) as pool, serving(pool) as served:
        sender, reader = served
        token, num_bytes = sender.post(send_of(pool)), pool.memory().num_bytes
        reader.sock.sendall(Frame(WANT, 1, num_bytes, 0, num_bytes // 2).pack())
        reader.read(num_bytes // 2)
        reader.ask(num_bytes)
        assert isinstance(wait(token), RemoteProtocolError)


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_a_send_that_ends_leaves_the_same_blocks_to_another(gpu_pool):
    """As a reader that was killed is noticed while its successor reads."""
    has_begun, has_ended = threading.Event(), threading.Event()
    num_bytes = gpu_pool.memory().num_bytes

    def hold():
        has_begun.set()
        assert has_ended.wait(WAIT_S)

    with serving(gpu_pool) as (dead, one), serving(gpu_pool, before=hold) as (sender, other):
        tokens = [dead.post(send_of(gpu_pool)), sender.post(send_of(gpu_pool))]
        other.ask(num_bytes)
        assert has_begun.wait(WAIT_S)
        one.ask(num_bytes)
        one.read(num_bytes)
        assert wait(tokens[0]) is None
        has_ended.set()
        assert other.read(num_bytes) == bytes(bytes_of(gpu_pool.device_memory()))
        assert wait(tokens[1]) is None
        assert mirror_bytes(gpu_pool) == 0


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_a_send_that_another_thread_ends_leaves_nothing_in_the_mirror(gpu_pool):
    """A piece of it was sent; the connection ends before the next is asked for."""
    piece = gpu_pool.memory().num_bytes // 2
    with serving(gpu_pool) as (sender, reader):
        token = sender.post(send_of(gpu_pool))
        reader.sock.sendall(Frame(WANT, 1, 2 * piece, 0, piece).pack())
        reader.read(piece)
        assert mirror_bytes(gpu_pool) == 2 * piece
        sender.fail(PeerGone("the decode worker is gone"))
        assert isinstance(wait(token), PeerGone)
        assert mirror_bytes(gpu_pool) == 0
