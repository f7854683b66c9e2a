"""KV on a simulated Neuron device: pools, and for each a runtime of its own beneath.

Each pool has a copy of the simulator and some cores of one instance, as a process of its own would.
Where a transfer leaves something posted for good, the copy is lost, as a process would be.

A pool's tensors have the runtime's handles, or are PyTorch's: then there are the closed classes of
torch-neuronx over the same copy, and the engine has nothing but these.
"""

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from neuron_di.kv import DeviceKv, KvGeometry, KvLayout, KvMap, NeuronPool
from neuron_di.kv.geometry import Order
from neuron_di.kv.neuron_copies import DeviceTensor
from neuron_di.transfer.nrt_engine import NrtEngine
from neuron_di.transfer.nrt_exchange import NrtTimes
from neuron_di.types import Incarnation
from neuron_di_bindings.nrt import (
    ENABLED_VARIABLE,
    PATH_VARIABLE,
    PORT_VARIABLE,
    NrtLibrary,
    NrtRuntime,
    NrtTensor,
    load_nrt,
)

_TESTS = Path(__file__).parents[1]
for _path in (str(_TESTS), str(_TESTS / "neuron_stand_in")):
    if _path not in sys.path:  # where this is a part of the package `tests`
        sys.path.append(_path)
from nrt_sim.build import CannotBuild, compiler, library_path  # noqa: E402

PAD = 4  # token positions behind each slot's last, as NxDI has
TIMES = NrtTimes(grace_s=1.0)

_INSTANCE = "trn2.48xlarge"  # 64 logical cores
_PLACE_CORES = 4
_NUM_PLACES = 16  # of pools: cores of so many
_FOLDER = "NRT_CONTRACT_FOLDER"  # in the environment of a process that this one starts
_IS_CHILD = _FOLDER in os.environ


def _why_not() -> str | None:
    try:
        compiler()
    except CannotBuild as error:
        return f"nrt: {error}"
    return None


WHY_NOT = _why_not()


@cache
def _folder() -> Path:
    """Where the simulated host's processes meet, and copies of the simulator are."""
    if _IS_CHILD:
        return Path(os.environ[_FOLDER])
    made = tempfile.TemporaryDirectory(prefix="nrt")  # short: sockets are below it
    _kept.append(made)
    return Path(made.name)


_kept: list[object] = []  # ends with this process


def environment() -> Mapping[str, str]:
    """Of another process on the same simulated instance."""
    return {_FOLDER: str(_folder())}


class Place:
    """Cores of the instance, and a copy of the simulator, as if in a process of its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.first_lnc = number * _PLACE_CORES
        path = Path(tempfile.mkdtemp(dir=_folder()), "libnrt.so.1")
        shutil.copyfile(library_path(), path)
        self.path = str(path)
        with self.environment():
            self.library: NrtLibrary = load_nrt()
        self.simulator = ctypes.CDLL(str(path))
        self.simulator.nrt_sim_violations.restype = ctypes.c_uint64
        self.simulator.nrt_sim_last_violation.restype = ctypes.c_char_p
        self.simulator.nrt_sim_calls.restype = ctypes.c_uint64
        self.runtime: NrtRuntime | None = None
        self.closed: Any = None  # the closed classes, as long as a pool has them

    def start(self, **more: str) -> NrtRuntime:
        with self.environment(**more):
            self.runtime = NrtRuntime(self.library).init()
        return self.runtime

    @contextmanager
    def environment(self, **more: str) -> Iterator[None]:
        """What the runtime reads, within the block."""
        before = dict(os.environ)
        last_lnc = self.first_lnc + _PLACE_CORES - 1
        os.environ.update(
            {
                "NRT_SIM_INSTANCE": _INSTANCE,
                "NRT_SIM_ROOT": str(_folder() / "root"),
                "NEURON_RT_VISIBLE_CORES": f"{self.first_lnc}-{last_lnc}",
                ENABLED_VARIABLE: "1",
                PORT_VARIABLE: "45645",
                "NRT_SIM_COMMUNICATORS_MAX": "4096",  # they count for as long as a copy lives
                PATH_VARIABLE: self.path,
                **more,
            }
        )
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def fault(self, schedule: str) -> None:
        """In the words of the simulator's faults.c."""
        if self.simulator.nrt_sim_schedule(schedule.encode()):
            raise ValueError(f"no faults: {schedule}")

    def num_calls(self, function: str) -> int:
        return int(self.simulator.nrt_sim_calls(function.encode()))

    def check(self) -> None:
        """Nobody broke the contract of libnrt, in ways that the real one leaves undefined."""
        self.simulator.nrt_sim_clear_faults()
        if count := self.simulator.nrt_sim_violations():
            last = self.simulator.nrt_sim_last_violation().decode()
            self.simulator.nrt_sim_forget_violations()
            raise AssertionError(f"the simulator found {count} violations, the last one: {last}")


class _Places:
    """Those of this process. Another process has the other half of the instance."""

    def __init__(self) -> None:
        half = _NUM_PLACES // 2
        self._numbers = list(range(half, _NUM_PLACES) if _IS_CHILD else range(half))
        self._free: list[Place] = []

    def take(self, *, is_new: bool) -> Place:
        """A new one has made no communicators, however many its cores had made."""
        if not self._free:
            return Place(self._numbers.pop())
        place = self._free.pop()
        return Place(place.number) if is_new else place

    def give_back(self, place: Place, *, is_lost: bool) -> None:
        if is_lost:
            self._numbers.append(place.number)
        else:
            self._free.append(place)


_places = _Places()


class SimulatedPool(NeuronPool):
    """Owns its tensors, as a backend would, and its place."""

    place: Place
    handles: list[NrtTensor]
    is_stuck = False  # a test says so: something is posted for good, but it is none of the pool's

    def close(self) -> None:
        if self._view is None:
            return
        super().close()
        closed, self.place.closed = self.place.closed, None
        if closed is not None:
            closed.close()
        if self.lost is not None or self.is_stuck:  # the runtime refuses to be closed
            self.place.simulator.nrt_close()  # as the process's end would
            _places.give_back(self.place, is_lost=True)
            return
        is_lost = True
        try:
            for handle in self.handles:
                handle.free()
            assert self.place.runtime is not None
            self.place.runtime.close()
            is_lost = False
        finally:
            _places.give_back(self.place, is_lost=is_lost)
        self.place.check()


def make_pool(
    layout: KvLayout,
    num_blocks: int,
    incarnation: Incarnation,
    *,
    num_ranks: int = 2,
    keys: Order = "HSD",
    values: Order = "HSD",
    settings: Mapping[str, str] | None = None,
    classes: str | None = None,
) -> SimulatedPool:
    """`settings` are variables of the environment that the simulator reads when it starts.

    `classes`: tensors are PyTorch's, and there are the closed classes, of this form (of the
    stand-in's variable). None: tensors have handles, and there are no such classes.
    """
    place = _places.take(is_new=bool(settings))
    runtime = place.start(**(settings or {}))
    geometry = KvGeometry.of_rank_tensors(
        KvMap.of_tensor_parallel(num_ranks, layout.num_kv_heads, layout.num_kv_heads),
        num_layers=layout.num_layers,
        head_dim=layout.head_dim,
        block_size=layout.block_size + PAD,
        num_blocks=num_blocks + 1,
        dtype=layout.dtype,
        keys=keys,
        values=values,
    )
    ranks = geometry.rank_of_tensor()
    handles = [
        runtime.allocate(num_bytes, ranks[number], f"kv-{number}")
        for number, num_bytes in sorted(geometry.tensor_bytes().items())
    ]
    tensors: Sequence[DeviceTensor] = [_Tensor(handle, nrt=handle) for handle in handles]
    if classes is not None:
        tensors = _as_pytorch(place, runtime, handles, classes)
    device = DeviceKv(
        tensors=tensors,
        geometry=geometry,
        lncs=tuple(place.first_lnc + rank for rank in range(num_ranks)),
    )
    pool = SimulatedPool.create(layout, num_blocks, incarnation, device)
    pool.place, pool.handles = place, handles
    return pool


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One that shows its handle, or is PyTorch's and shows none. Copies to and from the host are
    the runtime's, for speed."""

    handle: NrtTensor
    nrt: NrtTensor | None = None
    torch_tensor: Any = None

    @property
    def num_bytes(self) -> int:
        return self.handle.num_bytes

    @property
    def core(self) -> int:
        return self.handle.core

    @property
    def address(self) -> int:
        return self.handle.address

    def read(self, offset: int, into: memoryview) -> None:
        self.handle.read(offset, into)

    def write(self, offset: int, data: memoryview) -> None:
        self.handle.write(offset, data)

    def read_many(self, runs: Sequence[tuple[int, memoryview]]) -> None:
        self.handle.read_many(runs)

    def write_many(self, runs: Sequence[tuple[int, memoryview]]) -> None:
        self.handle.write_many(runs)


def _as_pytorch(
    place: Place, runtime: NrtRuntime, handles: Sequence[NrtTensor], classes: str
) -> list[DeviceTensor]:
    """The same memory as a model's state shows it, and the closed classes."""
    import torch
    from stand_in.closed_classes import ClosedNeuron
    from stand_in.device_tensor import DeviceTensor as StateOfModel

    place.closed = ClosedNeuron(lambda: runtime, classes)
    shown = [StateOfModel(handle, (handle.num_bytes,), torch.uint8) for handle in handles]
    return [
        _Tensor(handle, torch_tensor=tensor) for tensor, handle in zip(shown, handles, strict=True)
    ]


def make_torch_pool(layout: KvLayout, num_blocks: int, incarnation: Incarnation) -> SimulatedPool:
    return make_pool(layout, num_blocks, incarnation, classes="1")


def make_engine(pool: Any, times: NrtTimes = TIMES, **fields: Any) -> NrtEngine:
    closed = pool.place.closed
    with pool.place.environment(), nullcontext() if closed is None else closed.installed():
        return NrtEngine(pool, times=times, **fields)
