"""A device's cores, opened for send and receive; or why they cannot be, and what to do about it.

The runtime says FAILURE to all of it. What is known of its causes stands here.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from neuron_di.errors import ConfigError
from neuron_di.kv import DeviceKv, KvPool, NeuronPool
from neuron_di.obs import get_logger
from neuron_di_bindings.nrt import (
    ENABLED_VARIABLE,
    PORT_VARIABLE,
    NrtError,
    NrtMisuse,
    NrtRuntime,
    NrtTensor,
    NrtUnsupported,
    SendReceive,
)

_log = get_logger(__name__)

# What the runtime's rendezvous leaves behind when its process is killed; the later of two names.
_LOCK_FOLDER = Path("/tmp")  # noqa: S108
_LOCK_NAMES = ("nrt_kv_store_server_lock_uid_*", "nrt_kv_store_server.lock")


def neuron_pool(pool: KvPool) -> NeuronPool:
    """ConfigError where it is not one, or its device gives nobody what sends and receives need."""
    if not isinstance(pool, NeuronPool):
        raise ConfigError(
            "--transfer nrt is for KV on a Neuron device: --device neuron", param="transfer"
        )
    num_bare = sum(tensor.nrt is None for tensor in pool.device.tensors)
    if num_bare:
        raise ConfigError(
            f"--transfer nrt needs the Neuron runtime's handle of each KV tensor, and {num_bare} "
            f"of {len(pool.device.tensors)} have none: the installed packages give none; "
            "--transfer shm,tcp moves KV by way of the host",
            param="transfer",
        )
    return pool


def open_cores(device: DeviceKv, environment: Mapping[str, str] = os.environ) -> SendReceive:
    """Send and receive on each of the device's cores. ConfigError, with cause and mend."""
    tensor = device.tensors[0].nrt
    assert tensor is not None, "who asks looked"
    _check_variables(environment)
    sendreceive = SendReceive(tensor.runtime)
    opened: list[int] = []
    try:
        for lnc in device.lncs:
            sendreceive.open(lnc)
            opened.append(lnc)
    except NrtUnsupported as error:
        raise ConfigError(
            f"the Neuron runtime has no send and receive: {error}; update aws-neuronx-runtime-lib",
            param="transfer",
        ) from None
    except (NrtError, NrtMisuse) as error:
        close_cores(sendreceive, opened)
        lnc = device.lncs[len(opened)]
        raise ConfigError(
            f"the Neuron runtime does not open send and receive on core {lnc}: {error}. "
            f"{_likely_cause(tensor.runtime, tensor)}",
            param="transfer",
        ) from None
    return sendreceive


def close_cores(sendreceive: SendReceive, lncs: tuple[int, ...] | list[int]) -> bool:
    """Whether all of them are closed. Those on which something is posted for good stay open."""
    is_closed = True
    for lnc in lncs:
        try:
            sendreceive.close(lnc)
        except (NrtError, NrtMisuse) as error:
            is_closed = False
            _log.warning("nrt_core_not_closed", lnc=lnc, reason=str(error))
    return is_closed


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


def _likely_cause(runtime: NrtRuntime, tensor: NrtTensor) -> str:
    has_efa = True  # where nobody can tell
    if runtime.library.has("nrt_get_attached_efa_bdf"):
        with contextlib.suppress(NrtError, NrtMisuse):
            has_efa = runtime.attached_efa(tensor.address) is not None
    if not has_efa:
        return (
            "Its memory has no EFA adapter beside it: send and receive need an instance with EFA, "
            "and --transfer shm,tcp does not"
        )
    if locks := _locks_of_others():
        return (
            f"There is a bootstrap lock file of another user, {', '.join(locks)}: if no process "
            "uses it, one that was killed left it behind; delete it"
        )
    return (
        "It needs EFA, a driver and runtime of the same release, and its cores for this process "
        "alone; the runtime's own log (NEURON_RT_LOG_LEVEL=INFO) says more"
    )


def _locks_of_others() -> list[str]:
    """Those that this user may not lock. One of its own is in nobody's way."""
    found = []
    for name in _LOCK_NAMES:
        for path in sorted(_LOCK_FOLDER.glob(name)):
            with contextlib.suppress(OSError):  # it is gone by now
                if path.stat().st_uid != os.getuid() or not os.access(path, os.R_OK | os.W_OK):
                    found.append(str(path))
    return found
