"""Whether NIXL could read this device's memory, or why it could not, and what to do about it.

What can be known before NIXL is loaded. The rest shows when its agent starts.
"""

import importlib.metadata
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from neuron_di.errors import ConfigError
from neuron_di.kv import DeviceKv
from neuron_di.neuron_cores import SHARED_MEMORY_OF_EFA
from neuron_di_bindings.nrt import NrtError, NrtMissing, NrtMisuse, NrtRuntime, load_nrt

PACKAGE = "nixl-cu12"
# Before it its LIBFABRIC takes device memory where it finds CUDA only.
VERSION_MIN = (1, 1, 0)
_RDMA_DEVICES = Path("/sys/class/infiniband")
_AMAZON = "0x1d0f"  # PCI vendor
_OFF = frozenset({"0", "no", "false", "off"})  # as libfabric reads a variable


def check_device(device: DeviceKv, environment: Mapping[str, str] = os.environ) -> None:
    """ConfigError where NIXL cannot read these tensors, which have addresses."""
    if environment.get(SHARED_MEMORY_OF_EFA, "").lower() not in _OFF:
        raise ConfigError(
            f"set {SHARED_MEMORY_OF_EFA}=0 before the worker starts: libfabric's shared memory "
            "knows no device memory",
            param="transfer",
        )
    _check_adapters(_adapters_beside(device))
    _check_version()


def _check_adapters(needed: dict[str, int]) -> None:
    """This process has each of these. Without one NIXL takes whichever there are for the tensors
    beside it, several for one tensor: then the fence does not hold (nixl_fence.py)."""
    present = {_pci_address(one) for one in _RDMA_DEVICES.glob("*") if _is_efa(one)}
    if not present:
        raise ConfigError(
            f"no EFA device is in {_RDMA_DEVICES}: load EFA's driver, or give it to the container",
            param="transfer",
        )
    for adapter, lnc in needed.items():
        if adapter.lower() not in present:
            raise ConfigError(
                f"the EFA adapter {adapter} beside the memory of core {lnc} is not in "
                f"{_RDMA_DEVICES}: attach it, or give it to the container",
                param="transfer",
            )


def _adapters_beside(device: DeviceKv) -> dict[str, int]:
    """PCI addresses of the EFA adapters beside the ranks' memory, each with a core that has it.

    That there are any also shows that what the tensors have are addresses of the device: torch
    documents no such thing.
    """
    adapters: dict[str, int] = {}
    try:
        with _runtime_of(device) as runtime:
            if not runtime.library.has("nrt_get_attached_efa_bdf"):
                raise ConfigError(
                    "the Neuron runtime does not tell which EFA adapter is beside device memory: "
                    "update aws-neuronx-runtime-lib",
                    param="transfer",
                )
            for rank, lnc in enumerate(device.lncs):  # the keys of the first layer come first
                address = device.tensors[rank].address
                assert address is not None, "who asks looked"
                adapter = runtime.attached_efa(address)
                if adapter is None:
                    raise ConfigError(
                        f"no EFA adapter is beside the memory of core {lnc}: NIXL needs an "
                        "instance with EFA, and interfaces attached to it",
                        param="transfer",
                    )
                adapters.setdefault(adapter, lnc)
    except (NrtError, NrtMisuse, NrtMissing) as error:
        raise ConfigError(
            f"the Neuron runtime does not tell which EFA adapter is beside device memory: {error}",
            param="transfer",
        ) from None
    return adapters


@contextmanager
def _runtime_of(device: DeviceKv) -> Iterator[NrtRuntime]:
    """That of the tensors' handles. Without handles, that which PyTorch has started."""
    handle = device.tensors[0].nrt
    if handle is not None:
        yield handle.runtime
        return
    with NrtRuntime(load_nrt()) as runtime:
        yield runtime


def _is_efa(rdma_device: Path) -> bool:
    """Amazon's: it makes no other RDMA devices."""
    try:
        return (rdma_device / "device" / "vendor").read_text().strip() == _AMAZON
    except OSError:
        return False


def _pci_address(rdma_device: Path) -> str:
    return (rdma_device / "device").resolve().name.lower()


def _check_version() -> None:
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return  # whoever loads it says what to install
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < VERSION_MIN:
        wanted = ".".join(map(str, VERSION_MIN))
        raise ConfigError(
            f"NIXL {version} takes no Neuron memory: pip install '{PACKAGE}>={wanted}'",
            param="transfer",
        )
