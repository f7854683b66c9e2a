"""EFA: the adapters of the instance, their device files, which Neuron device sits by which, and
what libfabric makes of them.

Sources: Linux's /sys, AWS's pages on EFA and on its instances, libfabric.
"""

from collections.abc import Iterator, Sequence

from neuron_di.config import DoctorOptions
from neuron_di.doctor import libfabric
from neuron_di.doctor.amounts import counted
from neuron_di.doctor.finding import Fact, Finding, Grade, Need
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.neuron_asked import expects_neuron, needs_neuron
from neuron_di.doctor.neuron_instances import INSTANCES, Instance
from neuron_di.doctor.pci import PciDevice, efa_adapters, instance_type, may_use

_DRIVER_FILE = "/sys/module/efa/version"
_VERBS = "/sys/class/infiniband_verbs"
_LAUNCH = (
    "Launch the instance with all of them: one interface of type efa (or efa-only) for each of its "
    "network cards. They cannot be had later by all instances."
)
_CONTAINER = (
    "Give the container all of them: --device=/dev/infiniband/uverbs0 and so on, or the Kubernetes "
    "resource vpc.amazonaws.com/efa with their number; none of it needs a privileged container."
)


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Adapters, driver, device files, pairs, libfabric."""
    adapters = efa_adapters(machine)
    is_neuron = expects_neuron(machine, options)
    if not adapters and not is_neuron:
        if options.device == "auto":
            yield Finding.note("efa.adapters", "this machine has no EFA adapters")
        return
    row = INSTANCES.get(instance_type(machine))
    need = Need(needs_neuron(machine, options))
    yield _adapters(adapters, row, need)
    if not adapters:
        return
    yield from _driver(machine, adapters, need)
    wanted, missing = _device_files(machine)
    yield from _verbs(machine, wanted, missing, Need(options.device == "neuron"))
    if row is not None and row.efa_of_device:
        yield _pairs(machine, adapters, row)
    if not missing or len(missing) < len(wanted):  # libfabric sees what has a file
        num_here = len(adapters) - len(missing)
        yield from _fabric(machine, num_here, is_neuron, need)


def _adapters(adapters: Sequence[PciDevice], row: Instance | None, need: Need) -> Finding:
    count = len(adapters)
    found = counted(count, "EFA adapter") if count else "no EFA adapter"
    facts: dict[str, Fact] = {"addresses": [adapter.address for adapter in adapters]}
    if row is None:
        return Finding.note("efa.adapters", found, facts=facts)
    facts["num_expected"] = row.num_efa
    if row.num_efa == 0:
        return Finding.note(
            "efa.adapters",
            f"{row.name} has no EFA: KV goes by shared memory on one host, and by TCP between "
            "hosts",
            facts=facts,
        )
    if count == 0 and not row.efa_of_device:
        return Finding.note(
            "efa.adapters",
            f"no EFA adapter is attached; that of {row.name} would reach no device's memory: "
            "KV goes by way of the host either way",
            facts=facts,
        )
    if count == 0:
        return Finding.warning(
            "efa.adapters",
            f"no EFA adapter is attached, and {row.name} has {row.num_efa}: KV goes by way of "
            "the host",
            _LAUNCH,
            facts=facts,
        )
    if count < row.num_efa:
        return need.unmet(
            "efa.adapters",
            f"{count} of {row.num_efa} EFA adapters are attached: devices without their own "
            'end transfers with "No matching NIC"',
            _LAUNCH,
            facts=facts,
        )
    return Finding.ok("efa.adapters", found, facts=facts)


def _driver(machine: Machine, adapters: Sequence[PciDevice], need: Need) -> Iterator[Finding]:
    version = machine.read(_DRIVER_FILE)
    bare = [adapter.address for adapter in adapters if adapter.driver != "efa"]
    if bare:
        yield need.unmet(
            "efa.driver",
            f"the EFA driver does not have {len(bare)} of {len(adapters)} adapters"
            + ("" if version else ": it is not loaded"),
            "Install the driver with AWS's EFA installer, or sudo modprobe efa.",
            facts={"addresses": bare},
        )
    else:
        yield Finding.ok(
            "efa.driver",
            f"the EFA driver is {version or 'loaded'}",
            facts={"version": version or ""},
        )


def _device_files(machine: Machine) -> tuple[list[str], list[str]]:
    """(the files in /dev by which programs reach the adapters, those of them that are not here).

    Those of other makers count not.
    """
    wanted = []
    for path in machine.names(f"{_VERBS}/uverbs[0-9]*"):
        driver = machine.target(f"{path}/device/driver") or ""
        if driver.rpartition("/")[2] == "efa":
            wanted.append(f"/dev/infiniband/{path.rpartition('/')[2]}")
    there = set(machine.names("/dev/infiniband/uverbs[0-9]*"))
    return wanted, [path for path in wanted if path not in there]


def _verbs(
    machine: Machine, wanted: list[str], missing: list[str], need: Need
) -> Iterator[Finding]:
    """Whether these files are here, and may be used. A container may have some of them."""
    if not wanted:
        return
    closed = [path for path in wanted if path not in missing and not may_use(machine, path)]
    facts: dict[str, Fact] = {"num_wanted": len(wanted), "missing": missing, "closed": closed}
    if missing:
        says = f"this container has {len(wanted) - len(missing)} of {len(wanted)} EFA device "
        says += f"files: {missing[0]} is not here"
        if len(missing) == len(wanted):
            says = "there is no EFA device file in /dev/infiniband"
        yield need.unmet("efa.verbs", says, _CONTAINER, facts=facts)
    elif closed:
        yield Finding.failed(
            "efa.verbs",
            f"this user may not open {closed[0]}",
            "Give everybody rights to read and write it, as AWS's EFA installer does by a "
            "udev rule.",
            facts=facts,
        )
    else:
        yield Finding.ok("efa.verbs", counted(len(wanted), "EFA device file"), facts=facts)


def _pairs(machine: Machine, adapters: Sequence[PciDevice], row: Instance) -> Finding:
    """Which device sits by which adapter, and which have none.

    A container is told of its own devices: those that have a file in /dev.
    """
    present = {adapter.address for adapter in adapters}
    pairs = {str(device): address for device, address in enumerate(row.efa_of_device)}
    alone = [device for device, address in pairs.items() if address not in present]
    strange = sorted(present - set(row.efa_of_device))
    facts: dict[str, Fact] = {"efa_of_device": dict(pairs), "devices_without": list(alone)}
    share = f"{row.devices_per_efa} devices by each adapter" if row.devices_per_efa > 1 else ""
    if strange:
        return Finding.note(
            "efa.pairs",
            f"adapters at addresses that {row.name} is not known to have "
            f"({', '.join(strange)}): which device sits by which, only the runtime tells",
            facts=facts | {"strange": list(strange)},
        )
    here = [path.removeprefix("/dev/neuron") for path in machine.names("/dev/neuron[0-9]*")]
    if alone:
        are_here = bool(set(alone) & set(here))
        one, num_devices = len(alone) == 1, len(row.efa_of_device)
        part = f"; this container has {len(here)} of {counted(num_devices, 'Neuron device')}"
        return Finding(
            check="efa.pairs",
            grade=Grade.FAILED if are_here else Grade.WARNING,
            says=f"Neuron device{'s' * (not one)} {', '.join(alone)} {'has' if one else 'have'} "
            f"no adapter beside {'it' if one else 'them'}{'' if are_here else part + ', no such'}",
            mend=_LAUNCH if are_here else f"For what runs here nothing, or --device cpu. {_LAUNCH}",
            facts=facts,
        )
    return Finding.ok(
        "efa.pairs", f"{share or 'one device by each adapter'}: {_listed(row)}", facts=facts
    )


def _listed(row: Instance) -> str:
    """By adapter: "0,1 by 0000:10:1a.0"."""
    devices: dict[str, list[str]] = {}
    for device, address in enumerate(row.efa_of_device):
        devices.setdefault(address, []).append(str(device))
    return "; ".join(f"{','.join(numbers)} by {address}" for address, numbers in devices.items())


def _fabric(machine: Machine, num_adapters: int, is_neuron: bool, need: Need) -> Iterator[Finding]:
    found = libfabric.look(machine)
    if found is None:
        yield Finding.warning(
            "efa.libfabric",
            "there is no fi_info: whether libfabric sees the adapters is not known",
            "Install libfabric with AWS's EFA installer, which a container needs too; it puts "
            "fi_info into /opt/amazon/efa/bin.",
        )
        return
    facts: dict[str, Fact] = {"version": found.version, "domains": list(found.domains)}
    if len(found.domains) < num_adapters:
        yield need.unmet(
            "efa.libfabric",
            f"libfabric sees {len(found.domains)} of {num_adapters} EFA adapters"
            + (f": {found.words}" if found.words else ""),
            "Are the device files of all adapters here (above), and no others in "
            "/dev/infiniband? FI_LOG_LEVEL=info fi_info -p efa says more.",
            facts=facts,
        )
    else:
        yield Finding.ok(
            "efa.libfabric",
            f"libfabric {found.version or 'of unknown version'} sees "
            f"{counted(len(found.domains), 'EFA adapter')}",
            facts=facts,
        )
    if is_neuron and found.domains:
        yield _memory(found)


def _memory(found: libfabric.Fabric) -> Finding:
    facts: dict[str, Fact] = {"num_cores": found.num_cores}
    if found.memory:
        return Finding.warning(
            "efa.memory",
            f"libfabric cannot reach Neuron memory (FI_HMEM_NEURON): {found.memory}",
            "Use AWS's libfabric (/opt/amazon/efa) and let it find libnrt.so.1: "
            "LD_LIBRARY_PATH=/opt/aws/neuron/lib, and unset FI_HMEM_DISABLE_P2P.",
            facts=facts,
        )
    if found.is_undecided or not found.num_cores:
        return Finding.note(
            "efa.memory",
            "whether libfabric reaches Neuron memory shows only in a process that has cores",
            facts=facts,
        )
    return Finding.ok(
        "efa.memory",
        f"libfabric knows Neuron memory (FI_HMEM_NEURON), and {counted(found.num_cores, 'core')}",
        facts=facts,
    )
