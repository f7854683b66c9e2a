"""The two ends of `handover_model`: the steps of `kv/ownership.py`, one memory access at a time.

    x = yield Access("load", block)        and so on; the model answers

Blocks and slots are small numbers and letters. `Bugs` takes protections out, one at a time: the
model must notice each.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

Word = tuple[str, int]  # owner, generation
Steps = Generator["Access", Any, Any]


class Access(NamedTuple):
    """One access to what both ends share. `args` are the accesses' own."""

    kind: str
    args: tuple[Any, ...] = ()


def _ask(kind: str, *args: Any) -> Access:
    return Access(kind, args)


class Offer(NamedTuple):
    own: Word
    source_id: int
    source: Word
    lead_id: int
    lead: Word


class Bugs(NamedTuple):
    """Protections that are left out."""

    stores_lead: bool = False  # in take: set it, whatever is there
    gives_first: bool = False  # in take: the peer's blocks before the lead
    takes_without_gate: bool = False
    takes_what_was_retired: bool = False  # does not look whether its own offer still stands
    retires_in_order: bool = False  # the lead last
    trusts_words: bool = False  # retires from the word that stands there, not the known one
    looks_late: bool = False  # offers its blocks under their words of when it takes
    forgets_others: bool = False  # does not end what a dead taker has begun
    mends_given_first: bool = False  # the offered block before the taken one
    mends_old_offers: bool = False  # does not compare the offered block's word
    joins_without_mending: bool = False
    joins_without_advancing: bool = False


NO_BUGS = Bugs()
NO_OFFER = Offer(("", 0), -1, ("", 0), -1, ("", 0))
BLOCKS_AT_FIRST: dict[str, Sequence[int]] = {"P": (0, 1, 2), "D": (3, 4)}
_NUM_BLOCKS = 5


def _passed(word: Word, slot: str) -> Word:
    return slot, word[1] + 1


class _Books:
    """What one process knows: its words, and which of its blocks serve which group."""

    def __init__(self, slot: str, known: dict[int, Word]) -> None:
        self.slot = slot
        self.known = known
        self.groups: dict[int, list[int]] = {}  # by promise: the blocks that it has for it

    def exchange(self, went: int, came: int, word: Word) -> None:
        """`came` is ours now, in the place of `went`."""
        del self.known[went]
        self.known[came] = word
        for blocks in self.groups.values():
            if went in blocks:
                blocks[blocks.index(went)] = came
                return


def prefill(slot: str, bugs: Bugs) -> Steps:
    """Promise blocks 0 and 1, then block 2; give both up, in either order, told or not."""
    books = _Books(slot, dict.fromkeys(BLOCKS_AT_FIRST[slot], (slot, 1)))
    for number, blocks in enumerate(([0, 1], [2])):
        for block in blocks:
            yield _ask("write", block, f"KV {number} of {block}")
        yield _ask("leave", *blocks)
        books.groups[number] = list(blocks)
        promised = tuple((block, books.known[block]) for block in blocks)
        yield _ask("promise", number, promised)
    first = yield _ask("choose", 0, 1)
    for number in (first, 1 - first):
        yield from _retire(books, number, bugs)
        blocks = books.groups.pop(number)
        yield _ask("use", *blocks)
        for block in blocks:
            yield _ask("write", block, "another request's")


def decode(slot: str, bugs: Bugs) -> Steps:
    """Take what is promised, for as many blocks of one's own; use it, and give it up."""
    books = _Books(slot, dict.fromkeys(BLOCKS_AT_FIRST[slot], (slot, 1)))
    for number in range(2):
        promise = yield _ask("hear promise", number)
        if promise is None:
            return
        _, promised = promise
        # The newest first: what came from P for the first group goes back for the second.
        own = sorted(books.known, key=lambda block: books.known[block][1])[::-1]
        given = [(block, books.known[block]) for block in own[: len(promised)]]
        yield _ask("leave", *(block for block, _ in given))
        books.groups[number] = [block for block, _ in given]
        contents = tuple(f"KV {number} of {block}" for block, _ in promised)
        seen = yield _ask("look", *(block for block, _ in promised))
        is_cancelled = (yield _ask("choose", "go on", "cancel")) == "cancel"
        if is_cancelled:
            yield from _retire(books, number, bugs)
            yield _ask("use", *books.groups[number])
        if bugs.looks_late:
            given = [(block, books.known[block]) for block, _ in given]
        was_taken = False
        if seen == contents:
            was_taken = yield from _take(books, promised, given, bugs)
        if was_taken:
            yield _ask("use", *books.groups[number])
            for (block, _), content in zip(promised, contents, strict=True):
                yield _ask("read", block, content)
                yield _ask("write", block, "an answer")
        if not is_cancelled:
            yield from _retire(books, number, bugs)
            yield _ask("use", *books.groups[number])
        del books.groups[number]


def join(slot: str, bugs: Bugs) -> Steps:
    """A process of this name starts again: all that the last one had is its own."""
    yield _ask("gate", True)
    if not bugs.joins_without_mending:
        yield from _mend(range(_NUM_BLOCKS), bugs)
    own = []
    for block in range(_NUM_BLOCKS):
        word = yield _ask("load", block)
        if word[0] == slot:
            own.append(block)
            if not bugs.joins_without_advancing:
                yield _ask("swap", block, word, _passed(word, slot))
    yield _ask("open gate")
    yield _ask("use", *own)
    for block in own:
        yield _ask("write", block, "after a restart")


def nothing(_slot: str, _bugs: Bugs) -> Steps:
    """A process that has nothing left to do."""
    yield from ()


def _take(
    books: _Books,
    promised: Sequence[tuple[int, Word]],
    given: Sequence[tuple[int, Word]],
    bugs: Bugs,
) -> Steps:
    slot, (lead_id, lead) = books.slot, promised[-1]
    is_offered = all(books.known.get(block) == word for block, word in given)
    if not is_offered and not bugs.takes_what_was_retired:
        return False
    if not bugs.takes_without_gate:
        yield _ask("gate", False)
    was_taken = yield from _take_gated(slot, lead_id, lead, promised, given, bugs)
    if was_taken:
        for (went, _), (came, word) in zip(given, promised, strict=True):
            books.exchange(went, came, _passed(word, slot))
    yield _ask("open gate")
    return was_taken


def _take_gated(
    slot: str,
    lead_id: int,
    lead: Word,
    promised: Sequence[tuple[int, Word]],
    given: Sequence[tuple[int, Word]],
    bugs: Bugs,
) -> Steps:
    for block, word in promised:
        if (yield _ask("load", block)) != word:
            return False
    for (own_id, own), (source_id, source) in zip(given, promised, strict=True):
        yield _ask("offer", own_id, Offer(own, source_id, source, lead_id, lead))
    if bugs.gives_first:
        for block, word in given:
            yield _ask("swap", block, word, _passed(word, lead[0]))
    if bugs.stores_lead:
        yield _ask("store", lead_id, _passed(lead, slot))
    elif not (yield _ask("swap", lead_id, lead, _passed(lead, slot))):
        return False
    for block, word in promised[:-1]:
        yield _ask("swap", block, word, _passed(word, slot))
    for block, word in given:
        yield _ask("swap", block, word, _passed(word, lead[0]))
    return True


def _retire(books: _Books, number: int, bugs: Bugs) -> Steps:
    """Give up what a group holds: afterwards its blocks in the books are its owner's to use."""
    slot = books.slot
    while True:
        blocks = list(books.groups[number])
        order = blocks if bugs.retires_in_order else [blocks[-1], *blocks[:-1]]
        kept = []
        for block in order:
            word = books.known[block]
            if bugs.trusts_words:
                found = yield _ask("load", block)
                word = found if found[0] == slot else word
            if (yield _ask("swap", block, word, _passed(word, slot))):
                books.known[block] = _passed(word, slot)
                kept.append(block)
            elif block == order[0]:
                break  # the lead is gone, and all the others with it
        if len(kept) == len(blocks):
            return
        for block in blocks:
            if block not in kept:
                yield from _receive(books, block, bugs)
        if books.groups[number] == blocks:
            yield _ask("lost")


def _receive(books: _Books, block: int, bugs: Bugs) -> Steps:
    """Own what came for a block that was taken."""
    came = yield _ask("read hint", block)
    if not (yield from _is_given(books, came, block, bugs)):
        for candidate in range(_NUM_BLOCKS):
            if (yield from _is_given(books, candidate, block, bugs)):
                came = candidate
                break
        else:
            return
    if came in books.known:
        yield from _receive(books, came, bugs)
    offer = yield _ask("read offer", came)
    books.exchange(block, came, _passed(offer.own, books.slot))


def _is_given(books: _Books, given_id: int, block: int, bugs: Bugs) -> Steps:
    if not bugs.forgets_others:
        yield from _mend([given_id], bugs)
    word = yield _ask("load", given_id)
    offer = yield _ask("read offer", given_id)
    return (
        word == _passed(offer.own, books.slot)
        and offer.source_id == block
        and offer.source == books.known[block]
    )


def _mend(given_ids: Sequence[int], bugs: Bugs) -> Steps:
    """End the exchanges that were decided, of these offered blocks. In the order of the code."""
    todo = []
    for given_id in given_ids:
        offer = yield _ask("read offer", given_id)
        if offer == NO_OFFER:
            continue
        if bugs.mends_old_offers or (yield _ask("load", given_id)) == offer.own:
            todo.append((given_id, offer))
    taken = []
    for given_id, offer in todo:
        if (yield _ask("load", offer.lead_id)) == _passed(offer.lead, offer.own[0]):
            taken.append((given_id, offer))
    if bugs.mends_given_first:
        for given_id, offer in taken:
            yield _ask("swap", given_id, offer.own, _passed(offer.own, offer.source[0]))
    for _, offer in taken:
        theirs = _passed(offer.source, offer.own[0])
        yield _ask("swap", offer.source_id, offer.source, theirs)
    for given_id, offer in taken:
        if (yield _ask("load", offer.source_id)) == _passed(offer.source, offer.own[0]):
            own = offer.own
            if bugs.mends_old_offers:
                own = yield _ask("load", given_id)
            yield _ask("swap", given_id, own, _passed(own, offer.source[0]))
