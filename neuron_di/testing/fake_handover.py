"""Hand-overs between simulated processes: a real arena and real ownership, on virtual time.

All of them have the arena mapped, each through an open file of its own, so the kernel's locks
tell them apart. One that is killed lets go of its locks, and does nothing else.
"""

import os

import numpy as np

from neuron_di.clock import now_s
from neuron_di.errors import NeuronDiError, PeerError, PeerGone
from neuron_di.kv import ArenaPool, KvLayout, create_arena
from neuron_di.kv.arena import Arena
from neuron_di.kv.ownership import Ownership
from neuron_di.testing.fake_model import HalvesPool
from neuron_di.testing.fake_transfer import COPY_S_MEAN, LATE_S_MAX
from neuron_di.testing.network import Network
from neuron_di.testing.virtual_loop import Process
from neuron_di.transfer import Receive, TransferToken
from neuron_di.transfer.handover_engine import HandoverEngine, Job
from neuron_di.types import Incarnation, WorkerId

SLOW_SHARE = 0.3  # are verified slowly: in between their owners may give the blocks up
SLOW_S_MAX = 0.3
BLOCKS_MAX = 1 << 14  # of all workers together: small maps are quickly made


class FakeArenaPool(HalvesPool, ArenaPool):
    """A FakeBackend's share of an arena."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, incarnation: Incarnation, ownership: Ownership
    ) -> None:
        super().__init__(layout, num_blocks, incarnation, ownership)
        arena = ownership.arena
        halves = np.frombuffer(arena.view, np.uint32, offset=arena.data_offset)
        self.halves_N2S = halves.reshape(arena.blocks_max, 2, layout.block_size)

    def die(self) -> None:
        """Its process was killed: the kernel closes its files. Nothing for one that left."""
        self.ownership.arena.close()

    def doubts(self) -> list[int]:
        """Blocks that it takes for its own, and that are not."""
        ids = np.array(self.ownership.ids(), np.int64)
        known: np.ndarray = self.ownership.known(ids)
        doubtful: list[int] = ids[self.arena.words.load(ids) != known].tolist()
        return doubtful


class FakeArena:
    """The arena of one simulated host. Owns its descriptor, and what the dead left of theirs."""

    def __init__(self, network: Network, layout: KvLayout) -> None:
        self._network = network
        self._fd = create_arena()
        self._pools: list[FakeArenaPool] = []
        Arena.open(self._fd, layout, BLOCKS_MAX * layout.block_bytes).close()  # settles its size

    def join(
        self, place: str, layout: KvLayout, num_blocks: int, incarnation: Incarnation
    ) -> FakeArenaPool:
        """For the process that is at this place now."""
        pool = FakeArenaPool.join(self._fd, WorkerId(place), layout, num_blocks, incarnation)
        assert isinstance(pool, FakeArenaPool), "a class method makes its class"
        self._pools.append(pool)
        self._network.on_death(place, pool.die)
        return pool

    def close(self) -> None:
        for pool in self._pools:
            pool.die()
        os.close(self._fd)


class FakeHandoverEngine(HandoverEngine):
    """Without a thread: a while after it looked at the blocks they are verified and taken."""

    def __init__(self, network: Network, process: Process, pool: FakeArenaPool) -> None:
        self._network = network
        self._process = process
        super().__init__(pool)

    def _start(self) -> None:
        """The process's own callbacks do its work."""

    def post_receive(self, peer: Incarnation, receive: Receive) -> TransferToken:
        token = super().post_receive(peer, receive)
        if not token.is_done():
            job = self._jobs.get_nowait()
            assert job is not None, "it was posted just now"
            faults, rng = self._network.faults, self._network.rng
            before_s, between_s = rng.random() * COPY_S_MEAN, rng.random() * COPY_S_MEAN
            if rng.random() < SLOW_SHARE:
                between_s = rng.random() * SLOW_S_MAX
            if faults.strikes("transfer stalls"):
                between_s = rng.random() * LATE_S_MAX
            elif faults.strikes("transfer is late"):
                before_s = rng.random() * LATE_S_MAX
            elif faults.strikes("transfer is slow"):
                before_s, between_s = rng.random() * SLOW_S_MAX, rng.random() * SLOW_S_MAX
            self._process.call_later(before_s, self._begin, job, between_s)
        return token

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    def _begin(self, job: Job, between_s: float) -> None:
        if self._network.faults.strikes("transfer fails"):
            error: NeuronDiError | None = PeerError("an injected fault")
        else:
            error = self._why_closed() or self._seen(job)
        self._process.call_later(between_s, self._finish, job, error, now_s())

    def _finish(self, job: Job, error: NeuronDiError | None, start_s: float) -> None:
        error = error or self._why_closed()
        num_blocks = len(job.receive.source.block_ids)
        self._network.note("handover", self._process.name, num_blocks, error)
        self._end(job, error, start_s)

    def _why_closed(self) -> NeuronDiError | None:
        return PeerGone("this worker is closed") if self._is_closed else None
