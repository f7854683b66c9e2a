"""Where KV of another layout arrives before it is placed into the pool: bounded, reused memory.

Allocated and touched once, when the first peer needs it. Whoever finds no room waits in the
order of asking, so that a large request is not overtaken for ever; and not beyond a deadline.
What was taken without asking, ahead of need, is recalled for those that wait.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap

import numpy as np

from neuron_di.core.require import require
from neuron_di.errors import CapacityError, ConfigError, NeuronDiError
from neuron_di.kv import Memory
from neuron_di.obs import get_logger
from neuron_di.transfer.lanes import LaneSet
from neuron_di_bindings import shared_memory

_log = get_logger(__name__)

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Room:
    """A part of the landing memory, one transfer's: `memory`, from byte `start` of `whole`.

    While anybody has it, the memory is there, whether the Landing was closed or not.
    """

    start: int
    memory: Memory
    whole: Memory
    view: mmap = field(repr=False, compare=False)


@dataclass(slots=True, eq=False)
class Ask:
    """A transfer that waits for room."""

    num_bytes: int
    on_answer: Callable[[Room | NeuronDiError], None]
    overdue: asyncio.TimerHandle | None = None


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


class Landing:
    """Lives on the event loop. `lanes` are told of the memory once it is there.

    It may be opened larger than `size_bytes`, up to `size_bytes_max`.
    """

    def __init__(self, lanes: LaneSet, size_bytes: int, size_bytes_max: int = 0) -> None:
        self._lanes = lanes
        self.size_bytes = _whole_pages(size_bytes)
        self._size_bytes_max = max(self.size_bytes, size_bytes_max // _PAGE * _PAGE)
        self._is_open = self._is_closed = False
        self._lock = asyncio.Lock()
        self._view: mmap | None = None
        self._memory: Memory | None = None
        self._free = [(0, self.size_bytes)]  # [start, end), in order, none touching another
        self._taken: dict[int, int] = {}  # start to end
        self._waiting: deque[Ask] = deque()
        self._lent: dict[int, Callable[[], None]] = {}  # start to who recalls it, as taken
        self._recalled: set[int] = set()  # starts of what will be freed soon
        self._is_serving = False

    async def open(self, wanted_bytes: int = 0) -> None:
        """Allocate it, unless it is there. ConfigError when the memory cannot be had.

        `wanted_bytes` is what the largest prompt takes. What is there does not grow.
        """
        async with self._lock:
            if not self._is_open:
                loop = asyncio.get_running_loop()
                self._is_open = await loop.run_in_executor(None, self._open, wanted_bytes)
        if wanted_bytes > self.size_bytes:
            _log.warning("landing_small", num_bytes=self.size_bytes, wanted_bytes=wanted_bytes)

    def _open(self, wanted_bytes: int) -> bool:
        if self._memory is None:
            wanted_bytes = min(_whole_pages(wanted_bytes), self._size_bytes_max)
            memory = self._allocate(max(self.size_bytes, wanted_bytes))
            if self._is_closed:  # meanwhile: nobody would give it back
                self._view = None
                raise ConfigError("the landing memory is closed")
            self.size_bytes = memory.num_bytes
            self._free = [(0, self.size_bytes)]
            self._memory = memory  # last: the event loop takes room as soon as it is there
            _log.info("landing_opened", num_bytes=self.size_bytes)
        self._lanes.register(self._memory)
        return True

    def _allocate(self, size_bytes: int) -> Memory:
        try:
            self._view = shared_memory.create_private(size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"cannot allocate {size_bytes} bytes of landing memory: {error}; give less with "
                "--landing-memory"
            ) from None
        return Memory(np.frombuffer(self._view, np.uint8).ctypes.data, size_bytes)

    def ask(
        self, num_bytes: int, timeout_s: float, on_answer: Callable[[Room | NeuronDiError], None]
    ) -> Ask:
        """Room for this many bytes: `on_answer` gets it, at once or later, or why there is none.

        CapacityError at once for more than there ever is: another decode worker may have more, or
        need none. CapacityError, too, when the wait was too long.
        """
        num_bytes = max(_PAGE, _whole_pages(num_bytes))
        ask = Ask(num_bytes, on_answer)
        if num_bytes > self.size_bytes:
            on_answer(
                CapacityError(
                    f"the KV of this prompt takes {num_bytes} bytes of landing memory, the decode "
                    f"worker has {self.size_bytes}: raise --landing-memory"
                )
            )
        else:
            self._waiting.append(ask)
            self._serve()
            if ask in self._waiting:
                loop = asyncio.get_running_loop()
                ask.overdue = loop.call_later(timeout_s, self._give_up, ask)
        return ask

    def take(self, num_bytes: int, recall: Callable[[], None]) -> Room | None:
        """Room for this many bytes, if there is some that nobody waits for.

        Until keep(), `recall` is called when somebody does: it gives the room up, at once or when
        nothing writes to it any more.
        """
        num_bytes = max(_PAGE, _whole_pages(num_bytes))
        start = None if self._waiting or self._memory is None else self._fit(num_bytes)
        if start is None:
            return None
        self._lent[start] = recall
        return self._room(start, num_bytes)

    def keep(self, room: Room) -> None:
        """Who took it needs it now: it is not recalled any more."""
        self._lent.pop(room.start, None)

    def cancel(self, ask: Ask) -> None:
        """It is not wanted any more. Nothing where it was answered."""
        if ask in self._waiting:
            self._waiting.remove(ask)
            if ask.overdue is not None:
                ask.overdue.cancel()
            self._serve()

    def free(self, room: Room) -> None:
        """Give it back: nothing writes to it, or reads from it, any more."""
        end = self._taken.pop(room.start, None)
        require(end is not None, "landing memory is freed that is not taken")
        assert end is not None
        self._lent.pop(room.start, None)
        self._recalled.discard(room.start)
        starts = [start for start, _ in self._free]
        place = int(np.searchsorted(starts, room.start)) if starts else 0
        self._free.insert(place, (room.start, end))
        self._join(place)
        self._serve()

    def check_integrity(self) -> None:
        """LocalProtocolError unless free and taken parts are all of it, each byte once."""
        parts = sorted([*self._free, *self._taken.items()])
        at = 0
        for start, end in parts:
            require(start == at and end > start, f"landing memory is torn at {at}")
            at = end
        require(at == self.size_bytes, "landing memory is lost at its end")
        gaps = zip(self._free, self._free[1:], strict=False)
        require(all(one[1] < other[0] for one, other in gaps), "free landing memory is in pieces")

    @property
    def num_bytes_open(self) -> int:
        """0 where no peer needed it yet."""
        return self.size_bytes if self._is_open else 0

    @property
    def num_bytes_asked(self) -> int:
        """Taken now, or waited for."""
        taken = sum(end - start for start, end in self._taken.items())
        return taken + sum(ask.num_bytes for ask in self._waiting)

    def close(self) -> None:
        """Give the memory back. After the transfer engines were closed."""
        self._is_open, self._is_closed = False, True
        self._memory = None
        self._view = None  # the map goes with it, and with the last room

    def _serve(self) -> None:
        """Give room to those that wait, in order, as long as there is some for the first."""
        assert self._memory is not None or not self._waiting, "open() comes first"
        if self._is_serving:  # who is recalled frees, and who is answered may ask: it is seen below
            return
        self._is_serving = True
        try:
            self._serve_waiting()
        finally:
            self._is_serving = False

    def _serve_waiting(self) -> None:
        while self._waiting and self._memory is not None:
            ask = self._waiting[0]
            start = self._fit(ask.num_bytes)
            if start is None:
                if not self._recall(ask.num_bytes):
                    return
                continue  # it may be free by now, and given to somebody
            self._waiting.popleft()
            if ask.overdue is not None:
                ask.overdue.cancel()
            ask.on_answer(self._room(start, ask.num_bytes))

    def _recall(self, num_bytes: int) -> bool:
        """One more room that nobody needs yet, the youngest; False: there is none, or so many
        bytes will be free soon anyway.
        """
        if not self._lent or sum(self._taken[s] - s for s in self._recalled) >= num_bytes:
            return False
        start, recall = self._lent.popitem()
        self._recalled.add(start)
        recall()
        return True

    def _room(self, start: int, num_bytes: int) -> Room:
        whole, view = self._memory, self._view
        assert whole is not None, "there is no room before it was opened"
        assert view is not None, "it was opened"
        return Room(start, Memory(whole.address + start, num_bytes), whole, view)

    def _fit(self, num_bytes: int) -> int | None:
        """Take the first part that is large enough."""
        for place, (start, end) in enumerate(self._free):
            if end - start >= num_bytes:
                taken_end = start + num_bytes
                self._free[place : place + 1] = [(taken_end, end)] if taken_end < end else []
                self._taken[start] = taken_end
                return start
        return None

    def _join(self, place: int) -> None:
        """Make one of a free part and the free parts that it touches."""
        start, end = self._free[place]
        first = last = place
        if place > 0 and self._free[place - 1][1] == start:
            first, start = place - 1, self._free[place - 1][0]
        if place + 1 < len(self._free) and self._free[place + 1][0] == end:
            last, end = place + 1, self._free[place + 1][1]
        self._free[first : last + 1] = [(start, end)]

    def _give_up(self, ask: Ask) -> None:
        self.cancel(ask)
        ask.on_answer(
            CapacityError(
                "no landing memory became free in time at this decode worker; --landing-memory "
                "gives it more"
            )
        )
