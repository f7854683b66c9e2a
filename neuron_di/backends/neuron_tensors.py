"""NxD Inference's KV as bytes: what its state tensors must look like, and how they are reached.

    keys      (slots, heads, positions, dims); transposed (slots, heads, dims, positions)
    values    (slots, heads, positions, dims)

of a rank and layer, with 128 positions behind the context, for rows of a step that have no request
(NxD Inference's kv_cache_manager.py). Positions may show as two dimensions, tiled: the bytes are
the same.

Where a tensor has the runtime's handle (`nrt_tensor`), its bytes are read and written through it,
on any thread. Public SDKs give none: then they are copied by the tensor's own methods, a slot of a
tensor in one call, while no forward call runs.

So far this has run on a simulator of libnrt only.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from neuron_di.backends.neuron_artifact import Settings
from neuron_di.backends.neuron_faults import lost_by
from neuron_di.backends.neuron_nxdi import SEQ_IDS_PAD
from neuron_di.errors import ConfigError
from neuron_di.kv import DTYPE_BYTES, DeviceKv, KvGeometry, KvMap
from neuron_di.models import ModelSpec

if TYPE_CHECKING:
    from neuron_di_bindings.nrt import NrtTensor


class Turns:
    """A lock whose holders take turns in the order in which they came.

    Copies of a slot are thousands of short calls: with an ordinary lock whoever makes them would
    have it again before a waiting decode step wakes up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for its turn."""
        with self._lock:
            if self._is_taken:
                gate: threading.Lock | None = threading.Lock()
                assert gate is not None
                gate.acquire()
                self._waiting.append(gate)
            else:
                self._is_taken, gate = True, None
        if gate is not None:
            gate.acquire()  # released by whoever gives the turn on; that one never fails to
        try:
            yield
        finally:
            with self._lock:
                if self._waiting:
                    self._waiting.popleft().release()
                else:
                    self._is_taken = False


class StateTensor:
    """One state tensor as a DeviceTensor. Borrowed from the loaded model."""

    def __init__(self, tensor: Any, turns: Turns) -> None:
        self.nrt: NrtTensor | None = getattr(tensor, "nrt_tensor", None)
        self.torch_tensor: object = tensor
        self.address: int | None = _address_of(tensor)
        self._tensor = tensor
        self._turns = turns
        self._item = tensor.dtype.itemsize
        self.num_bytes = prod(tensor.shape) * self._item
        self.core: int = tensor.device.index

    def read(self, offset: int, into: memoryview) -> None:
        if self.nrt is not None:
            self.nrt.read(offset, into)
            return
        with self._turns.taken(), _told_as_loss():
            part, start = self._around(offset, len(into))
            into[:] = _bytes_of(part.to("cpu").contiguous())[start : start + len(into)]

    def write(self, offset: int, data: memoryview) -> None:
        if self.nrt is not None:
            self.nrt.write(offset, data)
            return
        with self._turns.taken(), _told_as_loss():
            part, start = self._around(offset, len(data))
            host = part.to("cpu").contiguous()  # what lies beside the data stays as it is
            _bytes_of(host)[start : start + len(data)] = data
            part.copy_(host)

    def read_many(self, runs: Sequence[tuple[int, memoryview]]) -> None:
        """As `read`, for each (offset, into). Without a handle what lies around them all, a slot
        where they are of one, comes to the host in one call: of transposed keys each dim is a run.
        """
        if self.nrt is not None:
            self.nrt.read_many(runs)
            return
        if not runs:
            return
        first, num_bytes = _span(runs)
        with self._turns.taken(), _told_as_loss():
            part, start = self._around(first, num_bytes)
            found = _bytes_of(part.to("cpu").contiguous())
        for offset, into in runs:
            place = offset - first + start
            into[:] = found[place : place + len(into)]

    def write_many(self, runs: Sequence[tuple[int, memoryview]]) -> None:
        """As `write`, for each (offset, data), in one call without a handle, too. Where the runs
        are of one slot, its bytes around them may become zeros: of a slot its tokens are written
        from the first on, and what is behind them is nobody's. Other slots stay as they are."""
        if self.nrt is not None:
            self.nrt.write_many(runs)
            return
        if not runs:
            return
        first, num_bytes = _span(runs)
        with self._turns.taken(), _told_as_loss():
            part, start = self._around(first, num_bytes)
            if len(part.shape) < len(self._tensor.shape):  # it is within a slot
                host = torch.zeros(tuple(part.shape), dtype=self._tensor.dtype)
            else:
                host = part.to("cpu").contiguous()
            into = _bytes_of(host)
            for offset, data in runs:
                place = offset - first + start
                into[place : place + len(data)] = data
            part.copy_(host)

    def _around(self, offset: int, num_bytes: int) -> tuple[Any, int]:
        """The innermost part of the tensor that has all these bytes, and where in it they begin."""
        part, start = self._tensor, offset
        while len(part.shape) > 1:
            row_bytes = prod(part.shape[1:]) * self._item
            row = start // row_bytes
            if start + num_bytes > (row + 1) * row_bytes:
                break
            part, start = part[row], start - row * row_bytes
        return part, start


def device_kv(
    ranks: Sequence[Sequence[Any]],
    settings: Settings,
    spec: ModelSpec,
    cores: Sequence[int],
    turns: Turns,
) -> DeviceKv:
    """The state tensors of all ranks, checked. `cores[i]` is the host's number of core i of ours.

    ConfigError where they are not what the settings make of this model.
    """
    kv_map = KvMap.of_tensor_parallel(settings.tp, spec.num_kv_heads, spec.num_heads)
    if len(ranks) != settings.tp:
        raise ConfigError(f"the loaded model has {len(ranks)} ranks, not {settings.tp}")
    positions = settings.context_tokens + SEQ_IDS_PAD
    values_shape = (settings.slots, len(kv_map.heads[0]), positions, spec.head_dim)
    keys_shape = (*values_shape[:2], spec.head_dim, positions)
    shapes = (keys_shape if settings.k_transposed else values_shape, values_shape)
    dtype = getattr(torch, settings.dtype)
    for rank, tensors in enumerate(ranks):
        if len(tensors) != 2 * spec.num_layers:
            raise ConfigError(
                f"rank {rank} has {len(tensors)} KV tensors, and the model {spec.num_layers} layers"
            )
        for number, tensor in enumerate(tensors):
            wanted = shapes[number % 2]
            if _untiled(tensor.shape, wanted) != wanted or tensor.dtype != dtype:
                raise ConfigError(
                    f"KV tensor {number} of rank {rank} is {tuple(tensor.shape)} of "
                    f"{tensor.dtype}, not {wanted} of {dtype}"
                )
    geometry = KvGeometry.of_rank_tensors(
        kv_map,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
        block_size=positions,
        num_blocks=settings.slots,
        dtype=settings.dtype,
        keys="HDS" if settings.k_transposed else "HSD",
    )
    own = [[StateTensor(tensor, turns) for tensor in tensors] for tensors in ranks]
    indices = [tensors[0].core for tensors in own]
    if any(not 0 <= index < len(cores) for index in indices):
        raise ConfigError(f"the ranks lie on the cores {indices} of {len(cores)}")
    # As NxD Inference lists them: of each layer the keys of all ranks, then the values of all.
    in_order = [own[rank][n] for n in range(2 * spec.num_layers) for rank in range(settings.tp)]
    return DeviceKv(
        tensors=in_order, geometry=geometry, lncs=tuple(cores[index] for index in indices)
    )


def check_copies(device: DeviceKv) -> None:
    """Write to and read from each rank's first and last tensor. ConfigError where it differs.

    Before anything has KV there. Connectors have been seen in which writes from the host were lost.
    """
    slot_bytes = device.geometry.strides[0].block
    num_ranks = len(device.lncs)
    size = min(slot_bytes, 64 * DTYPE_BYTES[device.geometry.dtype])
    for number in {*range(num_ranks), *range(len(device.tensors) - num_ranks, len(device.tensors))}:
        tensor = device.tensors[number]
        offset = tensor.num_bytes - size
        pattern = bytes((number * 7 + place) % 127 for place in range(size))
        found = bytearray(size)
        tensor.write(offset, memoryview(pattern))
        tensor.read(offset, memoryview(found))
        if found != pattern:
            raise ConfigError(f"KV tensor {number} does not give back what was written to it")
        tensor.write(offset, memoryview(bytes(size)))


def _address_of(tensor: Any) -> int | None:
    """Of its first byte on the device. None where the packages do not say: nobody documents it."""
    try:
        return int(tensor.data_ptr()) or None
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


def _span(runs: Sequence[tuple[int, memoryview]]) -> tuple[int, int]:
    """Where the first of these bytes lies, and how many there are to the end of the last."""
    first = min(offset for offset, _ in runs)
    return first, max(offset + len(part) for offset, part in runs) - first


def _untiled(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """A shape whose positions are in two dimensions, as one of as many dimensions as `like`."""
    sizes = tuple(shape)
    for place in range(len(like)):
        if len(sizes) == len(like) + 1 and sizes[place] * sizes[place + 1] == like[place]:
            return (*sizes[:place], like[place], *sizes[place + 2 :])
    return sizes


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor on the host, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data


@contextmanager
def _told_as_loss() -> Iterator[None]:
    """Errors that mean the device's loss become BackendLost."""
    try:
        yield
    except Exception as error:
        lost = lost_by(error)
        if lost is None:
            raise
        raise lost from error
