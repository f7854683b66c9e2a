"""Between a device's KV tensors and the host's form of the same slots, the mirror.

Only tokens that are used move, and each head once towards the host: of a head's replicas it is,
layer by layer, the one that `Planner` brings it to over a link. Towards the device every replica is
written. Where the device keeps another order than the mirror (keys transposed), its own form is
copied as it is, into memory beside the mirror, and a local copy puts the numbers where they belong.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from neuron_di.errors import ConfigError
from neuron_di.kv.geometry import KvGeometry, Order
from neuron_di.kv.layout import KvLayout
from neuron_di.kv.placement import Placement, place_on_host
from neuron_di.kv.planner import Planner, placement_between
from neuron_di.kv.runs import Ints, Memory, Runs
from neuron_di.types import BlockId

if TYPE_CHECKING:
    from neuron_di_bindings.nrt import NrtTensor

_MIRROR_ORDER: Order = "HSD"
_PLANS_MAX = 32  # lengths whose plans are kept


class DeviceTensor(Protocol):
    """One tensor of a device's KV, whoever allocated it. Thread-safe. Not owned by who uses it.

    `num_bytes` is its size, `core` the core that it lies on, counted as this process's. `nrt` is
    the runtime's handle of the same bytes, `torch_tensor` torch-neuronx's tensor of them, `address`
    their device address; None where nobody gives one. Without any of them its bytes move by `read`
    and `write` only.
    """

    @property
    def num_bytes(self) -> int: ...

    @property
    def core(self) -> int: ...

    @property
    def nrt(self) -> "NrtTensor | None": ...

    @property
    def torch_tensor(self) -> object | None: ...

    @property
    def address(self) -> int | None: ...

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on. Blocks until they are there."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Put the bytes at `offset`. Blocks until the device has them."""
        ...


@runtime_checkable
class ManyAtOnce(Protocol):
    """A tensor, or its handle, that moves many runs in fewer calls than one each.

    The runs of a call are of one slot. `write_many` may leave anything in that slot's bytes behind
    the tokens that it writes, and changes nothing of other slots.
    """

    def read_many(self, runs: "Sequence[tuple[int, memoryview]]") -> None:
        """As DeviceTensor.read, for each (offset, into)."""
        ...

    def write_many(self, runs: "Sequence[tuple[int, memoryview]]") -> None:
        """As DeviceTensor.write, for each (offset, data)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceKv:
    """A device's KV: slot i is block i. Borrowed: whoever allocated the tensors frees them.

    `tensors` are numbered as `geometry` numbers them (KvGeometry.of_rank_tensors), `lncs[rank]` is
    the core that holds a rank's tensors, counted as the host's. ConfigError where these do not fit
    each other.
    """

    tensors: Sequence[DeviceTensor]
    geometry: KvGeometry
    lncs: tuple[int, ...]

    def __post_init__(self) -> None:
        geometry, num_ranks = self.geometry, len(self.geometry.heads)
        sizes = geometry.tensor_bytes()
        if sorted(sizes) != list(range(len(self.tensors))):
            raise ConfigError(f"{len(self.tensors)} KV tensors, not the {len(sizes)} of the model")
        for number, num_bytes in sizes.items():
            found_bytes = self.tensors[number].num_bytes
            if found_bytes < num_bytes:
                raise ConfigError(f"KV tensor {number} has {found_bytes} bytes, not {num_bytes}")
        if len(self.lncs) != num_ranks or len(set(self.lncs)) < num_ranks:
            raise ConfigError(f"{num_ranks} ranks on the cores {self.lncs}")
        geometry.holders()  # a head that nobody holds

    @staticmethod
    def used_part(geometry: KvGeometry, block_size: int) -> KvGeometry:
        """The part of a device's slots that requests of at most `block_size` tokens use."""
        return replace(geometry, block_size=block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """For a length: slot 0's bytes. `runs` lie in a device's tensor at one end, at the other in the
    mirror, or, where there is a placement, in memory of `form_bytes`."""

    runs: Runs
    placement: Placement | None
    form_bytes: int


class NeuronCopies:
    """Copies slots. Thread-safe, for different slots at once. Errors are the tensors'."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: DeviceKv) -> None:
        geometry = device.geometry
        if layout.num_ranks != 1:
            raise ConfigError("the host's form of a device's KV has each head once")
        for name in ("num_layers", "num_kv_heads", "head_dim", "dtype"):
            ours, its = getattr(layout, name), getattr(geometry, name)
            if ours != its:
                raise ConfigError(f"the device's KV has {name} {its}, not {ours}")
        if geometry.block_size < layout.block_size or geometry.num_blocks < num_blocks:
            raise ConfigError(
                f"the device has {geometry.num_blocks} slots of {geometry.block_size} tokens, not "
                f"{num_blocks} of {layout.block_size}"
            )
        self.has_replicas = any(len(ranks) > 1 for ranks in geometry.holders())
        self._tensors = device.tensors
        self._device = DeviceKv.used_part(geometry, layout.block_size)
        self._mirror = KvGeometry.of_layout(layout, num_blocks)
        self._slot_bytes = self._device.strides[0].block  # of keys as of values
        self._is_direct = all(each.order == _MIRROR_ORDER for each in self._device.strides)
        # Of these two, as methods have one cache for all objects.
        self._down_plan = lru_cache(_PLANS_MAX)(self._plan_down)
        self._up_plan = lru_cache(_PLANS_MAX)(self._plan_up)

    def to_host(self, block_id: BlockId, num_tokens: int, mirror: Memory) -> None:
        """The first `num_tokens` tokens of a slot, each head once, into its block of the mirror."""
        if not num_tokens:
            return
        plan = self._down_plan(num_tokens)
        into, start = _bytes_of(mirror), block_id * self._mirror.strides[0].block
        form = np.empty(plan.form_bytes, np.uint8)
        if plan.placement is not None:
            into, start = form.data, 0
        runs = plan.runs
        offsets = runs.source_offsets + block_id * self._slot_bytes
        for tensor, rows in self._by_tensor(runs.source_tensors):
            places = runs.destination_offsets[rows] + start
            parts = _parts(offsets[rows], into, places, runs.lengths[rows])
            if (many := _many_at_once(tensor)) is not None:
                many.read_many(parts)
                continue
            for offset, part in parts:
                tensor.read(offset, part)
        if plan.placement is not None:
            block = self._block_of(mirror, block_id)
            place_on_host(plan.placement, Memory(form.ctypes.data, len(form)), [block])

    def to_device(self, block_id: BlockId, num_tokens: int, mirror: Memory) -> None:
        """The first `num_tokens` tokens of a block of the mirror into all replicas of its slot."""
        if not num_tokens:
            return
        plan = self._up_plan(num_tokens)
        source, start = _bytes_of(mirror), block_id * self._mirror.strides[0].block
        if plan.placement is not None:
            form = np.empty(plan.form_bytes, np.uint8)
            block = self._block_of(mirror, block_id)
            place_on_host(plan.placement, block, [Memory(form.ctypes.data, len(form))])
            source, start = form.data, 0
        runs = plan.runs
        offsets = runs.destination_offsets + block_id * self._slot_bytes
        for tensor, rows in self._by_tensor(runs.destination_tensors):
            places = runs.source_offsets[rows] + start
            parts = _parts(offsets[rows], source, places, runs.lengths[rows])
            if (many := _many_at_once(tensor)) is not None:
                many.write_many(parts)
                continue
            for offset, part in parts:
                tensor.write(offset, part)

    def _plan_down(self, num_tokens: int) -> _Plan:
        if self._is_direct:
            runs = Planner(self._device, self._mirror).plan([0], [0], num_tokens).runs
            return _Plan(runs=runs, placement=None, form_bytes=0)
        form = self._device.landing(num_tokens)
        return _Plan(
            runs=Planner(self._device, form).plan([0], [0], num_tokens).runs,
            placement=placement_between(form, self._mirror, [0], [0], num_tokens),
            form_bytes=form.tensor_bytes()[0],
        )

    def _plan_up(self, num_tokens: int) -> _Plan:
        if self._is_direct:
            runs = Planner(self._mirror, self._device, "each").plan([0], [0], num_tokens).runs
            return _Plan(runs=runs, placement=None, form_bytes=0)
        form = self._device.landing(num_tokens)
        return _Plan(
            runs=Planner(form, self._device, "each").plan([0], [0], num_tokens).runs,
            placement=placement_between(self._mirror, form, [0], [0], num_tokens),
            form_bytes=form.tensor_bytes()[0],
        )

    def _by_tensor(self, numbers: Ints | None) -> Iterator[tuple[DeviceTensor, Ints]]:
        """Each tensor, and which rows are its."""
        assert numbers is not None, "plans of several tensors name them"
        order = np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        for rows in np.split(order, starts[1:]):
            yield self._tensors[int(numbers[rows[0]])], rows

    def _block_of(self, mirror: Memory, block_id: BlockId) -> Memory:
        block_bytes = self._mirror.strides[0].block
        return Memory(mirror.address + block_id * block_bytes, block_bytes)


def _many_at_once(tensor: DeviceTensor) -> ManyAtOnce | None:
    if tensor.nrt is not None:
        return tensor.nrt
    return tensor if isinstance(tensor, ManyAtOnce) else None


def _bytes_of(memory: Memory) -> memoryview:
    whole = (ctypes.c_uint8 * memory.num_bytes).from_address(memory.address)
    return memoryview(whole).cast("B")


def _parts(
    offsets: Ints, memory: memoryview, places: Ints, lengths: Ints
) -> list[tuple[int, memoryview]]:
    rows = zip(offsets.tolist(), places.tolist(), lengths.tolist(), strict=True)
    return [(offset, memory[place : place + length]) for offset, place, length in rows]
