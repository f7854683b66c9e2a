"""Two TCP engines over loopback, their pools, and a peer that says what it likes."""

import ctypes
import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from neuron_di.clock import Deadline
from neuron_di.config import TransferOptions
from neuron_di.errors import NeuronDiError
from neuron_di.kv import KvLayout, KvPool, Memory, Runs
from neuron_di.transfer.tcp_engine import TcpEngine, TcpTimes
from neuron_di.transfer.tcp_proof import Hello, dial
from neuron_di.transfer.tcp_tls import Tls
from neuron_di.transfer.transfer_engine import BlockSource, Receive, Send, TransferToken
from neuron_di.types import Incarnation
from neuron_di.wire import TcpRegion

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=32, dtype="float32")
PREFILL, DECODE = Incarnation("f0" * 16), Incarnation("d0" * 16)
UNTOUCHED = 0xEE
WAIT_S = 30.0
PATIENT = TcpTimes(silence_s=20.0, close_s=20.0, proof_s=20.0)


def bytes_of(memory: Memory) -> NDArray[np.uint8]:
    return np.frombuffer((ctypes.c_uint8 * memory.num_bytes).from_address(memory.address), np.uint8)


def wait(token: TransferToken) -> NeuronDiError | None:
    ended = threading.Event()
    token.on_done(lambda _: ended.set())
    if not ended.wait(WAIT_S):
        raise TimeoutError("the transfer did not end")
    return token.error()


def runs_of(source: list[int], destination: list[int], lengths: list[int]) -> Runs:
    return Runs(
        source_offsets=np.array(source, np.int64),
        destination_offsets=np.array(destination, np.int64),
        lengths=np.array(lengths, np.int64),
    )


@dataclass
class TcpPair:
    prefill_pool: KvPool
    decode_pool: KvPool
    prefill: TcpEngine
    decode: TcpEngine
    sent: NDArray[np.uint8] = field(init=False)
    received: NDArray[np.uint8] = field(init=False)
    _tags: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.sent = bytes_of(self.prefill_pool.memory())
        self.received = bytes_of(self.decode_pool.memory())
        self.sent[:] = np.random.default_rng(1).integers(0, 256, self.sent.shape, np.uint8)
        self.received[:] = UNTOUCHED

    def connect(self) -> None:
        self.prefill.accept(DECODE, self.decode.local_region(PREFILL), LAYOUT)
        self.decode.connect(PREFILL, self.prefill.local_region(DECODE), LAYOUT)

    def receive_of(self, runs: Runs) -> Receive:
        memory = self.decode_pool.memory()
        return Receive(tag=next(self._tags), runs=runs, memory=memory, source=BlockSource([0], [0]))

    def whole(self) -> Receive:
        """All of the pool, the first half to the second and back."""
        half = len(self.sent) // 2
        return self.receive_of(runs_of([0, half], [half, 0], [half, half]))

    def receive(self, receive: Receive) -> TransferToken:
        return self.decode.post_receive(PREFILL, receive)

    def send(self, receive: Receive) -> TransferToken:
        return self.prefill.post_send(DECODE, Send(tag=receive.tag, runs=receive.runs))

    def has_arrived(self, receive: Receive) -> bool:
        """Exactly these bytes, and no other."""
        expected = np.full_like(self.received, UNTOUCHED)
        rows = (receive.runs.source_offsets, receive.runs.destination_offsets, receive.runs.lengths)
        for source, destination, length in zip(*rows, strict=True):
            expected[destination : destination + length] = self.sent[source : source + length]
        return bool((self.received == expected).all())

    def is_untouched(self) -> bool:
        return bool((self.received == UNTOUCHED).all())

    def moves(self) -> bool:
        """Whether an honest transfer succeeds."""
        receive = self.receive_of(runs_of([0], [4096], [4096]))
        sending, receiving = self.send(receive), self.receive(receive)
        return (wait(sending), wait(receiving)) == (None, None)


@contextmanager
def tcp_pair(
    num_blocks: int = 64, *, times: TcpTimes = PATIENT, is_connected: bool = True, **options: object
) -> Iterator[TcpPair]:
    both = TransferOptions(**options)
    with ExitStack() as stack:
        pools = [
            stack.enter_context(closing(KvPool.create(LAYOUT, num_blocks, name)))
            for name in (PREFILL, DECODE)
        ]
        engines = [
            stack.enter_context(closing(TcpEngine(pool, both, times=times))) for pool in pools
        ]
        pair = TcpPair(*pools, *engines)
        if is_connected:
            pair.connect()
        yield pair


@contextmanager
def hostile_decode(pair: TcpPair, tls: Tls | None = None) -> Iterator[socket.socket]:
    """A proved data connection to `pair.prefill`, of which the test says every byte."""
    region = pair.prefill.local_region(DECODE)
    own = pair.decode.local_region(PREFILL)
    assert isinstance(region, TcpRegion)
    assert isinstance(own, TcpRegion)
    attempt = next(pair.decode._attempts)
    hello = Hello(attempt=attempt, index=0, num_streams=1, decode=DECODE, prefill=PREFILL)
    raw = socket.create_connection((region.host, region.port), WAIT_S)
    with raw if tls is None else tls.client.wrap_socket(raw) as sock:
        dial(
            sock,
            hello,
            decode_secret=own.secret,
            prefill_secret=region.secret,
            deadline=Deadline.after(WAIT_S),
        )
        sock.settimeout(WAIT_S)
        yield sock


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end closes it. What it says before is dropped."""
    sock.settimeout(WAIT_S)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True
