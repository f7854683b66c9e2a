"""The variables that the Neuron runtime and libfabric read: what is set, and what it does.

Sources: AWS's guide to the runtime's configuration, its header of send and receive, its
disaggregated inference tutorials; libfabric's manual of the EFA provider.
"""

from collections.abc import Iterator, Mapping

from neuron_di.config import DoctorOptions
from neuron_di.config.option import PORT_MAX
from neuron_di.doctor.finding import Finding, Need
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.neuron_asked import expects_neuron
from neuron_di.doctor.neuron_instances import INSTANCES
from neuron_di.doctor.pci import instance_type
from neuron_di.doctor.reserved_ports import outgoing_ports, reserve_mend, reserved_ports
from neuron_di.errors import ConfigError
from neuron_di.neuron_cores import (
    LOGICAL_CORES,
    NUM_CORES,
    SEND_RECEIVE_DEFAULTS,
    SHARED_MEMORY_OF_EFA,
    VISIBLE_CORES,
    parse_cores,
)
from neuron_di_bindings.nrt import ENABLED_VARIABLE, PORT_VARIABLE

ROOT_COMM = "NEURON_RT_ROOT_COMM_ID"
_TIMEOUT = "NEURON_RT_EXEC_TIMEOUT"
_LOG_LEVEL = "NEURON_RT_LOG_LEVEL"
_LOG_LEVELS = ("QUIET", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE")
_ASYNC = "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"
_DEFAULTS = {**SEND_RECEIVE_DEFAULTS, SHARED_MEMORY_OF_EFA: "0"}


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Cores, send and receive, timeouts and logs, libfabric."""
    if not expects_neuron(machine, options):
        return
    environment = machine.environment
    yield from _cores(machine)
    yield from _send_receive(machine, is_wanted="nrt" in options.kv_transfer.transfer)
    yield from _runtime(environment)
    yield from _libfabric(environment)


def _cores(machine: Machine) -> Iterator[Finding]:
    environment = machine.environment
    visible, wanted = environment.get(VISIBLE_CORES), environment.get(NUM_CORES)
    row = INSTANCES.get(instance_type(machine))
    logical = environment.get(LOGICAL_CORES, "")
    if visible:
        try:
            cores = parse_cores(visible)
        except ConfigError as error:
            yield Finding.failed(
                "neuron.visible_cores", error.message, "Write 0-15, 3, or a list of both."
            )
        else:
            yield Finding.note(
                "neuron.visible_cores",
                f"{VISIBLE_CORES}={visible}: {len(cores)} cores may be used",
                facts={"cores": list(cores)},
            )
    if wanted and not wanted.isdecimal():
        yield Finding.failed(
            "neuron.num_cores", f"{NUM_CORES}={wanted} is no number of cores", "Write 8."
        )
    elif wanted and visible:
        yield Finding.note("neuron.num_cores", f"{NUM_CORES} does nothing beside {VISIBLE_CORES}")
    if logical and logical not in ("1", "2"):
        yield Finding.failed(
            "neuron.logical_cores",
            f"{LOGICAL_CORES}={logical}, and a logical core is 1 or 2 physical ones",
            f"Unset {LOGICAL_CORES}, or set what the model is compiled for.",
        )
    elif logical and row is not None and int(logical) != row.logical_default:
        says = (
            f"{LOGICAL_CORES}={logical}, and {row.name} has {row.logical_default} by default: "
            "models are compiled for one of them"
        )
        if row.logical_default > 1:
            mend = "Set the same for compile, serve and worker."
            yield Finding.note("neuron.logical_cores", says, mend)
        else:
            mend = f"Unset {LOGICAL_CORES}: cores of {row.family} are not joined."
            yield Finding.warning("neuron.logical_cores", says, mend)


def _send_receive(machine: Machine, *, is_wanted: bool) -> Iterator[Finding]:
    """The gate, the port at which processes meet, and libfabric's shared memory."""
    environment = machine.environment
    row = INSTANCES.get(instance_type(machine))
    reaches_efa = row is None or bool(row.efa_of_device) or is_wanted
    unset = [name for name in _DEFAULTS if name not in environment]
    if unset and reaches_efa:  # elsewhere nothing is sent between devices
        exports = " ".join(f"{name}={_DEFAULTS[name]}" for name in unset)
        yield Finding.note(
            "neuron.unset",
            f"not set: {', '.join(unset)}",
            "`serve` sets them for its workers. For a `worker` that is started by hand: "
            f"export {exports}.",
            facts={"unset": list(unset)},
        )
    gate = environment.get(ENABLED_VARIABLE, "1")
    if gate != "1":
        yield Need(is_wanted).unmet(
            "neuron.send_receive_gate",
            f"{ENABLED_VARIABLE}={gate} turns send and receive between devices off: KV moves "
            "by way of the host",
            f"Unset it for `serve`, or set it to 1: export {ENABLED_VARIABLE}=1.",
        )
    yield from _port(machine)
    shared = environment.get(SHARED_MEMORY_OF_EFA, "0")
    if shared.lower() not in ("0", "no", "off", "false"):
        yield Finding.warning(
            "neuron.efa_shared_memory",
            f"with {SHARED_MEMORY_OF_EFA}={shared} what goes from device to device of one "
            "host may arrive wrong",
            f"export {SHARED_MEMORY_OF_EFA}=0. `serve` does so for its workers, whatever it was.",
        )
    if (root := environment.get(ROOT_COMM)) and not root.rpartition(":")[2].isdecimal():
        yield Finding.warning(
            "neuron.root_comm", f"{ROOT_COMM} is no IP:PORT", "Write 10.1.0.5:62182."
        )


def _port(machine: Machine) -> Iterator[Finding]:
    default = _DEFAULTS[PORT_VARIABLE]
    port = machine.environment.get(PORT_VARIABLE, default)
    if not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
        yield Finding.failed(
            "neuron.bootstrap_port",
            f"{PORT_VARIABLE}={port} is no TCP port",
            f"export {PORT_VARIABLE}={default}, the same for all workers on all hosts.",
        )
        return
    outgoing = outgoing_ports(machine)
    if int(port) in outgoing and int(port) not in reserved_ports(machine):
        yield Finding.note(
            "neuron.bootstrap_port",
            f"the kernel may give port {port}, at which workers' devices meet, to any outgoing "
            "connection",
            f"{reserve_mend(machine, [int(port)])}.",
            facts={"port": int(port), "first": outgoing.start, "last": outgoing[-1]},
        )


def _runtime(environment: Mapping[str, str]) -> Iterator[Finding]:
    timeout, level = environment.get(_TIMEOUT), environment.get(_LOG_LEVEL)
    if timeout and not timeout.isdecimal():
        yield Finding.warning(
            "neuron.exec_timeout",
            f"{_TIMEOUT}={timeout} is no number of seconds",
            f"export {_TIMEOUT}=600 for very long contexts, or unset it: 30 s.",
        )
    if level and level.upper() not in _LOG_LEVELS:
        yield Finding.warning(
            "neuron.log_level",
            f"{_LOG_LEVEL}={level} is none of {', '.join(_LOG_LEVELS)}",
            f"export {_LOG_LEVEL}=INFO to see what the runtime does, or unset it.",
        )
    if environment.get(_ASYNC) not in (None, "", "0"):
        yield Finding.warning(
            "neuron.async_exec",
            f"{_ASYNC} lets steps run on after their call, and SDK 2.32 has no such mode any more",
            f"Unset {_ASYNC}: AWS's connector wanted it, and this server does not.",
        )


def _libfabric(environment: Mapping[str, str]) -> Iterator[Finding]:
    provider = environment.get("FI_PROVIDER")
    # libfabric's filter: names, or after a ^ names that are left out.
    names = (provider or "").removeprefix("^").split(",")
    if provider and ("efa" in names) == provider.startswith("^"):
        yield Finding.warning(
            "neuron.fi_provider",
            f"FI_PROVIDER={provider} keeps libfabric from EFA",
            "Unset FI_PROVIDER, or set it to efa.",
        )
    if environment.get("FI_EFA_USE_DEVICE_RDMA") == "0":
        yield Finding.warning(
            "neuron.fi_rdma",
            "FI_EFA_USE_DEVICE_RDMA=0 keeps EFA from device memory",
            "Unset FI_EFA_USE_DEVICE_RDMA, or set it to 1.",
        )
    if environment.get("FI_HMEM_DISABLE_P2P", "0").lower() in ("1", "yes", "on", "true"):
        yield Finding.warning(
            "neuron.fi_p2p",
            "FI_HMEM_DISABLE_P2P keeps EFA from device memory, which libfabric reaches in no other "
            "way",
            "Unset FI_HMEM_DISABLE_P2P.",
        )
