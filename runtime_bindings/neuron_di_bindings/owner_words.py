"""Who owns each block of memory that several processes map: one 64-bit word per block.

    bits 63..56   the owner's slot; 0: nobody
    bits 55..0    the generation: +1 at every change

A word changes by compare-and-swap only, and never has the same value twice. So whoever knows the
word of a block and swaps it successfully knows that nobody had the block in between.
"""

import numpy as np
from numpy.typing import NDArray

try:
    from neuron_di_bindings import _owner_words
except ImportError:  # Python alone cannot swap: then no arena can be opened
    _owner_words = None  # type: ignore[assignment]

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]

SLOT_SHIFT = 56
SLOTS = 256
GENERATION_MAX = (1 << SLOT_SHIFT) - 1


def is_available() -> bool:
    """Whether this installation has the compiled part."""
    return _owner_words is not None


def open_map(fd: int, num_bytes: int, *, is_writable: bool) -> memoryview:
    """A file's memory, as long as it may ever become. Behind its end nothing may be touched.

    Unmapped when the last object that shows it is gone. OSError when it cannot be mapped.
    """
    return memoryview(_owner_words.Map(fd, num_bytes, is_writable))


def populate(view: memoryview, offset: int, num_bytes: int) -> None:
    """Make these bytes of a map present. OSError when the memory is not there."""
    owner = view.obj
    assert isinstance(owner, _owner_words.Map), "the view of a map"
    owner.populate(offset, num_bytes)


def release(fd: int, offset: int, num_bytes: int) -> None:
    """Give a part of a file's memory back: it reads as zeros from now on."""
    _owner_words.release(fd, offset, num_bytes)


def fence() -> None:
    """What this thread reads and writes before comes before what is after, for every process.

    x86 keeps plain reads in their order by itself, and plain writes in theirs; ARM does not.
    """
    _owner_words.fence()


def word(slot: int, generation: int) -> int:
    assert 0 <= slot < SLOTS, "8 bits"
    assert 0 <= generation <= GENERATION_MAX, "56 bits"
    return slot << SLOT_SHIFT | generation


def slots_of(words: Words) -> NDArray[np.int64]:
    slots: NDArray[np.int64] = (words >> np.uint64(SLOT_SHIFT)).astype(np.int64)
    return slots


def generations_of(words: Words) -> NDArray[np.int64]:
    generations: NDArray[np.int64] = (words & np.uint64(GENERATION_MAX)).astype(np.int64)
    return generations


def passed_to(words: Words, slots: "int | NDArray[np.int64]") -> Words:
    """What these words become when their blocks go to `slots`."""
    generations = (words & np.uint64(GENERATION_MAX)) + np.uint64(1)
    return np.asarray(slots, np.uint64) << np.uint64(SLOT_SHIFT) | generations


class OwnerWords:
    """The words of one arena, as this process has them mapped."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def load(self, ids: Ids) -> Words:
        """The words of these blocks, each read at once. IndexError: no such block."""
        found = np.empty(len(ids), np.uint64)
        _owner_words.load(self._words, np.ascontiguousarray(ids, np.int64), found)
        return found

    def swap(self, ids: Ids, expected: Words, desired: Words) -> NDArray[np.bool_]:
        """Compare and swap each, in order. Which were as expected, and are as desired now."""
        swapped = np.zeros(len(ids), np.bool_)
        _owner_words.swap(
            self._words,
            np.ascontiguousarray(ids, np.int64),
            np.ascontiguousarray(expected, np.uint64),
            np.ascontiguousarray(desired, np.uint64),
            swapped,
        )
        return swapped

    def store(self, ids: Ids, words: Words) -> None:
        """Set words of blocks that nobody else may know yet."""
        self._words[ids] = words
