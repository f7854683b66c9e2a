"""A device's cores, opened for send and receive; or why they cannot be, and what to do about it.

What opens them is chosen here: torch-neuronx's classes, where they are there, since whoever has
them made the KV's tensors; else libnrt by our bindings. The runtime says FAILURE to whatever is
wrong. What is known of its causes stands here, too.

Next: neuron_di/transfer/nrt_driver.py
"""

import contextlib
import os
from collections.abc import Mapping

from neuron_di.errors import ConfigError
from neuron_di.kv import DeviceKv, KvPool, NeuronPool
from neuron_di.neuron_cores import bootstrap_locks_of_others
from neuron_di.obs import get_logger
from neuron_di.transfer.nrt_by_library import LibraryDriver
from neuron_di.transfer.nrt_by_torch import TorchDriver
from neuron_di.transfer.nrt_driver import CoreNotOpened, Driver, NotHere
from neuron_di_bindings.nrt import (
    ENABLED_VARIABLE,
    PORT_VARIABLE,
    NrtError,
    NrtMissing,
    NrtMisuse,
    NrtRuntime,
    load_nrt,
)

_log = get_logger(__name__)


def neuron_pool(pool: KvPool) -> NeuronPool:
    """ConfigError where it is not one."""
    if not isinstance(pool, NeuronPool):
        raise ConfigError(
            "--transfer nrt is for KV on a Neuron device: --device neuron", param="transfer"
        )
    return pool


def open_driver(
    device: DeviceKv, probe_bytes: int, environment: Mapping[str, str] = os.environ
) -> Driver:
    """Send and receive on each of the device's cores, by the first driver that there is.

    `probe_bytes` for each communicator. ConfigError, with cause and mend.
    """
    _check_variables(environment)
    lacks = []
    for make in (TorchDriver, LibraryDriver):
        try:
            driver: Driver = make(device, probe_bytes)
        except NotHere as lack:
            lacks.append(str(lack))
        except CoreNotOpened as refusal:
            raise ConfigError(
                f"the Neuron runtime does not open send and receive on core {refusal.lnc}: "
                f"{refusal}. {_likely_cause(device)}",
                param="transfer",
            ) from None
        else:
            _log.info("nrt_opened", how=driver.how, instead_of="; ".join(lacks))
            return driver
    raise ConfigError(
        f"--transfer nrt finds no way to this device's KV: {'; '.join(lacks)}; "
        "--transfer shm,tcp moves KV by way of the host",
        param="transfer",
    )


def _check_variables(environment: Mapping[str, str]) -> None:
    if environment.get(ENABLED_VARIABLE) != "1":
        raise ConfigError(
            f"the Neuron runtime's send and receive is switched off: set {ENABLED_VARIABLE}=1 "
            "before the worker starts",
            param="transfer",
        )
    port = environment.get(PORT_VARIABLE, "")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"the Neuron runtime's send and receive has no bootstrap port: set {PORT_VARIABLE} to "
            "one TCP port, the same for all workers, before the worker starts",
            param="transfer",
        )


def _likely_cause(device: DeviceKv) -> str:
    has_efa = True  # where nobody can tell
    with contextlib.suppress(NrtError, NrtMisuse, NrtMissing):
        tensor, library = device.tensors[0], load_nrt()
        address = tensor.address
        if address is not None and library.has("nrt_get_attached_efa_bdf"):
            with NrtRuntime(library) as runtime:
                has_efa = runtime.attached_efa(address) is not None
    if not has_efa:
        return (
            "Its memory has no EFA adapter beside it: send and receive need an instance with EFA, "
            "and --transfer shm,tcp does not"
        )
    if locks := bootstrap_locks_of_others():
        return (
            f"There is a bootstrap lock file of another user, {', '.join(locks)}: if no process "
            "uses it, one that was killed left it behind; delete it"
        )
    return (
        "It needs EFA, a driver and runtime of the same release, and its cores for this process "
        "alone; the runtime's own log (NEURON_RT_LOG_LEVEL=INFO) says more"
    )
