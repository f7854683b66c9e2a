"""Amazon's devices on the PCI bus, by /sys. Needs no rights, and a container sees the host's."""

import os
from dataclasses import dataclass

from neuron_di.doctor.machine import Machine
from neuron_di.doctor.neuron_instances import AMAZON, EFA_IDS, NEURON_IDS

_DEVICES = "/sys/bus/pci/devices"
_INSTANCE = "/sys/devices/virtual/dmi/id/product_name"


@dataclass(frozen=True, slots=True)
class PciDevice:
    """`address` is "0000:10:1a.0", `device_id` "0xefa0"; `driver` is empty where none has it."""

    address: str
    device_id: str
    driver: str


def neuron_devices(machine: Machine) -> list[PciDevice]:
    return [each for each in _amazon_devices(machine) if each.device_id in NEURON_IDS]


def efa_adapters(machine: Machine) -> list[PciDevice]:
    return [each for each in _amazon_devices(machine) if each.device_id in EFA_IDS]


def instance_type(machine: Machine) -> str:
    """EC2's name of this machine, as its firmware has it; of other machines, some other text."""
    return machine.read(_INSTANCE) or ""


def may_use(machine: Machine, path: str) -> bool:
    """Whether this user may read and write a device file."""
    return os.access(machine.root / path.lstrip("/"), os.R_OK | os.W_OK)


def _amazon_devices(machine: Machine) -> list[PciDevice]:
    found = []
    for path in machine.names(f"{_DEVICES}/*"):
        if machine.read(f"{path}/vendor") == AMAZON:
            driver = machine.target(f"{path}/driver") or ""
            device_id = machine.read(f"{path}/device") or ""
            address = path.rpartition("/")[2]
            found.append(PciDevice(address, device_id, driver.rpartition("/")[2]))
    return found
