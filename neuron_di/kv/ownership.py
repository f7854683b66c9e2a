"""Which blocks of an arena are this worker's, and how they change hands.

    prefill (P) promises blocks s_1..s_n          decode (D) offers x_1..x_n for them

    take, by D      write the offers; then the *lead* s_n: (P,g) -> (D,g+1): this decides for all
                    then each other s_i: (P,g) -> (D,g+1), then each x_i: (D,h) -> (P,h+1)
    retire, by P    the lead s_n: (P,g) -> (P,g+1): this decides, too. If that succeeds, P keeps
                    all; else it has x_i for each s_i, and ends for D what D had begun
    join, by anyone who starts: end what the dead had begun; then each of its own blocks +1

One swap decides, so there is nothing to take back. What follows from it may be done by either end
or by both, for every swap names the whole word that it expects. So whoever dies, wherever, leaves
each block with one owner, and either end with as many blocks as it had.

What a worker *knows* is not what stands in the arena: a block may have gone and come back. So it
swaps from the words that it knows, and its books follow the exchanges in their order.
neuron_di/testing/handover_model.py tries every order of these steps and every crash.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuron_di.clock import Deadline, sleep_s
from neuron_di.errors import KvChanged, LocalProtocolError, NeuronDiError, RemoteProtocolError
from neuron_di.kv.arena import GATE_TIMEOUT_S, Arena, NoArena, SlotHeld
from neuron_di.types import BlockId, Incarnation, WorkerId
from neuron_di_bindings.owner_words import Ids, Words, fence, passed_to, slots_of, word

TAKE_TIMEOUT_S = 0.05  # for the gate, while another worker joins: those behind it wait, too
LEAVE_TIMEOUT_S = 1.0
SLOT_TIMEOUT_S = 5.0  # until the processes of one that was killed are gone
_SLOT_POLL_S = 0.02

Exchange = tuple[BlockId, BlockId]  # a block that went, and the one that came for it


@dataclass(frozen=True, slots=True)
class Group:
    """What is to be taken: all of it or nothing. The last source block is the lead."""

    source_ids: Ids
    source: Words  # as promised
    given_ids: Ids
    given: Words  # as they were when they were offered


class Ownership:
    """One worker's part of an arena. Thread-safe; owns neither the arena nor the blocks' books."""

    def __init__(self, arena: Arena, slot: int, known: Words) -> None:
        self.arena = arena
        self.slot = slot
        self._known = known  # by block: the word under which it is ours; 0: it is not
        # First this one, then the gate, then `_lock`: nobody waits for another process while he
        # has that, which the engine needs in every step.
        self._gate_lock = threading.Lock()
        self._lock = threading.Lock()
        self._exchanges: deque[Exchange] = deque()
        self._has_left = False

    @classmethod
    def join(
        cls, arena: Arena, worker_id: WorkerId, incarnation: Incarnation, num_blocks: int
    ) -> "Ownership":
        """Take over what the last worker of this name had, and be granted what is missing.

        NoArena when that cannot be; what was granted waits for the next one of this name.
        """
        with _slot_claimed(arena, worker_id) as slot:
            mend(arena)
            ids = _advance_all_of(arena, slot)
            missing = num_blocks - len(ids)
            if missing > 0:
                ids = np.concatenate([ids, arena.grant(missing, word(slot, 1))])
            # The last one may have had more. They stay the slot's, unknown to anybody.
            ids, spare = ids[:num_blocks], ids[num_blocks:]
            known = np.zeros(arena.blocks_max, np.uint64)
            known[ids] = arena.words.load(ids)
            arena.set_incarnation(slot, incarnation)
        try:
            arena.release(spare)
            arena.populate(ids)
        except OSError as error:
            arena.set_incarnation(slot, "")
            with contextlib.suppress(OSError):
                arena.release(ids)
            raise NoArena(f"its memory is not there: {error}") from None
        return cls(arena, slot, known)

    def leave(self) -> None:
        """Give up every block, so that none can be taken, and its memory. Once, at the end."""
        with self._lock:
            self._has_left = True
            self._exchanges.clear()
        arena = self.arena
        with self._gate_lock, contextlib.suppress(OSError):  # else: as if this process had died
            arena.set_incarnation(self.slot, "")
            try:
                with arena.gate(alone=True, timeout_s=LEAVE_TIMEOUT_S):
                    mend(arena)
                    ids = _advance_all_of(arena, self.slot)
            except NoArena:  # somebody holds it who does not run: then only what nobody has taken
                ids = np.flatnonzero(self._known)
                known = self._known[ids]
                ids = ids[arena.words.swap(ids, known, passed_to(known, self.slot))]
            arena.release(ids)

    def ids(self) -> list[BlockId]:
        """The blocks that are ours, in order."""
        with self._lock:
            known = self._known[: self.arena.num_granted]
            return [BlockId(block_id) for block_id in np.flatnonzero(known).tolist()]

    def known(self, block_ids: Ids) -> Words:
        """The words under which blocks are ours; 0: they are not."""
        return self._known[block_ids]

    def take_exchanges(self) -> list[Exchange]:
        """What changed hands since the last call, in order: the books must follow."""
        with self._lock:
            exchanges = list(self._exchanges)
            self._exchanges.clear()
            return exchanges

    def take(self, group: Group, peer: int) -> NeuronDiError | None:
        """Exchange the blocks of `group` with the worker in slot `peer`, or change nothing.

        KvChanged where either end has given its blocks up.
        """
        with self._gate_lock:
            if self._has_left:  # and closed the arena
                return _withdrawn()
            try:
                with self.arena.gate(alone=False, timeout_s=TAKE_TIMEOUT_S), self._lock:
                    return self._take(group, peer)
            except NoArena as error:
                return KvChanged(f"the blocks could not be taken: {error}")

    def _take(self, group: Group, peer: int) -> NeuronDiError | None:
        arena, words, own = self.arena, self.arena.words, passed_to(group.source, self.slot)
        offers, lead_id = arena.offers, group.source_ids[-1]
        if self._has_left or not np.array_equal(self._known[group.given_ids], group.given):
            return _withdrawn()
        given_up = KvChanged("the prefill worker gave the blocks up before they were taken")
        if not np.array_equal(words.load(group.source_ids), group.source):
            return given_up  # from here on only the lead can fail
        # An offer that can be read is one offer: nothing is left of the one before.
        offers.own[group.given_ids] = 0
        fence()
        offers.source_ids[group.given_ids] = group.source_ids
        offers.source[group.given_ids] = group.source
        offers.lead_ids[group.given_ids] = lead_id
        offers.lead[group.given_ids] = group.source[-1]
        fence()
        offers.own[group.given_ids] = group.given
        arena.hints[group.source_ids] = group.given_ids
        if not words.swap(group.source_ids[-1:], group.source[-1:], own[-1:]).all():
            return given_up
        # They are ours, and the others the peer's. Where the peer was quicker, no swap is left.
        words.swap(group.source_ids[:-1], group.source[:-1], own[:-1])
        is_ours = words.load(group.source_ids) == own
        given = np.where(is_ours, passed_to(group.given, peer), passed_to(group.given, self.slot))
        words.swap(group.given_ids, group.given, given)
        self._known[group.given_ids] = np.where(is_ours, np.uint64(0), given)
        self._known[group.source_ids[is_ours]] = own[is_ours]
        self._note(group.given_ids[is_ours], group.source_ids[is_ours])
        if is_ours.all():
            return None
        return RemoteProtocolError("the prefill worker has promised a block twice")

    def retire(self, block_ids: Ids) -> bool:
        """Give up what the blocks of a request hold, in the order in which they were promised.

        True: not yet. Some were exchanged, which the books must follow first; then call again.
        LocalProtocolError for a block that is not ours.
        """
        with self._lock:
            if self._exchanges:
                return True
            if self._has_left or not len(block_ids):
                return False
            before = self._known[block_ids]
            if not before.all():
                raise LocalProtocolError("a block is given up that is another worker's")
            after = passed_to(before, self.slot)
            words, is_kept = self.arena.words, np.zeros(len(block_ids), np.bool_)
            is_kept[-1:] = words.swap(block_ids[-1:], before[-1:], after[-1:])
            if is_kept[-1]:  # nobody can take the others any more
                is_kept[:-1] = words.swap(block_ids[:-1], before[:-1], after[:-1])
            self._known[block_ids[is_kept]] = after[is_kept]
            self._receive_for(block_ids[~is_kept])
            if is_kept.all():
                return False
            if not self._exchanges:
                raise LocalProtocolError("a block was taken, and nothing came for it")
            return True

    def _receive_for(self, block_ids: Ids) -> None:
        """Own what came for blocks that were taken. Nothing came for those that nobody took."""
        granted, offers = self.arena.num_granted, self.arena.offers
        last = np.uint64(granted - 1)
        came = np.minimum(self.arena.hints[block_ids], last).astype(np.int64)
        is_there = self._are_given(came, block_ids) & (self._known[came] == 0)
        self._own(block_ids[is_there], came[is_there])
        if is_there.all():
            return
        # The hint may be of a later exchange: look at what every block was offered for.
        wanted = block_ids[~is_there].astype(np.uint64)
        offered_for = offers.source_ids[:granted].copy()  # others write to it meanwhile
        given_ids = np.flatnonzero(np.isin(offered_for, wanted))
        for_ids = offered_for[given_ids].astype(np.int64)
        is_given = self._are_given(given_ids, for_ids)
        for block_id, given_id in zip(for_ids[is_given], given_ids[is_given], strict=True):
            if offers.source[given_id] != self._known[block_id]:
                continue  # the block came back meanwhile
            if self._known[given_id]:  # it was ours, went, and came back before we looked
                self._receive_for(np.array([given_id]))
            self._own(np.array([block_id]), np.array([given_id]))

    def _own(self, block_ids: Ids, came: Ids) -> None:
        self._known[block_ids] = 0
        self._known[came] = passed_to(self.arena.offers.own[came], self.slot)
        self._note(block_ids, came)

    def _are_given(self, given_ids: Ids, block_ids: Ids) -> NDArray[np.bool_]:
        """Which are ours, or are made ours now, in exchange for these blocks of ours."""
        offers = self.arena.offers
        mend(self.arena, given_ids)
        # Once it is ours nobody else changes what it was offered for.
        is_ours = self.arena.words.load(given_ids) == passed_to(offers.own[given_ids], self.slot)
        is_for_it = offers.source_ids[given_ids] == block_ids.astype(np.uint64)
        is_for_it &= offers.source[given_ids] == self._known[block_ids]
        is_given: NDArray[np.bool_] = is_ours & is_for_it
        return is_given

    def _note(self, given_ids: Ids, came_ids: Ids) -> None:
        went, came = map(BlockId, given_ids.tolist()), map(BlockId, came_ids.tolist())
        self._exchanges.extend(zip(went, came, strict=True))


def _withdrawn() -> KvChanged:
    return KvChanged("this worker gave up the blocks that it had offered")


def mend(arena: Arena, given_ids: Ids | None = None) -> None:
    """End the exchanges that were decided, and whose takers may be dead: of these offered blocks.

    Whoever holds the gate alone may leave them out: then it is all of them, and no taker lives.
    """
    granted, offers = arena.num_granted, arena.offers
    if given_ids is None:
        given_ids = np.flatnonzero(offers.own[:granted])
    own = offers.own[given_ids]
    is_open = (own != 0) & (arena.words.load(given_ids) == own)
    given_ids, own = given_ids[is_open], own[is_open]
    if not len(given_ids):
        return
    fence()
    lead_ids, lead = offers.lead_ids[given_ids], offers.lead[given_ids]
    source_ids, source = offers.source_ids[given_ids], offers.source[given_ids]
    # Its taker may live, and write another offer there: what was read is of one offer only
    # where that is the same before and after.
    fence()
    is_whole = offers.own[given_ids] == own
    given_ids, own, takers = given_ids[is_whole], own[is_whole], slots_of(own[is_whole])
    lead_ids, lead = lead_ids[is_whole].astype(np.int64), lead[is_whole]
    source_ids, source = source_ids[is_whole].astype(np.int64), source[is_whole]
    was_taken = arena.words.load(lead_ids) == passed_to(lead, takers)
    given_ids, own, takers = given_ids[was_taken], own[was_taken], takers[was_taken]
    source_ids, source = source_ids[was_taken], source[was_taken]
    # In this order: while the offered block stays, whoever comes after us sees what is left to do.
    arena.words.swap(source_ids, source, passed_to(source, takers))
    is_theirs = arena.words.load(source_ids) == passed_to(source, takers)
    arena.words.swap(
        given_ids[is_theirs], own[is_theirs], passed_to(own, slots_of(source))[is_theirs]
    )


@contextlib.contextmanager
def _slot_claimed(arena: Arena, worker_id: WorkerId) -> Iterator[int]:
    """Hold the gate alone, once every process of the last worker of this name has ended."""
    deadline = Deadline.after(SLOT_TIMEOUT_S)
    while True:
        try:
            with arena.gate(alone=True, timeout_s=GATE_TIMEOUT_S):
                yield arena.claim_slot(worker_id)
                return
        except SlotHeld:
            if deadline.has_passed():
                raise
        sleep_s(_SLOT_POLL_S)


def _advance_all_of(arena: Arena, slot: int) -> Ids:
    """Raise the generation of each of a slot's blocks: what was promised of them is over."""
    everything = np.arange(arena.num_granted, dtype=np.int64)
    words = arena.words.load(everything)
    ids: Ids = everything[slots_of(words) == slot]
    arena.words.swap(ids, words[ids], passed_to(words[ids], slot))
    return ids
