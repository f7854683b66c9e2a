"""Short ways to schedule on the simulator's queues, in either generation of the functions."""

import ctypes
from ctypes import POINTER, byref, c_bool, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass, field
from time import sleep
from typing import Any

from nrt_sim.plain import SUCCESS
from nrt_sim.plain_models import AsyncError, PlainModels

NOT_SET = -77  # what a status slot holds before the library writes it


@dataclass(slots=True)
class Pending:
    """What was scheduled: its number, and what must stay alive until it is over."""

    status: int = NOT_SET  # of the call that scheduled it
    number: c_uint64 = field(default_factory=lambda: c_uint64(0))
    slot: c_int = field(default_factory=lambda: c_int(NOT_SET))
    buffer: Any = None

    @property
    def sequence(self) -> int:
        return self.number.value


class PlainQueues:
    """Short ways to schedule. In API 2 what fails is told to `tracker`, a handle or None.

    Keeps what it scheduled alive; `drain` before it goes, else the library writes to what is gone.
    """

    def __init__(self, models: PlainModels) -> None:
        self.models = models
        self.tracker: c_void_p | None = None
        self._made: list[Pending] = []

    def drain(self) -> None:
        self.models.nrt_sim_hold_queues(False)
        self.models.nrt_sim_hold_executions(False)
        for made in self._made:
            done = c_bool()
            while self.models.nrta_is_completed(made.sequence, byref(done)) == SUCCESS:
                if done.value:
                    break
                sleep(0.001)

    def write(
        self, tensor: c_void_p, offset: int, content: bytes, queue: int = 0, lnc: int = 0
    ) -> Pending:
        made = Pending(buffer=ctypes.create_string_buffer(content, len(content)))
        arguments = (tensor, made.buffer, offset, len(content))
        return self._scheduled(made, "nrta_tensor_write", *arguments, *self._place(lnc, queue))

    def read(
        self, tensor: c_void_p, offset: int, num_bytes: int, queue: int = 0, lnc: int = 0
    ) -> Pending:
        made = Pending(buffer=ctypes.create_string_buffer(num_bytes))
        arguments = (made.buffer, tensor, offset, num_bytes)
        return self._scheduled(made, "nrta_tensor_read", *arguments, *self._place(lnc, queue))

    def copy(
        self,
        source: tuple[c_void_p, int],
        target: tuple[c_void_p, int],
        num_bytes: int,
        queue: int = 0,
        lnc: int = 0,
    ) -> Pending:
        arguments = (*source, *target, num_bytes, *self._place(lnc, queue))
        return self._scheduled(Pending(), "nrta_tensor_copy", *arguments)

    def execute(
        self, model: c_void_p, inputs: c_void_p, outputs: c_void_p, queue: int = 0
    ) -> Pending:
        return self._scheduled(Pending(), "nrta_execute_schedule", model, inputs, outputs, queue)

    def _place(self, lnc: int, queue: int) -> tuple[int, ...]:
        return (queue,) if self.models.api == 2 else (lnc, queue)

    def _scheduled(self, made: Pending, name: str, *arguments: Any) -> Pending:
        result = self.tracker if self.models.api == 2 else byref(made.slot)
        self._made.append(made)
        made.status = getattr(self.models, name)(*arguments, result, byref(made.number))
        return made

    def scheduled(self, made: Pending) -> Pending:
        """It was taken."""
        assert made.status == SUCCESS, made.status
        return made

    def wait(self, made: Pending) -> None:
        """Until it is over; the test's own time limit bounds it."""
        self.scheduled(made)
        while not self.models.is_completed(made.sequence):
            sleep(0.001)

    def result(self, made: Pending) -> int:
        """What its request returned, when it is over."""
        self.wait(made)
        if self.models.api == 3:
            return made.slot.value
        errors = dict(self.errors())
        return errors.get(made.sequence, SUCCESS)

    def track(self, lnc: int = 0) -> None:
        """API 2: from now on failures go to a tracker of this core."""
        self.tracker = c_void_p()
        status = self.models.nrta_error_tracker_create(lnc, byref(self.tracker))
        assert status == SUCCESS, status

    def errors(self) -> list[tuple[int, int]]:
        listed, number = POINTER(AsyncError)(), c_size_t()
        status = self.models.nrta_error_tracker_get_list(self.tracker, byref(listed), byref(number))
        assert status == SUCCESS, status
        return [(listed[i].seq_id, listed[i].error_code) for i in range(number.value)]
