"""Transfers out of another process, which may stop, be killed, or give its blocks up."""

import threading
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from neuron_di.clock import Deadline
from neuron_di.errors import KvChanged, NeuronDiError, PeerError
from neuron_di.kv import KvLayout, whole_block_runs
from neuron_di.transfer import Receive, TransferEngine
from neuron_di.types import Incarnation

from .engine_kinds import KINDS, EngineKind
from .numbered_blocks import NumberedBlocks
from .peer_process import PeerProcess, peer_process
from .transfer_pair import (
    DECODE,
    LAYOUT,
    NUM_BLOCKS,
    PREFILL,
    UNTOUCHED,
    WAIT_S,
    Outcome,
    arena_of,
    one_end,
    random_bytes,
)

LARGE = KvLayout(num_layers=16, num_kv_heads=4, head_dim=64, block_size=64, dtype="float32")
NUM_LARGE = 16  # of 2 MiB
NUM_KILLS = 5  # until one was in mid-transfer


@pytest.fixture(params=KINDS)
def kind(request):
    if KINDS[request.param].why_not is not None:
        pytest.skip(KINDS[request.param].why_not)
    return KINDS[request.param]


@dataclass
class Scene:
    """A prefill worker in a process of its own, and a decode worker in this one."""

    kind: EngineKind
    arena_fd: int | None
    peer: PeerProcess
    engine: TransferEngine
    received: NumberedBlocks
    sent: np.ndarray
    num_receives: int = 0

    def receive_of(self, source_numbers, numbers):
        self.num_receives += 1
        source, pool = self.peer.promise(source_numbers), self.received.pool
        block_ids = self.received.ids_of(numbers)
        return Receive(
            tag=self.num_receives,
            runs=whole_block_runs(pool.layout, source.block_ids, block_ids),
            memory=pool.memory(),
            source=source,
            block_ids=block_ids,
        )

    def post(self, receive):
        self.received.begin(receive.block_ids)
        token = self.engine.post_receive(PREFILL, receive)
        return Outcome(self.engine, receive, token, lambda _: self.received.end(receive.block_ids))

    def transfer(self, receive):
        outcome = self.post(receive)
        self.peer.send(receive)
        return outcome

    def move(self, source_numbers, numbers):
        return self.transfer(self.receive_of(source_numbers, numbers))

    @contextmanager
    def other_process(self, *incarnation):
        """In the first one's place, or of another incarnation."""
        pool = self.received.pool
        with peer_process(
            self.kind.name, pool.layout, pool.num_blocks, *incarnation, arena_fd=self.arena_fd
        ) as process:
            yield process


@contextmanager
def scene_of(kind, layout=LAYOUT, num_blocks=NUM_BLOCKS):
    with (
        arena_of(kind) as arena_fd,
        peer_process(kind.name, layout, num_blocks, arena_fd=arena_fd) as peer,
        one_end(kind, DECODE, layout, num_blocks, arena_fd) as (pool, engine),
    ):
        peer.accept(engine.local_region(PREFILL))
        engine.connect(PREFILL, peer.region, layout)
        received = NumberedBlocks(pool)
        received[:] = UNTOUCHED
        yield Scene(kind, arena_fd, peer, engine, received, random_bytes(received[:].shape))
        received.check()


def check_end(scene, outcome, block_ids):
    """It ends: with the right bytes, or with an error."""
    error = outcome.error()
    if error is None:
        assert (scene.received[list(block_ids)] == scene.sent[list(block_ids)]).all()
    else:
        assert isinstance(error, NeuronDiError)
        assert error.retryable
    return error


def test_bytes_arrive_from_another_process_unless_it_gave_them_up(kind):
    with scene_of(kind) as scene:
        outcome = scene.move([5, 6, 30, 1], [0, 9, 8, 31])
        assert outcome.error() is None
        assert (scene.received[[0, 9, 8, 31]] == scene.sent[[5, 6, 30, 1]]).all()
        others = [n for n in range(NUM_BLOCKS) if n not in (0, 9, 8, 31)]
        assert (scene.received[others] == UNTOUCHED).all()
        if scene.engine.is_one_sided:  # else prefill itself sends, and sends no such block
            receive = scene.receive_of([5, 6], [0, 1])
            scene.peer.give_up([6])
            assert isinstance(scene.transfer(receive).error(), KvChanged)
            assert scene.move([7], [2]).error() is None


def test_a_peer_that_is_killed_in_mid_transfer_ends_its_receives(kind):
    """Again where the transfer was over before the kill, of an engine that must notice."""
    errors = (killed_in_mid_transfer(kind) for _ in range(NUM_KILLS))
    if kind.needs_its_peer:
        assert any(error is not None for error in errors)
    else:
        next(errors)


def killed_in_mid_transfer(kind):
    """What the receive ended with whose peer was killed when its first bytes were here."""
    block_ids = range(NUM_LARGE - 1)
    with scene_of(kind, LARGE, NUM_LARGE) as scene:
        receive = scene.receive_of(block_ids, block_ids)
        late = scene.receive_of([NUM_LARGE - 1], [NUM_LARGE - 1])
        outcome = scene.post(receive)
        ordering = threading.Thread(target=order_send, args=(scene.peer, receive))
        ordering.start()
        deadline = Deadline.after(WAIT_S)
        while (scene.received[0, :8] == UNTOUCHED).all():  # until the first bytes are here
            if outcome.has_ended(0.0) or deadline.has_passed():
                break
        scene.peer.kill()
        ordering.join()
        queued = scene.post(late)
        found = check_end(scene, outcome, block_ids)
        error = queued.error()
        assert error is None or isinstance(error, PeerError)
        check_nothing_comes(scene)
    return found


def test_a_peer_that_is_killed_while_it_stands_still_ends_its_receives(kind):
    """None of its bytes are on their way: a two-sided engine waits for all of them."""
    block_ids = range(NUM_LARGE)
    with scene_of(kind, LARGE, NUM_LARGE) as scene:
        receive = scene.receive_of(block_ids, block_ids)
        scene.peer.stop()
        outcome = scene.post(receive)
        outcome.has_ended(0.1)
        scene.peer.kill()
        check_end(scene, outcome, block_ids)
        check_nothing_comes(scene)


def test_a_peer_that_stands_still_and_goes_on_loses_nothing(kind):
    block_ids = range(NUM_LARGE)
    with scene_of(kind, LARGE, NUM_LARGE) as scene:
        receive = scene.receive_of(block_ids, block_ids)
        outcome = scene.post(receive)
        ordering = threading.Thread(target=order_send, args=(scene.peer, receive))
        ordering.start()
        scene.peer.stop()
        outcome.has_ended(0.2)
        scene.peer.go_on()
        ordering.join()
        assert outcome.error() is None
        assert (scene.received == scene.sent).all()
        assert scene.peer.is_alive()


def test_a_dead_peer_is_no_connection(kind):
    with (
        arena_of(kind) as arena_fd,
        peer_process(kind.name, LAYOUT, NUM_BLOCKS, arena_fd=arena_fd) as peer,
        one_end(kind, DECODE, LAYOUT, NUM_BLOCKS, arena_fd) as (_, engine),
    ):
        peer.accept(engine.local_region(PREFILL))
        peer.kill()
        with pytest.raises(PeerError):
            engine.connect(PREFILL, peer.region, LAYOUT)


def test_a_peer_that_died_is_forgotten_and_its_successor_connected(kind):
    with scene_of(kind) as scene:
        assert scene.move([0], [0]).error() is None
        scene.peer.kill()
        scene.engine.disconnect(PREFILL)
        with scene.other_process() as successor:
            successor.accept(scene.engine.local_region(PREFILL))
            scene.engine.connect(PREFILL, successor.region, LAYOUT)
            scene.peer = successor
            outcome = scene.move([1, 2], [1, 2])
            assert outcome.error() is None
            assert (scene.received[[1, 2]] == scene.sent[[1, 2]]).all()


def test_a_worker_lives_on_when_its_reader_is_killed_in_mid_transfer(kind):
    if not kind.outlives_its_readers:
        pytest.skip(f"{kind.name}: a reader that dies in mid-transfer may take its peer along")
    every = range(NUM_LARGE)
    with scene_of(kind, LARGE, NUM_LARGE) as scene:
        for number in range(2):
            other = Incarnation(f"{number}b" * 16)
            with scene.other_process(other) as reader:
                scene.peer.accept(reader.region, other)
                reader.connect(scene.peer.region)
                receive = scene.receive_of(every, every)
                reader.receive(receive)
                scene.peer.send(receive, other)
                reader.kill()
        outcome = scene.move(every, every)
        assert outcome.error() is None
        assert (scene.received == scene.sent).all()


def order_send(peer, receive):
    try:
        peer.send(receive)
    except (EOFError, OSError):
        return  # it was killed


def check_nothing_comes(scene):
    """What has ended writes no more: the blocks may be another request's now."""
    scene.received[:] = UNTOUCHED
    scene.engine.disconnect(PREFILL)
    scene.engine.close()
    assert (scene.received == UNTOUCHED).all()
