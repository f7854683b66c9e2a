"""Choosing a backend by the device's name. Only the chosen one's module is imported."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from neuron_di.backends.backend import Backend
from neuron_di.errors import ConfigError
from neuron_di.kv import KvLayout, KvPool
from neuron_di.models import LoadProgress, ModelSpec
from neuron_di.types import Incarnation

# Allocates a pool of this layout and size. ConfigError when the memory cannot be had.
MakePool = Callable[[KvLayout, int, Incarnation], KvPool]
# Device name -> module with an `open_backend(options)`.
_MODULES = {"cpu": "neuron_di.backends.cpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Which model to serve, and with how much of the machine.

    `layout.dtype` is the dtype of the KV and of all computation; `layout.num_ranks`, how many
    processes have a part of the model each, this one included.
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


def open_backend(device: str, options: BackendOptions) -> Backend:
    """Allocate the KV pool and load the model on `device`.

    Raises ConfigError when this build lacks the device or the memory does not suffice, and
    CheckpointError when the weights cannot be loaded.
    """
    if device not in _MODULES:
        raise ConfigError(
            f"device {device!r} is not available: this build runs on {', '.join(_MODULES)} only"
        )
    module = import_module(_MODULES[device])
    opener = cast("Callable[[BackendOptions], Backend]", module.open_backend)
    return opener(options)
