"""Roots of machines with Neuron devices, as Linux and the Neuron and EFA drivers show them.

Addresses on the PCI bus are those of AWS's documentation, where it has them. The runtime is the
simulator of libnrt, which is loaded for real, whatever the root; `fi_info` is a script that prints
what libfabric's source prints.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nrt_sim.build import library_path

from neuron_di.config import DoctorOptions, TransferOptions
from neuron_di.doctor.finding import Finding, Grade
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.neuron_instances import INSTANCES

TRN1_DEVICES = (
    *("10:1c.0", "10:1d.0", "a0:1c.0", "a0:1d.0", "20:1b.0", "20:1c.0", "90:1b.0", "90:1c.0"),
    *("20:1d.0", "20:1e.0", "90:1d.0", "90:1e.0", "10:1e.0", "10:1b.0", "a0:1e.0", "a0:1b.0"),
)
TRN2_DEVICES = (
    *("cc:00.0", "b5:00.0", "b6:00.0", "cb:00.0", "6f:00.0", "58:00.0", "59:00.0", "6e:00.0"),
    *("9b:00.0", "84:00.0", "85:00.0", "9a:00.0", "f8:00.0", "e1:00.0", "e2:00.0", "f7:00.0"),
)
_IDS = {"trn1": "0x7164", "trn1n": "0x7164", "inf2": "0x7264", "trn2": "0x7364", "trn2u": "0x7364"}
DRIVER = "2.28.0.0"  # of SDK 2.30, as the simulator's runtime is


class Root:
    """A folder that is a machine's root. It begins as a laptop without anything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file("/sys/bus/pci/devices/0000:00:1f.3/vendor", "0x8086\n")
        self.file("/sys/bus/pci/devices/0000:00:1f.3/device", "0xa0c8\n")
        self.file("/sys/devices/virtual/dmi/id/product_name", "ThinkPad\n")
        self.file("/proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")

    def file(self, path: str, text: str = "") -> Path:
        place = self.folder / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        return place

    def link(self, path: str, target: str) -> None:
        """To a path of the same root, relative as in /sys."""
        place = self.folder / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(self.folder / target.lstrip("/"), place.parent))

    def remove(self, pattern: str) -> None:
        """Files and links, by a pattern that finds some."""
        found = list(self.folder.glob(pattern.lstrip("/")))
        assert found, pattern
        for path in found:
            path.unlink()

    def instance(self, name: str) -> None:
        self.file("/sys/devices/virtual/dmi/id/product_name", f"{name}\n")

    def pci_device(self, address: str, device_id: str, driver: str) -> str:
        """Its folder in /sys."""
        place = f"/sys/devices/pci{address[:7]}/{address}"
        self.file(f"{place}/vendor", "0x1d0f\n")
        self.file(f"{place}/device", f"{device_id}\n")
        self.link(f"/sys/bus/pci/devices/{address}", place)
        if driver:
            self.file(f"/sys/bus/pci/drivers/{driver}/bind")
            self.link(f"{place}/driver", f"/sys/bus/pci/drivers/{driver}")
        return place

    def neuron_devices(self, addresses: Iterable[str], device_id: str, cores: int) -> None:
        self.file("/sys/module/neuron/version", f"{DRIVER}\n")
        for number, address in enumerate(addresses):
            self.pci_device(f"0000:{address}", device_id, "neuron")
            self.file(f"/dev/neuron{number}")
            place = f"/sys/devices/virtual/neuron_device/neuron{number}"
            self.file(f"{place}/core_count", str(cores))
            self.file(f"{place}/stats/hardware/mem_ecc_uncorrected", "0\n")
            self.file(f"{place}/stats/hardware/sram_ecc_uncorrected", "0\n")
            self.file(f"{place}/stats/hardware/health_status/unhealthy_components", "\n")

    def efa_adapters(self, addresses: Iterable[str], first: int = 0) -> None:
        self.file("/sys/module/efa/version", "2.13.0g\n")
        for number, address in enumerate(addresses, first):
            place = self.pci_device(address, "0xefa1", "efa")
            bus, slot = int(address[5:7], 16), int(address[8:10], 16)
            name = f"rdmap{bus}s{slot}"
            self.file(f"{place}/infiniband/{name}/node_type", "4: unspecified\n")
            self.link(f"{place}/infiniband/{name}/device", place)
            self.link(f"/sys/class/infiniband/{name}", f"{place}/infiniband/{name}")
            verbs = f"{place}/infiniband_verbs/uverbs{number}"
            self.file(f"{verbs}/ibdev", f"{name}\n")
            self.link(f"{verbs}/device", place)
            self.link(f"/sys/class/infiniband_verbs/uverbs{number}", verbs)
            self.file(f"/dev/infiniband/uverbs{number}")

    def process(self, pid: int, name: str, *opened: str) -> None:
        """One that has these files open."""
        self.file(f"/proc/{pid}/comm", f"{name}\n")
        folder = self.folder / f"proc/{pid}/fd"
        folder.mkdir()
        for number, path in enumerate(opened, 3):
            (folder / str(number)).symlink_to(path)


def laptop(folder: Path) -> Root:
    return Root(folder)


def instance(folder: Path, name: str, *, num_efa: int | None = None) -> Root:
    """A machine of this type with all that it has, or fewer of its EFA adapters."""
    root, row = Root(folder), INSTANCES[name]
    root.instance(name)
    addresses: Sequence[str] = {"trn1": TRN1_DEVICES, "trn2": TRN2_DEVICES}.get(
        row.family, [f"{0x10 + number:02x}:1f.0" for number in range(row.num_devices)]
    )
    root.neuron_devices(addresses[: row.num_devices], _IDS[row.family], row.cores_per_device)
    adapters = list(dict.fromkeys(row.efa_of_device))
    root.efa_adapters(adapters[: len(adapters) if num_efa is None else num_efa])
    return root


# Its environment, programs and packages.


def simulated(folder: Path, name: str = "trn1.32xlarge", **variables: str) -> dict[str, str]:
    """Variables with which a process takes the simulator for that instance's runtime."""
    kept = {key: os.environ[key] for key in ("PATH", "PYTHONPATH", "HOME") if key in os.environ}
    values = {
        "NEURON_DI_LIBNRT": str(library_path()),
        "NRT_SIM_ROOT": str(folder),
        "NRT_SIM_INSTANCE": name,
        "OMP_NUM_THREADS": "1",
    }
    return kept | values | variables


def machine(root: Root, environment: Mapping[str, str], packages: Path | None = None) -> Machine:
    path = None if packages is None else [str(packages)]
    return Machine(root=root.folder, environment=environment, package_path=path)


def package(folder: Path, name: str, version: str, *files: str) -> None:
    """Install it, with these files."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in (*files, f"{info.name}/RECORD")))
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()


def neuron_packages(folder: Path, **versions: str) -> Path:
    """Those of SDK 2.30, and torch, or others of them: torch_neuronx="…"."""
    installed = {
        "neuronx-cc": "2.25.3371.0",
        "torch-neuronx": "2.9.0.2.14.27725",
        "neuronx-distributed": "0.19.28093",
        "neuronx-distributed-inference": "0.10.17970",
        "torch": "2.9.1",
    } | {name.replace("_", "-"): version for name, version in versions.items()}
    files = {
        "torch-neuronx": ("torch_neuronx/__init__.py",),
        "neuronx-distributed-inference": ("neuronx_distributed_inference/models/config.py",),
    }
    for name, version in installed.items():
        package(folder, name, version, *files.get(name, ()))
    return folder


def fi_info(folder: Path, domains: Iterable[str], *, log: str = "", failure: str = "") -> str:
    """A PATH whose `fi_info -p efa` prints these domains, and this log."""
    listed = "".join(
        f"provider: efa\\n    fabric: efa\\n    domain: {name}-{kind}\\n    version: 204.0\\n"
        for name in domains
        for kind in ("rdm", "dgrm")
    )
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "fi_info"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then printf "fi_info: 2.4.0\\nlibfabric: 2.4.0\\n"; exit 0; fi\n'
        f'[ "$FI_LOG_LEVEL" = info ] && printf "{log}" >&2\n'
        + (f"echo '{failure}'; exit 61\n" if failure else f'printf "{listed}"\n')
    )
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def log_line(words: str) -> str:
    return f"libfabric:123:1700000000::core:core:function():1<info> {words}\\n"


# What was found.


def options(device: str = "auto", *transfer: str, **fields: Any) -> DoctorOptions:
    kv_transfer = TransferOptions(transfer=transfer) if transfer else TransferOptions()
    return DoctorOptions(device=device, kv_transfer=kv_transfer, **fields)  # type: ignore[arg-type]


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Each check found one thing at most; what failed, or is doubtful, has a mend."""
    found: dict[str, Finding] = {}
    for finding in findings:
        if finding.check in found:
            raise AssertionError(f"two findings of {finding.check}")
        if finding.grade in (Grade.FAILED, Grade.WARNING) and not finding.mend:
            raise AssertionError(f"{finding.check} has no mend")
        found[finding.check] = finding
    return found
