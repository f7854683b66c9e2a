"""Work for a core that runs later, in order: reads, writes, copies and models.

nrt_async.h has two generations, which differ in how an error comes back and in where the core is
named (see `functions.py`). The loaded library decides, by what it has.

So far this has run on a simulator of libnrt only.
"""

import contextlib
import ctypes
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from neuron_di_bindings.nrt.buffers import (
    Readable,
    Writable,
    address_of,
    bytes_of,
    writable_bytes_of,
)
from neuron_di_bindings.nrt.handle import Handle
from neuron_di_bindings.nrt.model import NrtModel, TensorSet
from neuron_di_bindings.nrt.status import NrtMisuse, NrtStatus, NrtUnsupported, error_of
from neuron_di_bindings.nrt.structs import AsyncErrorStruct
from neuron_di_bindings.nrt.tensor import NrtTensor

if TYPE_CHECKING:
    from neuron_di_bindings.nrt.runtime import NrtRuntime


_NOT_SCHEDULED = 2**64 - 1  # the library has written no sequence number


class Unit(Enum):
    """What of a core works. The numbers are those of both generations (nrt_async.h: nrta_xu_t);
    in the later one a single unit reads, writes and copies."""

    TENSOR_READ = (0, 0)
    TENSOR_WRITE = (1, 0)
    TENSOR_OP = (2, 0)
    COMPUTE = (3, 1)
    COLLECTIVES = (4, 2)

    def number(self, generation: int) -> int:
        """Of this unit, in generation 2 or 3."""
        return self.value[generation - 2]


@dataclass(slots=True, eq=False)
class _Work:
    """Something that was scheduled, and all that stays where it is until it is over."""

    function: str
    memory: object
    handles: list[Handle] = field(default_factory=list)
    sequence: ctypes.c_uint64 = field(default_factory=lambda: ctypes.c_uint64(_NOT_SCHEDULED))
    # In 3.0 the library writes it at the end. As AWS's own client has it, it starts as a success.
    status: ctypes.c_int = field(default_factory=lambda: ctypes.c_int(NrtStatus.SUCCESS))
    is_over: bool = False

    def hold(self, handle: Handle) -> None:
        handle.hold()
        self.handles.append(handle)

    def let_go(self) -> None:
        while self.handles:
            self.handles.pop().release()
        self.memory = None


class Pending:
    """Something that was scheduled. Its queue keeps all that it works with until it is over, and
    whoever forgets a Pending loses nothing but the result. Any thread may ask."""

    def __init__(self, queue: "AsyncQueue", work: _Work) -> None:
        self._queue = queue
        self._work = work

    @property
    def sequence(self) -> int:
        """The library's number: 16 bits of the unit, 48 that count."""
        return self._work.sequence.value

    def is_done(self) -> bool:
        """Whether it is over, well or not. Does not wait (nrt_async.h: nrta_is_completed)."""
        return self._queue.is_over(self._work)

    def result(self) -> None:
        """What it came to: nothing, or its NrtError. NrtMisuse before it is over."""
        if not self.is_done():
            raise NrtMisuse(f"{self._work.function}: its result is asked for before it is over")
        status = self._work.status.value
        if status != NrtStatus.SUCCESS:
            name = self._queue.runtime.library.status_name(status)
            raise error_of(self._work.function, status, name)

    def completion_fd(self) -> int | None:
        """A descriptor that is readable once it is over; the caller closes it, after that and not
        before: the library would write to whatever has its number by then. None where the library
        has no such thing (nrt_async.h: nrta_get_completion_handle, or
        nrta_event_register_seq_id_completion with an eventfd)."""
        return self._queue.completion_fd(self._work)


class AsyncQueue:
    """One queue of a core, as this process numbers cores. NrtUnsupported where the library has
    neither generation.

    What is scheduled runs in its unit's order: models among themselves, and reads, writes and
    copies among themselves (in 3.0) or each kind for itself (in 2.x). A full queue is NrtRetry, and
    nothing was scheduled. Host memory is kept until the work is over, and not to be touched until
    then. Any thread may call.
    """

    def __init__(self, runtime: "NrtRuntime", core: int, queue: int = 0) -> None:
        """In 2.x with a list for its errors (nrt_async.h: nrta_error_tracker_create)."""
        if runtime.library.async_api is None:
            raise NrtUnsupported("this libnrt has no asynchronous functions (nrta_*)")
        self.runtime = runtime
        self.core = core
        self.generation = runtime.library.async_api
        self._queue = queue
        self._lock = threading.Lock()
        self._working: deque[_Work] = deque()  # in the order in which they were scheduled
        self._errors: dict[int, int] = {}  # 2.x: of those that are working
        self._tracker: Handle | None = None
        self._is_closed = False
        if self.generation == 2:
            found = ctypes.c_void_p()
            runtime.call("nrta_error_tracker_create", core, ctypes.byref(found))
            label = f"the error tracker of core {core}"
            pointer = found.value or 0
            self._tracker = runtime.own(label, pointer, "nrta_error_tracker_destroy")
        runtime.queues.append(self)

    def read(self, tensor: NrtTensor, offset: int, into: Writable) -> Pending:
        """Schedule `NrtTensor.read` (nrt_async.h: nrta_tensor_read)."""
        memory = writable_bytes_of(into)
        tensor.check(offset, memory.nbytes)
        with tensor.handle.use() as pointer:
            place = (address_of(memory), pointer, offset, memory.nbytes, *self._of(tensor))
            return self._schedule("nrta_tensor_read", place, (tensor.handle,), memory)

    def write(self, tensor: NrtTensor, offset: int, data: Readable) -> Pending:
        """Schedule `NrtTensor.write` (nrt_async.h: nrta_tensor_write)."""
        memory = bytes_of(data)
        tensor.check(offset, memory.nbytes)
        with tensor.handle.use() as pointer:
            place = (pointer, address_of(memory), offset, memory.nbytes, *self._of(tensor))
            return self._schedule("nrta_tensor_write", place, (tensor.handle,), memory)

    def copy(
        self,
        source: NrtTensor,
        source_offset: int,
        destination: NrtTensor,
        destination_offset: int,
        num_bytes: int,
    ) -> Pending:
        """Schedule `NrtTensor.copy_to`, on one core (nrt_async.h: nrta_tensor_copy)."""
        source.check(source_offset, num_bytes)
        destination.check(destination_offset, num_bytes)
        self._of(destination)
        handles = (source.handle, destination.handle)
        with source.handle.use() as given, destination.handle.use() as wanted:
            runs = (given, source_offset, wanted, destination_offset, num_bytes)
            return self._schedule("nrta_tensor_copy", (*runs, *self._of(source)), handles)

    def execute(self, model: NrtModel, inputs: TensorSet, outputs: TensorSet) -> Pending:
        """Schedule `NrtModel.execute` (nrt_async.h: nrta_execute_schedule)."""
        if model.core not in (None, self.core):
            raise ValueError(f"a model of core {model.core} on a queue of core {self.core}")
        handles = (model.handle, inputs.handle, outputs.handle)
        with contextlib.ExitStack() as stack:
            used = (model.handle, inputs, outputs)
            pointers = [stack.enter_context(each.use()) for each in used]
            return self._schedule("nrta_execute_schedule", (*pointers, self._queue), handles)

    def last_done(self, unit: Unit) -> int:
        """The sequence number of what was over last, in a unit (nrt_async.h: nrta_get_sequence)."""
        found = ctypes.c_uint64()
        arguments = (self.core, unit.number(self.generation), self._queue, ctypes.byref(found))
        self.runtime.call("nrta_get_sequence", *arguments)
        return found.value

    def num_pending(self) -> int:
        """What was scheduled and is not over."""
        with self._lock:
            return self._num_pending()

    def close(self) -> None:
        """Give it up; a second time it does nothing. NrtMisuse while something is pending: there
        is no taking it back (nrt_async.h: nrta_error_tracker_destroy)."""
        with self._lock:  # nothing is scheduled between the count and the end
            if pending := self._num_pending():
                raise NrtMisuse(f"the queue of core {self.core} is closed with {pending} pending")
            if self._is_closed:
                return
            self._is_closed = True
        self.runtime.queues.remove(self)
        if self._tracker is not None:
            self._tracker.close()

    # For the runtime, and for Pending.

    def objection(self) -> str | None:
        """Why the runtime can't be closed now, or None. Takes no lock and calls nothing."""
        count = len(self._working)
        return f"{count} are pending on a queue of core {self.core}" if count else None

    def is_over(self, work: _Work) -> bool:
        """Asks the library until it once was."""
        with self._lock:
            self._look(work)
            return work.is_over

    def completion_fd(self, work: _Work) -> int | None:
        """As Pending has it."""
        if self.runtime.library.has("nrta_get_completion_handle"):
            found = ctypes.c_int(-1)
            self.runtime.call("nrta_get_completion_handle", work.sequence, ctypes.byref(found))
            return found.value
        if not self.runtime.library.has("nrta_event_register_seq_id_completion"):
            return None
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self.runtime.call("nrta_event_register_seq_id_completion", work.sequence, event)
        except BaseException:
            os.close(event)
            raise
        return event

    def _of(self, tensor: NrtTensor) -> tuple[int, ...]:
        """The arguments that say where a tensor's work goes."""
        if tensor.core != self.core:
            raise ValueError(f"{tensor!r} on a queue of core {self.core}")
        return (self._queue,) if self.generation == 2 else (self.core, self._queue)

    def _schedule(
        self,
        function: str,
        place: tuple[Any, ...],
        handles: tuple[Handle, ...],
        memory: object = None,
    ) -> Pending:
        work = _Work(function, memory)
        with self._lock:
            if self._is_closed:
                raise NrtMisuse(f"{function}: the queue is closed")
            while self._working and self._look(self._working[0]):
                pass  # those that nobody asks for are let go of here
            self._working.append(work)
            try:
                for handle in handles:
                    work.hold(handle)
                where = self._tracker.hold() if self._tracker else ctypes.byref(work.status)
                try:
                    self.runtime.call(function, *place, where, ctypes.byref(work.sequence))
                finally:
                    if self._tracker is not None:
                        self._tracker.release()
            except Exception:  # not for an interrupt: it may be scheduled
                self._working.remove(work)
                work.let_go()
                raise
        return Pending(self, work)

    def _num_pending(self) -> int:
        """Under the lock."""
        for work in list(self._working):
            self._look(work)
        return len(self._working)

    def _look(self, work: _Work) -> bool:
        """Whether it is over; if it is now, with its status, and gone from what is working."""
        if work.is_over:
            return True
        if work.sequence.value != _NOT_SCHEDULED:
            found = ctypes.c_bool()
            self.runtime.call("nrta_is_completed", work.sequence, ctypes.byref(found))
            if not found.value:
                return False
        if self._tracker is not None:
            self._read_errors(self._tracker)
            work.status.value = self._errors.pop(work.sequence.value, NrtStatus.SUCCESS)
        work.is_over = True
        self._working.remove(work)
        work.let_go()
        return True

    def _read_errors(self, tracker: Handle) -> None:
        """Into `_errors`. The header doesn't say whether the list forgets what it once gave, so
        this works with either."""
        rows, count = ctypes.POINTER(AsyncErrorStruct)(), ctypes.c_size_t()
        with tracker.use() as pointer:
            arguments = (pointer, ctypes.byref(rows), ctypes.byref(count))
            self.runtime.call("nrta_error_tracker_get_list", *arguments)
            known = {each.sequence.value for each in self._working} if count.value else set()
            for row in rows[: count.value]:
                if row.seq_id in known:  # 64 bits here, an enum's 32 elsewhere
                    self._errors[row.seq_id] = min(row.error_code, 2**31 - 1)
