"""AWS Neuron's runtime library, libnrt, by ctypes: devices, tensors, models, send and receive.

Importing it loads nothing: `load_nrt` does. `functions.py` is the table of all that is called. What
fails says what to do: `NrtRetry`, `NrtRequestError` or `NrtWorkerError`. Cores are numbered as the
process sees them, but for `SendReceive`, which takes the host's numbers.

So far this has run on a simulator of libnrt only.
"""

from neuron_di_bindings.nrt.collectives import (
    barrier,
    build_global_communicator,
    init_global_communicator,
    network_plugin,
)
from neuron_di_bindings.nrt.functions import FUNCTIONS, NrtFunction
from neuron_di_bindings.nrt.instance import InstanceInfo, MemoryStats
from neuron_di_bindings.nrt.library import (
    PATH_VARIABLE,
    NrtLibrary,
    NrtMissing,
    NrtVersion,
    load_nrt,
)
from neuron_di_bindings.nrt.model import NrtModel, NrtType, TensorInfo, TensorSet
from neuron_di_bindings.nrt.queues import AsyncQueue, Pending, Unit
from neuron_di_bindings.nrt.runtime import Framework, NrtRuntime
from neuron_di_bindings.nrt.sendrecv import (
    ENABLED_VARIABLE,
    PORT_VARIABLE,
    Communicator,
    Limits,
    NrtRequest,
    SendReceive,
    missing_variables,
)
from neuron_di_bindings.nrt.status import (
    NrtError,
    NrtMisuse,
    NrtRequestError,
    NrtRetry,
    NrtStatus,
    NrtUnsupported,
    NrtWorkerError,
)
from neuron_di_bindings.nrt.tensor import (
    AllocationInfo,
    NrtTensor,
    read_tensors,
    write_tensors,
)

__all__ = [
    "ENABLED_VARIABLE",
    "FUNCTIONS",
    "PATH_VARIABLE",
    "PORT_VARIABLE",
    "AllocationInfo",
    "AsyncQueue",
    "Communicator",
    "Framework",
    "InstanceInfo",
    "Limits",
    "MemoryStats",
    "NrtError",
    "NrtFunction",
    "NrtLibrary",
    "NrtMissing",
    "NrtMisuse",
    "NrtModel",
    "NrtRequest",
    "NrtRequestError",
    "NrtRetry",
    "NrtRuntime",
    "NrtStatus",
    "NrtTensor",
    "NrtType",
    "NrtUnsupported",
    "NrtVersion",
    "NrtWorkerError",
    "Pending",
    "SendReceive",
    "TensorInfo",
    "TensorSet",
    "Unit",
    "barrier",
    "build_global_communicator",
    "init_global_communicator",
    "load_nrt",
    "missing_variables",
    "network_plugin",
    "read_tensors",
    "write_tensors",
]
