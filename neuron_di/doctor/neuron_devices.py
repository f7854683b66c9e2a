"""Neuron devices: which the instance should have, which are there, whose they are, how they are.

Sources: Linux's and the Neuron driver's /sys (AWS's Neuron sysfs guide), and the runtime's own
count of cores, which takes none.
"""

from collections.abc import Iterator

from neuron_di.config import DoctorOptions
from neuron_di.doctor.amounts import counted
from neuron_di.doctor.finding import Finding, Need
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.neuron_asked import (
    Asked,
    ask_library,
    device_users,
    expects_neuron,
    need_of,
)
from neuron_di.doctor.neuron_instances import INSTANCES, NEURON_IDS, Instance
from neuron_di.doctor.pci import instance_type, may_use, neuron_devices
from neuron_di.neuron_cores import LOGICAL_CORES

DRIVER_FILE = "/sys/module/neuron/version"
_SYSFS = "/sys/devices/virtual/neuron_device"
# Parts of a device that its firmware may call unhealthy, with a driver 2.30.
_PARTS = {
    *("hbm", "sram", "firmware_service_api", "firmware_service_processor", "axi_fabric"),
    *("link_intraserver", "link_host", "link_efa", "link_interserver", "link_switch"),
}
_LOGICAL_FILE = "/opt/aws/neuron/logical_nc_config"
_USERS_MAX = 8  # that are named
_RETIRE = (
    "Stop and start the instance, or replace it: AWS's guide to Neuron hardware errors says so "
    "of these."
)


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Instance, devices, access to them, their health, cores, and who has them open."""
    if not expects_neuron(machine, options):
        if options.device == "auto":
            yield Finding.note("neuron.devices", "this machine has no Neuron devices")
        return
    row = INSTANCES.get(instance_type(machine))
    yield _instance(machine, row)
    yield from _devices(machine, options, row)
    yield from _health(machine, need_of(machine, options))
    yield from _cores(machine, options, row)
    yield from _users(machine)


def _instance(machine: Machine, row: Instance | None) -> Finding:
    if row is None:
        found = sorted({NEURON_IDS[each.device_id] for each in neuron_devices(machine)})
        family = f", with devices of {', '.join(found)}" if found else ""
        return Finding.note(
            "neuron.instance",
            f"not an instance type that is known here{family}: what it should have is unknown",
            facts={"families": found},
        )
    efa = counted(row.num_efa, "EFA adapter") if row.num_efa else "no EFA"
    devices = counted(row.num_devices, "device")
    return Finding.note(
        "neuron.instance",
        f"{row.name}: {devices}, {counted(row.num_cores(), 'NeuronCore')}, {efa}",
        facts={
            "instance": row.name,
            "num_devices": row.num_devices,
            "num_cores": row.num_cores(),
            "num_efa": row.num_efa,
        },
    )


def _devices(machine: Machine, options: DoctorOptions, row: Instance | None) -> Iterator[Finding]:
    """The PCI bus shows them, the driver makes a file of each, and this user may use it."""
    on_bus = neuron_devices(machine)
    files = machine.names("/dev/neuron[0-9]*")
    facts = {"num_on_bus": len(on_bus), "num_files": len(files)}
    if not on_bus and not files:
        yield _no_devices(machine, options)
        return
    num_shown = len(on_bus) or len(files)  # a bus that is hidden from a container shows nothing
    wanted = row.num_devices if row else num_shown
    if num_shown < wanted:
        yield Finding.failed(
            "neuron.devices",
            f"the PCI bus shows {len(on_bus)} of the instance's {wanted} Neuron devices",
            _RETIRE,
            facts=facts,
        )
    if not files:
        if machine.read(DRIVER_FILE) is not None:  # else that is what is wrong
            yield Need(options.device == "neuron").unmet(
                "neuron.devices",
                f"there {'is' if len(on_bus) == 1 else 'are'} "
                f"{counted(len(on_bus), 'Neuron device')}, a driver, and no /dev/neuron0: this "
                f"container has 0 of {len(on_bus)}",
                "What uses none, as the proxy or --device cpu, needs nothing. Else give the "
                "container the devices: --device=/dev/neuron0 and so on, or the Kubernetes "
                "resource aws.amazon.com/neuron. Elsewhere load the driver anew: "
                "sudo rmmod neuron && sudo modprobe neuron.",
                facts=facts,
            )
    elif len(files) < len(on_bus):
        yield Finding.warning(
            "neuron.devices",
            f"this container has {len(files)} of {len(on_bus)} Neuron devices: the others "
            "have no file in /dev",
            "In a container that may be meant: it has the devices that it was given. Else "
            "load the driver anew: sudo rmmod neuron && sudo modprobe neuron.",
            facts=facts,
        )
    elif num_shown >= wanted:
        yield Finding.ok(
            "neuron.devices",
            "1 Neuron device is there"
            if len(files) == 1
            else f"{len(files)} Neuron devices are there",
            facts=facts,
        )
    if closed := [path for path in files if not may_use(machine, path)]:
        yield Finding.failed(
            "neuron.access",
            f"this user may not open {closed[0]}"
            + (f" and {counted(len(closed) - 1, 'other')}" if len(closed) > 1 else ""),
            "Join the group that owns /dev/neuron*, or change the udev rule that gives it "
            "those rights.",
            facts={"devices": closed},
        )


def _no_devices(machine: Machine, options: DoctorOptions) -> Finding:
    """Nothing on the bus and in /dev, and yet somebody says that there must be some."""
    asked = ask_library(machine, options)
    if (failed := asked.failure("total")) is not None:
        return Finding.skipped(
            "neuron.devices",
            f"the PCI bus has none, and the runtime cannot be asked: {failed}",
            facts={"num_on_bus": 0, "num_files": 0},
        )
    if total := asked.steps.of("total").get("num_cores", 0):
        return Finding.note(
            "neuron.devices",
            "the PCI bus has no Neuron devices, and the runtime counts "
            f"{counted(total, 'NeuronCore')}: "
            "a simulator, or devices that are hidden from here",
            facts={"num_on_bus": 0, "num_files": 0, "num_cores": total},
        )
    return Finding.failed(
        "neuron.devices",
        "this machine has no Neuron devices",
        "Use an Inf2, Trn1 or Trn2 instance, or --device auto.",
        facts={"num_on_bus": 0, "num_files": 0},
    )


def _health(machine: Machine, need: Need) -> Iterator[Finding]:
    """Errors that the driver counted since it was loaded. Some drivers show them to root only."""
    counts: dict[str, int] = {}
    sick: list[str] = []
    for device in machine.names(f"{_SYSFS}/neuron[0-9]*"):
        hardware = f"{device}/stats/hardware"
        name = device.rpartition("/")[2]
        for error in ("mem_ecc_uncorrected", "sram_ecc_uncorrected"):
            text = machine.read(f"{hardware}/{error}") or ""
            if text.isdecimal() and int(text):
                counts[f"{name}.{error}"] = int(text)
        text = machine.read(f"{hardware}/health_status/unhealthy_components") or ""
        sick += [f"{name} {part}" for part in text.split(",") if part.strip() in _PARTS]
    if counts or sick:
        named = ", ".join([f"{name} {count}" for name, count in counts.items()] + sick)
        yield need.unmet(
            "neuron.health",
            f"the driver counts hardware errors: {named}",
            _RETIRE,
            facts={"errors": counts, "unhealthy": sick},
        )


def _cores(machine: Machine, options: DoctorOptions, row: Instance | None) -> Iterator[Finding]:
    """As the runtime counts them. What is wrong with the runtime itself is another check's."""
    asked = ask_library(machine, options)
    yield from _unanswered(asked)
    if "total" not in asked.steps.found and asked.steps.begun != "total":
        return
    need = need_of(machine, options)
    if (failed := asked.failure_in_full("total")) is not None:
        yield need.unmet(
            "neuron.cores",
            f"the runtime cannot count the NeuronCores: {failed}",
            "Load the driver (aws-neuronx-dkms) of the runtime's release; "
            "NEURON_RT_VISIBLE_CORES and NEURON_LOGICAL_NC_CONFIG, if they are set, name what "
            "this host has.",
        )
        return
    total = asked.steps.of("total")["num_cores"]
    visible = asked.steps.of("visible").get("num_cores", total)
    logical, source = _logical(machine, row)
    facts = {"num_cores": total, "num_visible": visible, "logical": logical, "logical_by": source}
    share = "" if visible == total else f", of which this environment may use {visible}"
    grouped = f" ({logical} physical cores each)" if logical > 1 else ""
    num_files = len(machine.names("/dev/neuron[0-9]*"))
    wanted = row.num_cores(logical) if row else total
    is_part = row is not None and 0 < num_files < row.num_devices
    if row is not None and is_part:  # a container has the cores of the devices that it was given
        wanted = wanted * num_files // row.num_devices
    if total == wanted or not num_files:
        says = f"{counted(total, 'NeuronCore')}{grouped}{share}"
        if total:
            yield Finding.ok("neuron.cores", says, facts=facts)
        else:
            mend = "Look at the driver, above: the runtime sees no device."
            yield need.unmet("neuron.cores", says, mend, facts=facts)
        return
    yield Finding.warning(
        "neuron.cores",
        f"the runtime counts {counted(total, 'NeuronCore')}{share}, and this "
        f"{'container' if is_part else 'instance'} has {wanted}",
        f"Count anew by {LOGICAL_CORES}, which says how many physical cores are one, and by "
        "the devices that a container was given.",
        facts=facts | {"num_expected": wanted},
    )


def _unanswered(asked: Asked) -> Iterator[Finding]:
    """Questions that a runtime which is well answers without a core."""
    failures = {
        step: failed
        for step in ("version", "visible")
        if (failed := asked.failure_in_full(step)) is not None
    }
    if failures:
        named = "; ".join(f"{step}: {failed}" for step, failed in failures.items())
        yield Finding.warning(
            "neuron.answers",
            f"the runtime does not answer what it is asked without a core ({named})",
            "Install driver (aws-neuronx-dkms) and runtime (aws-neuronx-runtime-lib) of one "
            "release; NEURON_RT_VISIBLE_CORES and NEURON_RT_NUM_CORES, if set, name what this host "
            "has.",
            facts={"steps": failures},
        )


def _logical(machine: Machine, row: Instance | None) -> tuple[int, str]:
    """(physical cores of a logical one, who says so). The variable goes before the host's file."""
    text = machine.environment.get(LOGICAL_CORES, "")
    if text.isdecimal() and int(text):
        return int(text), "environment"
    name, _, value = (machine.read(_LOGICAL_FILE) or "").partition("=")
    if name == LOGICAL_CORES and value.isdecimal() and int(value):
        return int(value), _LOGICAL_FILE
    return (row.logical_default if row else 1), "default"


def _users(machine: Machine) -> Iterator[Finding]:
    users = device_users(machine)
    if not users:
        return
    names = {user["pid"]: user["name"] for each in users.values() for user in each}
    words = [f"{name} ({pid})" for pid, name in list(names.items())[:_USERS_MAX]]
    more = f" and {len(names) - _USERS_MAX} more" if len(names) > _USERS_MAX else ""
    yield Finding.note(
        "neuron.users",
        f"{counted(len(users), 'device')} {'is' if len(users) == 1 else 'are'} open in other "
        f"processes: {', '.join(words)}{more}",
        "Their cores are theirs until they end: name others with NEURON_RT_VISIBLE_CORES.",
        facts={"devices": {str(device): found for device, found in users.items()}},
    )
