"""What the tests of the simulator's queues share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_uint64, c_void_p

import pytest
from nrt_sim import neff
from nrt_sim.plain import SUCCESS, PlainNrt
from nrt_sim.plain_models import PlainModels
from nrt_sim.plain_queues import PlainQueues

DEPTH = 4  # requests that a queue takes
# Per generation: the units of a write, a read, a copy and an execution.
UNITS = {2: (1, 0, 2, 3), 3: (0, 0, 0, 1)}
NUM_QUEUES = {2: (1, 1, 2, 1, 3), 3: (2, 1, 3)}  # of each unit


@contextmanager
def open_queues(
    load: Callable[[int], PlainNrt], monkeypatch: pytest.MonkeyPatch, api: int
) -> Iterator[PlainQueues]:
    """An open library of two cores. In API 2 with a tracker for core 0."""
    monkeypatch.setenv("NRT_SIM_QUEUE_DEPTH", str(DEPTH))
    monkeypatch.delenv("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", raising=False)
    models = PlainModels(load(api), api)
    models.open()
    queues = PlainQueues(models)
    if api == 2:
        queues.track()
    yield queues
    queues.drain()


def reopen(queues: PlainQueues) -> None:
    queues.models.nrt_close()
    queues.models.open()
    if queues.models.api == 2:
        queues.track()


def copier(models: PlainModels) -> tuple[c_void_p, tuple[c_void_p, ...], tuple[c_void_p, ...]]:
    """A model that copies 8 bytes, its sets, and its tensors."""
    model = models.loaded(neff.copy(8))
    tensors = models.allocated(8), models.allocated(8)
    sets = models.tensor_set({"in": tensors[0]}), models.tensor_set({"out": tensors[1]})
    return model, sets, tensors


def cleared(models: PlainModels, num_bytes: int) -> c_void_p:
    """New device memory is not zero."""
    tensor = models.allocated(num_bytes)
    models.write(tensor, 0, bytes(num_bytes))
    return tensor


def last_completed(models: PlainModels, unit: int, queue: int = 0, lnc: int = 0) -> int:
    number = c_uint64(1 << 63)
    status = models.nrta_get_sequence(lnc, unit, queue, byref(number))
    assert status == SUCCESS, status
    return number.value
