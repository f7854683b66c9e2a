"""One memory for the KV pools of several workers of this host: blocks change owner in it.

    offset 0        header: magic, the arena's id, and, set by the first worker that joins, the
                    blocks' geometry, how many there can be, and how many were granted
    4096            slots[256]: which worker, and its incarnation; slot 0 is nobody
    words_offset    owner words[blocks_max]        (neuron_di_bindings.owner_words)
    ...             offers[blocks_max], hints[blocks_max]
    data_offset     kv_NRLCKSD, one block after the other

An empty memfd, which its maker gives to its children. It grows as workers join and never shrinks;
each maps as much as it may ever become, so no address changes. What is granted is never taken
back: when a worker ends, its blocks wait for the next one of its name.

Two locks, both let go of by the kernel when their holder dies. The *gate* is shared by whoever
takes blocks, and held alone by whoever joins, leaves or mends. A slot's lock is held for as long
as its worker lives, so that nobody takes over the blocks of one that does. The gate is locked
through an open file of its own, which no rank of a worker ever gets.

Next: neuron_di/kv/ownership.py
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from neuron_di.clock import Deadline, sleep_s
from neuron_di.errors import PeerGone
from neuron_di.kv.layout import KvLayout
from neuron_di.kv.runs import neighbours
from neuron_di.types import Incarnation, WorkerId
from neuron_di_bindings import owner_words
from neuron_di_bindings.owner_words import Ids, OwnerWords, Words

PAGE = 4096
BLOCKS_MAX = 1 << 24
GATE_TIMEOUT_S = 5.0  # to join; whoever holds the gate needs microseconds
_GATE_POLL_S = 0.001
MAPPING_S = 1.0  # what is not mapped by then is when it is touched
_MAPPED_BYTES = 16 << 20  # at a time
_MAGIC = b"NDIARENA"
_HEADER = struct.Struct(
    "<8s32s32sQQQ"
)  # magic, id, layout digest, block bytes, blocks max, granted
_GRANTED_OFFSET = _HEADER.size - 8
_SLOT = struct.Struct("<32s32s64x")  # SHA-256 of the worker's id, incarnation
_SLOTS_OFFSET = PAGE
_WORDS_OFFSET = _SLOTS_OFFSET + owner_words.SLOTS * _SLOT.size
_FLOCK = "@hhqqi4x"  # struct flock: type, whence, start, length, process
_WORDS_PER_BLOCK = 7  # the owner word, an offer of five, a hint


class NoArena(Exception):
    """Raised when a worker cannot have its pool in the arena: it makes one of its own."""


class SlotHeld(NoArena):
    """Raised when a process of the slot's last worker lives: it may be about to end."""


def create_arena() -> int:
    """An empty arena. The caller owns the descriptor, and lets its children inherit it."""
    fd = os.memfd_create("neuron-di-kv-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    # No reader of a block may find the file cut off behind it.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    header = _HEADER.pack(_MAGIC, secrets.token_hex(16).encode(), b"", 0, 0, 0)
    os.pwrite(fd, header, 0)
    return fd


def is_settled(fd: int) -> bool:
    """Whether a worker has joined the arena: now only blocks like its own fit."""
    try:
        return bool(_read_header(fd)[4])
    except (NoArena, OSError):
        return False


@dataclass(frozen=True, slots=True)
class Offers:
    """What each block was offered for, written by its owner before it takes the other block.

    `own` is the offered block's word then: whoever finds another one in its place knows that the
    offer is over. `lead` is the block whose swap decides for the whole group.
    """

    own: Words
    source_ids: Words
    source: Words
    lead_ids: Words
    lead: Words


def _space(blocks_max: int, block_bytes: int) -> tuple[int, int]:
    """(where the blocks begin, how large the file may become)."""
    tables = _WORDS_OFFSET + blocks_max * 8 * _WORDS_PER_BLOCK
    data_offset = -(-tables // PAGE) * PAGE
    return data_offset, data_offset + blocks_max * block_bytes


class Arena:
    """An arena as this process has it mapped. Its tables are changed by `Ownership` only."""

    def __init__(self, fd: int, gate_fd: int = -1, *, is_writable: bool = True) -> None:
        self._fd, self._gate_fd = fd, gate_fd
        magic, arena_id, layout_digest, block_bytes, blocks_max, _ = _read_header(fd)
        self.block_bytes: int = block_bytes
        self.blocks_max: int = blocks_max
        if magic != _MAGIC or not 0 < self.blocks_max <= BLOCKS_MAX or not self.block_bytes:
            raise NoArena("it is no arena")
        self.id: str = arena_id.decode()
        self.layout_digest: str = layout_digest.decode()
        self.data_offset, max_bytes = _space(self.blocks_max, self.block_bytes)
        if os.fstat(fd).st_size < self.data_offset:
            raise NoArena("its tables are cut off")
        view = owner_words.open_map(fd, max_bytes, is_writable=is_writable)
        count = self.blocks_max * _WORDS_PER_BLOCK
        tables = np.frombuffer(view, np.uint64, count=count, offset=_WORDS_OFFSET)
        self._show(view, tables.reshape(_WORDS_PER_BLOCK, self.blocks_max))
        self._granted: Words = np.frombuffer(view, np.uint64, 1, _GRANTED_OFFSET)
        self._num_held = 0  # so many blocks the file held when it was last looked at
        self.address = int(tables.ctypes.data) - _WORDS_OFFSET + self.data_offset

    def _show(self, view: memoryview, tables: Words) -> None:
        self.view = view
        self.raw_words: Words = tables[0]
        self.words = OwnerWords(tables[0])
        self.offers = Offers(*tables[1:6])
        self.hints: Words = tables[6]  # which block was given for this one, last

    @classmethod
    def open(cls, fd: int, layout: KvLayout, memory_bytes: int) -> Self:
        """Map the arena that `fd` is open on, which stays the caller's. NoArena: not for this one.

        The first to come settles the geometry: no more blocks than `memory_bytes` hold.
        """
        if not owner_words.is_available():
            raise NoArena("owner_words was not compiled")
        with contextlib.ExitStack() as undo:
            try:
                # Open files of its own: an inherited descriptor's locks are its maker's.
                own_fd, gate_fd = (_reopened(fd, undo) for _ in range(2))
                with _flocked(gate_fd, fcntl.LOCK_EX, GATE_TIMEOUT_S):
                    _settle_geometry(own_fd, layout, memory_bytes)
                arena = cls(own_fd, gate_fd)
            except OSError as error:
                raise NoArena(f"it cannot be mapped: {error}") from None
            if (arena.layout_digest, arena.block_bytes) != (layout.digest(), layout.block_bytes):
                raise NoArena("its blocks have another layout")
            undo.pop_all()
        return arena

    @classmethod
    def open_peer(cls, pid: int, fd: int) -> Self:
        """Map the arena in which a process of this host has its pool, read-only. PeerGone."""
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if not os.readlink(path).startswith("/memfd:"):
                raise PeerGone(f"descriptor {fd} of process {pid} is not shared memory")
            own_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise PeerGone(f"cannot map the KV pool of process {pid}: {error}") from None
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, own_fd)
            try:
                seals = fcntl.fcntl(own_fd, fcntl.F_GET_SEALS)
                if not stat.S_ISREG(os.fstat(own_fd).st_mode) or not seals & fcntl.F_SEAL_SHRINK:
                    raise PeerGone(f"the KV pool of process {pid} may shrink")
                arena = cls(own_fd, is_writable=False)
                if arena.num_granted < int(arena._granted[0]):
                    raise PeerGone(f"the KV pool of process {pid} is cut off")
            except (NoArena, OSError, OverflowError, ValueError, struct.error) as error:
                raise PeerGone(f"cannot map the KV pool of process {pid}: {error}") from None
            weakref.finalize(arena, undo.pop_all().close)  # nobody else closes it
        return arena

    @property
    def fd(self) -> int:
        """Other processes that write to this worker's blocks get a duplicate: then the lock on its
        slot is held until the last of them has ended."""
        return self._fd

    @property
    def num_granted(self) -> int:
        """Blocks 0 to this exist, whoever owns them. What lies behind must not be touched.

        Whatever others may write there, the map and the file hold them, and neither shrinks.
        """
        granted = int(self._granted[0])
        if granted > self._num_held:  # a file grows before what is granted does
            num_bytes = os.fstat(self._fd).st_size - self.data_offset
            self._num_held = num_bytes // self.block_bytes
        return min(granted, self._num_held, self.blocks_max)

    def grant(self, count: int, word: int) -> Ids:
        """So many blocks that did not exist, all with this word. The caller holds the gate alone.

        NoArena: there is no room.
        """
        first = self.num_granted
        if count > self.blocks_max - first:
            raise NoArena(f"it holds at most {self.blocks_max} blocks")
        size = self.data_offset + (first + count) * self.block_bytes
        try:
            if os.fstat(self._fd).st_size < size:
                os.ftruncate(self._fd, size)
        except OSError as error:
            raise NoArena(f"it cannot grow: {error}") from None
        ids = np.arange(first, first + count, dtype=np.int64)
        self.words.store(ids, np.full(count, word, np.uint64))
        self._granted[0] = first + count  # who dies before this has granted nothing
        return ids

    def populate(self, ids: Ids) -> None:
        """Make the memory of these blocks present. OSError when it is not there."""
        for start, count in neighbours(ids):
            offset = self.data_offset + start * self.block_bytes
            owner_words.populate(self.view, offset, count * self.block_bytes)

    def map_blocks_of(self, slot: int, incarnation: Incarnation) -> None:
        """Have another worker's blocks mapped page by page before they are wanted: the first touch
        of a page costs more than its copy. As many as there is time for.
        """
        deadline = Deadline.after(MAPPING_S)
        if not (view := self.view):  # closed; from now on that takes nothing away
            return
        owners = owner_words.slots_of(self.raw_words[: self.num_granted])
        for first, count in neighbours(np.flatnonzero(owners == slot)):
            start, end = (self.data_offset + n * self.block_bytes for n in (first, first + count))
            for offset in range(start, end, _MAPPED_BYTES):
                # Who leaves gives its memory back, and reading that would take it anew.
                if deadline.has_passed() or self.incarnation_of(slot, view) != incarnation:
                    return
                with contextlib.suppress(OSError):
                    owner_words.populate(view, offset, min(_MAPPED_BYTES, end - offset))

    def release(self, ids: Ids) -> None:
        """Give the memory of these blocks back: they read as zeros."""
        for start, count in neighbours(ids):
            offset = self.data_offset + start * self.block_bytes
            owner_words.release(self._fd, offset, count * self.block_bytes)

    def gate(self, *, alone: bool, timeout_s: float) -> contextlib.AbstractContextManager[None]:
        """Hold the gate. NoArena when it is not free in time."""
        return _flocked(self._gate_fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, timeout_s)

    # Slots. All but `incarnation_of` under the gate, alone.

    def claim_slot(self, worker_id: WorkerId) -> int:
        """The slot of this worker, from now on and until close(). NoArena: it is not to be had."""
        name = hashlib.sha256(worker_id.encode()).digest()
        slot = self._slot_named(name) or self._slot_named(bytes(32))
        if not slot:
            raise NoArena("all of its slots are taken")
        if not _lock_bytes(self._fd, fcntl.F_WRLCK, slot, 1):
            raise SlotHeld("a worker of this name has its pool there")
        _SLOT.pack_into(self.view, _SLOTS_OFFSET + slot * _SLOT.size, name, b"")
        return slot

    def bytes_left_to(self, worker_id: WorkerId) -> int:
        """Memory of blocks that the next worker of this name finds: 0 while the last one lives."""
        slot = self._slot_named(hashlib.sha256(worker_id.encode()).digest())
        if not slot or self.is_held(slot):
            return 0
        owners = owner_words.slots_of(self.raw_words[: self.num_granted])
        return sum(
            _present_bytes(self._fd, self.data_offset + start * self.block_bytes, size)
            for start, count in neighbours(np.flatnonzero(owners == slot))
            if (size := count * self.block_bytes)
        )

    def set_incarnation(self, slot: int, incarnation: str) -> None:
        """Whose blocks the slot's are now; empty: they are nobody's to offer."""
        name = self._slot(slot)[0]
        row = _SLOTS_OFFSET + slot * _SLOT.size
        _SLOT.pack_into(self.view, row, name, incarnation.encode())

    def incarnation_of(self, slot: int, view: memoryview | None = None) -> Incarnation:
        """Empty where no worker has the slot."""
        return Incarnation(self._slot(slot, view)[1].rstrip(b"\0").decode(errors="replace"))

    def is_held(self, slot: int) -> bool:
        """Whether a process of this slot's worker lives, another than this one."""
        lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, lock)
        kind: int = struct.unpack(_FLOCK, found)[0]
        return kind != fcntl.F_UNLCK

    def slot_of(self, incarnation: Incarnation) -> int:
        """0 where no worker of this incarnation is here."""
        slots = range(1, owner_words.SLOTS) if incarnation else ()
        return next((slot for slot in slots if self.incarnation_of(slot) == incarnation), 0)

    def close(self) -> None:
        """Let go of the slot, and of the map, which goes with the last tensor that shows it."""
        if self._fd >= 0:
            self._show(memoryview(b""), np.zeros((_WORDS_PER_BLOCK, 0), np.uint64))
            self._granted = np.zeros(1, np.uint64)
            _lock_bytes(self._fd, fcntl.F_UNLCK, 0, owner_words.SLOTS)  # a map keeps the file open
            os.close(self._fd)
            os.close(self._gate_fd)
            self._fd = self._gate_fd = -1

    def _slot_named(self, name: bytes) -> int:
        """0 where there is none."""
        slots = range(1, owner_words.SLOTS)
        return next((slot for slot in slots if self._slot(slot)[0] == name), 0)

    def _slot(self, slot: int, view: memoryview | None = None) -> tuple[bytes, bytes]:
        name, incarnation = _SLOT.unpack_from(view or self.view, _SLOTS_OFFSET + slot * _SLOT.size)
        return name, incarnation


def _read_header(fd: int) -> tuple[bytes, bytes, bytes, int, int, int]:
    head = os.pread(fd, _HEADER.size, 0)
    if len(head) < _HEADER.size:
        raise NoArena("it is no arena")
    magic, arena_id, layout_digest, block_bytes, blocks_max, granted = _HEADER.unpack(head)
    return magic, arena_id, layout_digest, block_bytes, blocks_max, granted


def _settle_geometry(fd: int, layout: KvLayout, memory_bytes: int) -> None:
    magic, arena_id, _, _, blocks_max, granted = _read_header(fd)
    if magic != _MAGIC:
        raise NoArena("it is no arena")
    if blocks_max:
        return
    blocks_max = min(BLOCKS_MAX, max(1, memory_bytes // layout.block_bytes))
    os.ftruncate(fd, _space(blocks_max, layout.block_bytes)[0])
    digest = layout.digest().encode()
    header = _HEADER.pack(_MAGIC, arena_id, digest, layout.block_bytes, blocks_max, granted)
    os.pwrite(fd, header, 0)


def _present_bytes(fd: int, start: int, size: int) -> int:
    """How much of a part of a file takes memory."""
    present, end = 0, start + size
    while start < end:
        try:
            first = os.lseek(fd, start, os.SEEK_DATA)
        except OSError:  # nothing comes any more
            break
        start = min(os.lseek(fd, first, os.SEEK_HOLE), end)
        present += max(0, start - first)
    return present


def _reopened(fd: int, undo: contextlib.ExitStack) -> int:
    own_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    undo.callback(os.close, own_fd)
    return own_fd


@contextlib.contextmanager
def _flocked(fd: int, kind: int, timeout_s: float) -> Iterator[None]:
    deadline = Deadline.after(timeout_s)
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if deadline.has_passed():
                raise NoArena("another worker holds its gate") from None
            sleep_s(_GATE_POLL_S)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _lock_bytes(fd: int, kind: int, start: int, count: int) -> bool:
    """Lock these bytes of the file, or unlock them. False: another open file has them locked.

    A lock ends with the open file, which ends with the last descriptor and the last map of it.
    """
    lock = struct.pack(_FLOCK, kind, os.SEEK_SET, start, count, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
    except (BlockingIOError, PermissionError):
        return False
    return True
