"""The transfer engine of workers that share an arena: no byte moves, blocks change owner.

The decode worker verifies the blocks where the prefill worker wrote them, then takes them, and
gives as many of its own for them. The prefill worker's processor is not involved: it finds what
came when it gives up what it had promised.

Next: neuron_di/kv/ownership.py
"""

import queue
import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from neuron_di.clock import now_s
from neuron_di.errors import (
    KvChanged,
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    PeerRefused,
    RemoteProtocolError,
    StaleIncarnation,
)
from neuron_di.kv import ArenaPool, Group, KvLayout, Memory, as_ids, ids_below
from neuron_di.obs import get_logger
from neuron_di.transfer.copy_thread import JOIN_S
from neuron_di.transfer.transfer_engine import Receive, Send, TransferToken
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import HandoverRegion, Region
from neuron_di_bindings.owner_words import GENERATION_MAX, Ids, Words, word

_log = get_logger(__name__)

# Receives that were verified, or are being. What was not taken meanwhile is not wanted any more.
_OPEN_MAX = 4096

_Key = tuple[Incarnation, int]  # a peer, and a transfer's tag


@dataclass(frozen=True, slots=True)
class Job:
    key: _Key
    slot: int
    receive: Receive
    given_ids: Ids
    given: Words  # as they were when they were offered: the request may have ended since
    token: TransferToken


class HandoverEngine:
    """Owns one thread, on which blocks are verified and taken; borrows this worker's pool."""

    name = "handover"
    is_one_sided = True

    def __init__(self, pool: ArenaPool) -> None:
        self._pool = pool
        self._view = pool.arena.view  # what the thread reads stays mapped, whoever closes the pool
        self._peers: dict[Incarnation, int] = {}  # their slots
        self._open: OrderedDict[_Key, Group] = OrderedDict()
        self._lock = threading.Lock()  # of what is above, and: nothing is posted behind the last
        self._is_closed = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-handover", daemon=True)
        self._start()

    def _start(self) -> None:
        self._thread.start()

    def local_region(self, peer: Incarnation) -> Region:  # noqa: ARG002
        ownership = self._pool.ownership
        return HandoverRegion(
            arena=ownership.arena.id, slot=ownership.slot, incarnation=self._pool.incarnation
        )

    def register(self, memory: Memory) -> None:
        """Nothing to do: nothing is received outside of the arena."""

    def connect(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        arena = self._pool.ownership.arena
        if not isinstance(region, HandoverRegion) or region.arena != arena.id:
            raise PeerRefused("the peer's pool is not in this worker's arena")
        if layout != self._pool.layout:
            raise PeerRefused("the peer's blocks have another layout")
        if layout.num_replicas > 1:
            raise PeerRefused("digests do not cover all replicas of a head")
        # A random number that the peer wrote into the memory which both have mapped.
        if region.incarnation != peer or not peer or arena.incarnation_of(region.slot) != peer:
            raise StaleIncarnation("the peer has no blocks in the arena")
        if not arena.is_held(region.slot):
            raise PeerGone("the peer's process has ended")
        arena.map_blocks_of(region.slot, peer)
        with self._lock:
            self._peers[peer] = region.slot

    def accept(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        """Nothing to do: the decode worker takes the blocks by itself."""

    def post_send(self, peer: Incarnation, send: Send) -> TransferToken:  # noqa: ARG002
        return TransferToken.over()  # what came for the blocks stands in the arena

    def post_receive(self, peer: Incarnation, receive: Receive) -> TransferToken:
        ownership = self._pool.ownership
        given_ids = ids_below(receive.block_ids, ownership.arena.blocks_max)
        if given_ids is None:
            error: NeuronDiError = LocalProtocolError("what was offered is no block of the arena")
            return TransferToken.over(error)
        token, given = TransferToken(), ownership.known(given_ids)
        with self._lock:
            if self._is_closed:
                error = LocalProtocolError("a receive was posted to a closed engine")
            elif (slot := self._peers.get(peer)) is None:
                error = PeerGone("no connection to the prefill worker's pool")
            else:
                key = peer, receive.tag
                self._jobs.put(Job(key, slot, receive, given_ids, given, token))
                return token
        token.complete(error)
        return token

    def cancel(self, peer: Incarnation, tag: int) -> None:
        """Nothing to do: a receive waits for nobody."""

    def fence(self, peer: Incarnation) -> None:
        """Nothing to do: processors of one host see what they wrote."""

    def commit(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:
        """Take the blocks, and give those that were offered."""
        with self._lock:
            group = self._open.pop((peer, receive.tag), None)
            slot = self._peers.get(peer)
        if group is None:
            return KvChanged("the blocks were not taken in time")
        if slot is None:
            return PeerGone("the prefill worker was disconnected before its blocks were taken")
        return self._pool.ownership.take(group, slot)

    def abandon(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:
        with self._lock:
            group = self._open.pop((peer, receive.tag), None)
        if group is None or not self._is_promised(group):
            return _given_up()
        return None

    def disconnect(self, peer: Incarnation) -> None:
        with self._lock:
            self._peers.pop(peer, None)
            for key in [key for key in self._open if key[0] == peer]:
                del self._open[key]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._jobs.put(None)
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            _log.error("copy_thread_did_not_end", thread=self._thread.name)
        else:
            self._view = memoryview(b"")

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            start_s = now_s()
            self._end(job, self._seen(job), start_s)

    def _seen(self, job: Job) -> NeuronDiError | None:
        try:
            return self._look(job)
        except Exception as unexpected:  # the thread serves every request: it must live on
            return LocalProtocolError(f"KV hand-over failed: {unexpected!r}")

    def _end(self, job: Job, error: NeuronDiError | None, start_s: float) -> None:
        if error is None:
            source_ids = as_ids(job.receive.source.block_ids)
            job.token.adopted_ids = [BlockId(n) for n in source_ids.tolist()]
        job.token.transfer_s = now_s() - start_s
        try:
            job.token.complete(error)  # they are verified, and taken, right here
        except Exception:
            _log.exception("transfer_callback_failed")
            with self._lock:  # nobody takes it, and whoever is promised the same blocks may
                self._open.pop(job.key, None)

    def _look(self, job: Job) -> NeuronDiError | None:
        """Why the blocks cannot be read and taken. None: they can; what was promised is kept."""
        group = self._group(job)
        if isinstance(group, NeuronDiError):
            return group
        if not self._is_promised(group):
            return _given_up()
        with self._lock:
            # One offer for one promise: so what was given for a block is never in doubt.
            lead = group.source_ids[-1], group.source[-1]
            leads = ((each.source_ids[-1], each.source[-1]) for each in self._open.values())
            if lead in leads:
                return RemoteProtocolError("the prefill worker has promised a block twice")
            self._open[job.key] = group
            if len(self._open) > _OPEN_MAX:
                self._open.popitem(last=False)
        return None

    def _is_promised(self, group: Group) -> bool:
        """Whether the blocks are still what was promised."""
        words = self._pool.ownership.arena.words.load(group.source_ids)
        return np.array_equal(words, group.source)

    def _group(self, job: Job) -> Group | NeuronDiError:
        source, offered = job.receive.source, job.receive.block_ids
        ownership = self._pool.ownership
        if len(source.block_ids) != len(source.generations) or len(offered) != len(
            source.block_ids
        ):
            return RemoteProtocolError("the lists of a transfer's blocks do not fit each other")
        if job.receive.memory != self._pool.memory():
            return RemoteProtocolError("a hand-over into other memory than the pool")
        if not len(offered):
            return RemoteProtocolError("a transfer of nothing")
        # Behind the blocks that were granted there is no memory: nobody may read there.
        source_ids = ids_below(source.block_ids, ownership.arena.num_granted)
        if source_ids is None:
            return RemoteProtocolError("the prefill worker named a block outside of the arena")
        if not all(0 <= generation <= GENERATION_MAX for generation in source.generations):
            return KvChanged("the prefill worker promised what no block can be")
        given_ids, given = job.given_ids, job.given
        if any(len(np.unique(ids)) != len(ids) for ids in (source_ids, given_ids)):
            return RemoteProtocolError("a block is named twice in one transfer")
        if not given.all():
            return LocalProtocolError("a block was offered that is another worker's")
        promised = [word(job.slot, generation) for generation in source.generations]
        return Group(source_ids, np.array(promised, np.uint64), given_ids, given)


def _given_up() -> KvChanged:
    return KvChanged("the prefill worker has given the blocks up")
