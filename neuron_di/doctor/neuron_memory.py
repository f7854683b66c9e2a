"""What one free NeuronCore's memory can do: be written and read, be reached by EFA, be sent.

In a process of its own, on a core that nobody has; a server that runs notices nothing.
"""

from collections.abc import Iterator
from pathlib import Path

from neuron_di.clock import Deadline
from neuron_di.config import DoctorOptions
from neuron_di.doctor.finding import Fact, Finding, Grade
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.neuron_asked import (
    Asked,
    ask_library,
    expects_neuron,
    needs_neuron,
    try_cores,
)
from neuron_di.doctor.neuron_instances import INSTANCES, Instance
from neuron_di.doctor.pci import efa_adapters, instance_type
from neuron_di.errors import ConfigError
from neuron_di.neuron_cores import bootstrap_locks_of_others
from neuron_di_bindings.nrt import missing_variables

_TIMEOUT_S = 90.0  # all attempts
_LOUDER = "with NEURON_RT_LOG_LEVEL=INFO the runtime says more."


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Memory, its registration, and send and receive, of the first core that can be had."""
    if not expects_neuron(machine, options):
        return
    if not needs_neuron(machine, options):
        yield Finding.skipped("neuron.memory", "no Neuron device is in /dev here")
        return
    library = ask_library(machine, options)
    if library.has_timed_out:
        yield Finding.skipped("neuron.memory", "the runtime hangs when it is asked without a core")
        return
    total = library.steps.of("total").get("num_cores", 0)
    if not total:
        yield Finding.skipped("neuron.memory", "the runtime counts no NeuronCores")
        return
    taken = []
    try:
        for lnc, asked in try_cores(machine, options, total, Deadline.after(_TIMEOUT_S)):
            if asked.is_taken:
                taken.append(lnc)
            else:
                yield from _of_core(machine, options, lnc, asked)
                return
    except ConfigError as error:
        yield Finding.skipped("neuron.memory", f"no core may be used: {error.message}")
        return
    tried = ", ".join(map(str, taken))
    yield Finding.skipped(
        "neuron.memory", f"other processes have the NeuronCores that were tried ({tried})"
    )


def _of_core(machine: Machine, options: DoctorOptions, lnc: int, asked: Asked) -> Iterator[Finding]:
    steps = asked.steps
    if not asked.did("runtime"):
        yield Finding.failed(
            "neuron.memory",
            f"the runtime does not start on NeuronCore {lnc}: {asked.why_not('runtime')}",
            "Name another core with NEURON_RT_VISIBLE_CORES, in case a process has this one; "
            "load the driver (aws-neuronx-dkms) of the runtime's release. With "
            "NEURON_RT_LOG_LEVEL=INFO the runtime says more.",
            facts={"core": lnc},
        )
        return
    if (failed := asked.failure("memory")) is not None:
        yield Finding.failed(
            "neuron.memory",
            f"the memory of NeuronCore {lnc} does not do: {failed}",
            "Reload the driver: sudo rmmod neuron && sudo modprobe neuron; if it stays, stop "
            "and start the instance.",
            facts={"core": lnc},
        )
        return
    memory_bytes = steps.of("runtime")["memory_bytes"]
    yield Finding.ok(
        "neuron.memory",
        f"NeuronCore {lnc} has {memory_bytes / (1 << 30):.2f} GiB; a pattern went there and back",
        facts={"core": lnc} | steps.of("runtime"),
    )
    row = INSTANCES.get(instance_type(machine))
    yield from _registration(machine, row, lnc, asked)
    yield from _send_receive(machine, options, row, lnc, asked)
    yield from _closing(lnc, asked)


def _closing(lnc: int, asked: Asked) -> Iterator[Finding]:
    """What came of giving the core back."""
    failures = {
        step: failed
        for step in ("send_receive_close", "close")
        if (failed := asked.failure(step)) is not None
    }
    if failures:
        yield Finding.warning(
            "neuron.close",
            f"NeuronCore {lnc} is not given back in order: {'; '.join(failures.values())}",
            "Install driver and runtime of one release. A worker that does not end in order "
            "may keep its cores a while.",
            facts={"core": lnc, "steps": failures},
        )


def _registration(
    machine: Machine, row: Instance | None, lnc: int, asked: Asked
) -> Iterator[Finding]:
    """Whether an adapter can reach the memory: which is beside it, and a dma-buf of it."""
    attached = asked.steps.of("efa").get("address")
    no_dmabuf = asked.failure("dmabuf")
    facts: dict[str, Fact] = {"core": lnc, "efa": attached, "dmabuf": no_dmabuf is None}
    if asked.failure("efa") is None and attached is None:
        says = "the runtime knows no EFA adapter beside the device's memory"
        if row is not None and row.efa_of_device:
            mend = "Attach EFA adapters to the instance when it is launched, all that it can have."
            yield Finding.warning("neuron.registration", says, mend, facts=facts)
        else:
            yield Finding.note("neuron.registration", says, facts=facts)
        return
    present = [adapter.address for adapter in efa_adapters(machine)]
    if attached is not None and present and attached not in present:
        yield Finding.failed(
            "neuron.registration",
            f"the EFA adapter {attached} belongs to NeuronCore {lnc}'s device, and this host "
            'does not have it: transfers end with "No matching NIC"',
            "Launch the instance with all of its EFA adapters: one interface for each network "
            "card.",
            facts=facts | {"present": present},
        )
        return
    if no_dmabuf is not None:
        yield Finding.warning(
            "neuron.registration",
            f"the runtime gives no dma-buf of device memory: {no_dmabuf}",
            "Install driver and runtime of one release; libfabric then falls back to an older "
            "way of registration, where the kernel has it.",
            facts=facts,
        )
        return
    beside = f"EFA adapter {attached} sits by it" if attached else "which EFA sits by it is unknown"
    yield Finding.ok(
        "neuron.registration", f"the runtime exports device memory (dma-buf); {beside}", facts=facts
    )


def _send_receive(
    machine: Machine, options: DoctorOptions, row: Instance | None, lnc: int, asked: Asked
) -> Iterator[Finding]:
    is_wanted = "nrt" in options.kv_transfer.transfer
    failed = asked.failure_in_full("limits") or asked.failure_in_full("send_receive")
    if failed is None and "send_receive" in asked.steps.found:
        limits = asked.steps.of("limits")
        yield Finding.ok(
            "neuron.send_receive",
            f"send and receive opens on NeuronCore {lnc}: at most "
            f"{limits['communicators_max']} connections, {limits['pending_max']} requests on each",
            facts={"core": lnc} | limits,
        )
        return
    cause, mend = _cause(machine, row, asked)
    has_efa = row is None or bool(row.efa_of_device)
    grade = Grade.WARNING if has_efa else Grade.NOTE
    yield Finding(
        check="neuron.send_receive",
        grade=Grade.FAILED if is_wanted else grade,
        says=f"send and receive does not open on NeuronCore {lnc}: {cause}; the runtime says "
        f"{failed or asked.words}",
        mend=mend,
        facts={"core": lnc, "failed": failed or ""},
    )


def _cause(machine: Machine, row: Instance | None, asked: Asked) -> tuple[str, str]:
    """(the likely cause, the mend). The runtime says FAILURE to all of it."""
    if row is not None and not row.efa_of_device:
        return (
            f"{row.name} has no EFA beside its devices",
            "Leave it so: KV moves by way of the host, with --transfer auto or shm,tcp.",
        )
    gates = [name for name in missing_variables(machine.environment) if _is_set(machine, name)]
    if gates:
        return f"it is switched off ({', '.join(gates)} is wanted)", f"export {gates[0]}."
    if asked.failure("efa") is None and asked.steps.of("efa").get("address") is None:
        return (
            "its memory has no EFA adapter beside it",
            "Let KV move by way of the host: --transfer shm,tcp."
            + " Or launch the instance with all of its EFA adapters." * (row is not None),
        )
    if locks := bootstrap_locks_of_others(Path(machine.root, "tmp")):
        names = ", ".join(Path(path).name for path in locks)
        return (
            f"there is a lock file of another user in /tmp: {names}",
            "If no process uses it, one that was killed left it behind: delete it.",
        )
    return (
        "no cause is known",
        f"It needs EFA, /dev/infiniband, a driver and runtime of one release; {_LOUDER}",
    )


def _is_set(machine: Machine, assignment: str) -> bool:
    """Whether the operator set the variable, to something else; unset ones the doctor sets."""
    return assignment.partition("=")[0] in machine.environment
