"""Choosing a backend by the device's name. Only the chosen one's module is imported."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from neuron_di.backends.backend import Backend
from neuron_di.backends.memory import MemoryPlan, plan_memory
from neuron_di.config import EngineOptions, available_memory_bytes
from neuron_di.errors import ConfigError
from neuron_di.kv import KvLayout, KvPool
from neuron_di.models import LoadProgress, ModelSpec, require_divisible
from neuron_di.types import Incarnation

# Allocates a pool of this layout and size. ConfigError when the memory cannot be had.
MakePool = Callable[[KvLayout, int, Incarnation], KvPool]
_POOL_SHARE = 4  # the host has other uses for its memory
# Device name -> module with an `open_backend(options)` and, but for the CPU's, a `plan_device`.
_MODULES = {
    "cpu": "neuron_di.backends.cpu",
    "cuda": "neuron_di.backends.cuda",
    "neuron": "neuron_di.backends.neuron",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """What a device makes of a worker's options. Each may add what it needs to open its backend."""

    dtype: str  # of the KV and of all computation
    block_size: int  # token positions
    num_ranks: int  # that have a part of each block of the pool
    chunk_tokens: int  # the most positions of a prefill's step
    workspace_tokens: int  # of such a step, those that need memory of the host to be computed in
    # Where the device has room for so many requests, each one block long: then neither options nor
    # the role say how many blocks there are. None: they do.
    num_slots: int | None = None
    # How many workers divide `free_bytes` when they start. None: the caller knows.
    num_sharing: int | None = None

    def free_bytes(self) -> int:
        """Memory that weights, pool and workspace can have, for all who share it: the host's."""
        return available_memory_bytes()

    def pool_bytes(self, spec: ModelSpec, available_bytes: int) -> int:  # noqa: ARG002
        """Of the memory available to this worker, what a pool takes that nobody gave a size."""
        return available_bytes // _POOL_SHARE

    def memory_plan(self, spec: ModelSpec, layout: KvLayout, num_blocks: int) -> MemoryPlan:
        """What serving takes of that memory."""
        return plan_memory(spec, layout, num_blocks=num_blocks, chunk_tokens=self.workspace_tokens)


def plan_device(options: EngineOptions, spec: ModelSpec, folder: Path) -> DevicePlan:
    """How the model in `folder` would run on the device of these options. Loads nothing.

    ConfigError where it cannot, with what would mend it.
    """
    if options.device != "cpu":
        plan: DevicePlan = _module(options.device).plan_device(options, spec, folder)
        return plan
    require_divisible(spec, options.tp)
    return DevicePlan(
        dtype="float32" if options.dtype == "auto" else options.dtype,
        block_size=options.block_size,
        num_ranks=options.tp,
        chunk_tokens=options.chunk,
        workspace_tokens=options.chunk,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Which model to serve, and with how much of the machine.

    `layout.dtype` is the dtype of the KV and of all computation; `layout.num_ranks`, how many
    processes have a part of the model each, this one included. `plan` is what `plan_device` gave;
    None does for the CPU.
    """

    folder: Path
    spec: ModelSpec
    layout: KvLayout
    num_blocks: int
    incarnation: Incarnation
    num_threads: int
    make_pool: MakePool = KvPool.create
    use_kernels: bool = True  # False: plain torch only; slower, equal up to rounding
    on_progress: LoadProgress | None = None
    plan: DevicePlan | None = None


def open_backend(device: str, options: BackendOptions) -> Backend:
    """Allocate the KV pool and load the model on `device`.

    Raises ConfigError when this build lacks the device or the memory does not suffice, and
    CheckpointError when the weights cannot be loaded.
    """
    opener = cast("Callable[[BackendOptions], Backend]", _module(device).open_backend)
    return opener(options)


def _module(device: str) -> Any:
    if device not in _MODULES:
        raise ConfigError(
            f"device {device!r} is not available: this build runs on {', '.join(_MODULES)} only"
        )
    return import_module(_MODULES[device])
