"""AWS's instances with Neuron devices: what each has, and which EFA adapter sits by which device.

Data, no measurements. Sources: AWS's published documentation (the EC2 pages of the instance types,
the Neuron pages on the architecture of Trn1, Inf2 and Trn2), and, for the pairs, the device maps
that AWS publishes for schedulers. Trn3 is left out: this project has not looked at it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

AMAZON = "0x1d0f"
NEURON_IDS: Mapping[str, str] = {  # PCI ids, and which family they are of
    "0x7064": "inf1",
    "0x7164": "trn1",
    "0x7264": "inf2",
    "0x7364": "trn2",
    "0x7564": "trn3",
    "0x7565": "trn3",
}
EFA_IDS = ("0xefa0", "0xefa1", "0xefa2", "0xefa3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One instance type. `efa_of_device` has a PCI address for each Neuron device, by its number;
    it is empty where nothing sits by a device."""

    name: str
    num_devices: int
    cores_per_device: int  # physical ones
    logical_default: int = 1  # physical cores that are one logical core, unless it is set otherwise
    num_efa: int = 0
    efa_of_device: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]

    @property
    def devices_per_efa(self) -> int:
        """How many devices share an adapter; 0 where none sits by any."""
        return len(self.efa_of_device) // self.num_efa if self.efa_of_device else 0

    def num_cores(self, logical: int | None = None) -> int:
        """As the runtime counts them, with so many physical cores to a logical one."""
        return self.num_devices * self.cores_per_device // (logical or self.logical_default)


def _addresses(text: str) -> tuple[str, ...]:
    """From "10:1a.0", which is in PCI domain 0."""
    return tuple(f"0000:{word}" for word in text.split())


_TRN1_EFA = _addresses(
    "10:1a.0 10:1a.0 a0:1a.0 a0:1a.0 20:19.0 20:19.0 90:19.0 90:19.0 "
    "20:1a.0 20:1a.0 90:1a.0 90:1a.0 10:19.0 10:19.0 a0:19.0 a0:19.0"
)
_TRN1N_EFA = _addresses(
    "10:17.0 10:1a.0 a0:17.0 a0:1a.0 20:19.0 20:18.0 90:19.0 90:18.0 "
    "20:17.0 20:1a.0 90:17.0 90:1a.0 10:19.0 10:18.0 a0:19.0 a0:18.0"
)
_TRN2_EFA = _addresses(
    "c9:00.0 b4:00.0 b3:00.0 ca:00.0 6c:00.0 57:00.0 56:00.0 6d:00.0 "
    "98:00.0 83:00.0 82:00.0 99:00.0 f5:00.0 e0:00.0 df:00.0 f6:00.0"
)

_TRN2 = Instance(
    name="trn2.48xlarge",
    num_devices=16,
    cores_per_device=8,
    logical_default=2,
    num_efa=16,
    efa_of_device=_TRN2_EFA,
)
_ROWS = (
    Instance(name="trn1.2xlarge", num_devices=1, cores_per_device=2),
    Instance(
        name="trn1.32xlarge",
        num_devices=16,
        cores_per_device=2,
        num_efa=8,
        efa_of_device=_TRN1_EFA,
    ),
    Instance(
        name="trn1n.32xlarge",
        num_devices=16,
        cores_per_device=2,
        num_efa=16,
        efa_of_device=_TRN1N_EFA,
    ),
    Instance(name="inf2.xlarge", num_devices=1, cores_per_device=2),
    Instance(name="inf2.8xlarge", num_devices=1, cores_per_device=2),
    Instance(name="inf2.24xlarge", num_devices=6, cores_per_device=2),
    Instance(name="inf2.48xlarge", num_devices=12, cores_per_device=2),
    # Its one adapter is the host's: it reaches no device's memory.
    Instance(name="trn2.3xlarge", num_devices=1, cores_per_device=8, logical_default=2, num_efa=1),
    _TRN2,
    replace(_TRN2, name="trn2u.48xlarge"),
)

INSTANCES: Mapping[str, Instance] = {row.name: row for row in _ROWS}
