"""libnrt in this process: initialised at the first load, as torch-neuronx does, and never twice.

torch-neuronx closes it when the process ends. Tests, which load with other cores in one process,
close it themselves: `shut_down`.
"""

import atexit
import contextlib
import threading

from neuron_di_bindings.nrt import Framework, NrtError, NrtMisuse, NrtRuntime, load_nrt

_lock = threading.Lock()
_runtime: NrtRuntime | None = None


def runtime() -> NrtRuntime:
    """The process's runtime. RuntimeError when libnrt can't be initialised, as in torch-neuronx."""
    global _runtime
    with _lock:
        if _runtime is None:
            opened = NrtRuntime(load_nrt())
            try:
                opened.init(Framework.PYTORCH)
            except NrtError as error:
                raise RuntimeError(
                    f"The Neuron runtime could not be initialised: {error.function} "
                    f"status={int(error.status)} ({error.name})"
                ) from error
            _runtime = opened
        return _runtime


def require_cores(num_ranks: int) -> NrtRuntime:
    """The runtime, with at least this many cores of its own; rank i is on core i of them."""
    opened = runtime()
    visible = opened.visible_cores()
    if visible < num_ranks:
        raise RuntimeError(
            f"nrt_load status=9 (NRT_LOAD_NOT_ENOUGH_NC): the model is compiled for {num_ranks} "
            f"cores, this process has {visible} (NEURON_RT_VISIBLE_CORES, NEURON_RT_NUM_CORES)"
        )
    return opened


def shut_down() -> None:
    """Close libnrt, if it is open. All state tensors are gone then."""
    global _runtime
    with _lock:
        if _runtime is not None:
            closing, _runtime = _runtime, None
            closing.close()


@atexit.register
def _close_at_exit() -> None:
    with contextlib.suppress(NrtError, NrtMisuse):  # the process ends anyway
        shut_down()
