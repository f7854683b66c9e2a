"""Asking the Neuron runtime without taking part: in processes of their own, on cores that are free.

A process owns its cores alone from nrt_init to its end, so a core that a server has cannot be
taken from it, and one that is free may be wanted by a server any moment: each attempt is short.
Who has a core, the runtime tells nobody; it is tried.
"""

import fcntl
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from neuron_di.clock import Deadline
from neuron_di.config import DoctorOptions
from neuron_di.doctor.finding import Need
from neuron_di.doctor.machine import Machine, last_line
from neuron_di.doctor.neuron_instances import INSTANCES
from neuron_di.doctor.pci import instance_type, neuron_devices
from neuron_di.doctor.steps import Facts, Steps
from neuron_di.neuron_cores import allowed_cores, bootstrap_locks, worker_environment
from neuron_di_bindings.nrt import PATH_VARIABLE, PORT_VARIABLE, NrtStatus

LIBRARY_TIMEOUT_S = 20.0
CORE_TIMEOUT_S = 60.0  # the driver resets a core that was used before
ATTEMPTS_MAX = 8
# In the words of the runtime, or of who called it, where there is no status.
_TAKEN = ("not available - Requested", NrtStatus.EXEC_NC_BUSY.name)
_WORDS_MAX = 300
# The tie is made before anything else: a library that hangs is ended by it, too.
_TIED = (
    "import runpy, sys; from neuron_di_bindings.process import end_with_parent; "
    "end_with_parent(int(sys.argv.pop(1))); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of a process that asked. `words` is the last line that it, or a library, wrote,
    `log` all that it wrote on standard error."""

    steps: Steps
    words: str
    returncode: int
    has_timed_out: bool
    log: str = ""

    @property
    def is_taken(self) -> bool:
        """Whether another process has the core."""
        status = self.steps.of("runtime").get("status")
        said = f"{self.log} {self.steps.of('load').get('failed')}"
        return status == NrtStatus.EXEC_NC_BUSY or any(words in said for words in _TAKEN)

    def failure(self, step: str) -> str | None:
        """Why a step failed, in words; None where it did not, or was never begun."""
        if (failed := self.steps.of(step).get("failed")) is not None:
            return str(failed)
        if self.steps.begun != step:
            return None
        if self.has_timed_out:
            return "it did not come back in time"
        return f"it ended its process with code {self.returncode}"

    def did(self, step: str) -> bool:
        """Whether it took this step, and well."""
        return step in self.steps.found and self.failure(step) is None

    def why_not(self, step: str) -> str:
        """Why it did not, as far as anybody said."""
        return self.failure_in_full(step) or self.words or "no answer"

    def failure_in_full(self, step: str) -> str | None:
        """The same, with the last words of the process: where no later step wrote any."""
        failed = self.failure(step)
        return f"{failed}; {self.words}" if failed and self.words else failed


def expects_neuron(machine: Machine, options: DoctorOptions) -> bool:
    """Whether there is anything to look at: devices, or somebody says that there must be some."""
    if options.device != "auto":
        return options.device == "neuron"
    return needs_neuron(machine, options) or bool(neuron_devices(machine))


def needs_neuron(machine: Machine, options: DoctorOptions) -> bool:
    """Whether a server could mean to use devices: they have files here, or somebody names them.

    The bus and the driver of a host show in its containers, too, as in that of a proxy, which
    needs none: there nothing of Neuron's is wrong that is not here.
    """
    if options.device != "auto":
        return options.device == "neuron"
    is_named = options.libnrt is not None or bool(machine.environment.get(PATH_VARIABLE))
    return is_named or bool(machine.names("/dev/neuron[0-9]*"))


def need_of(machine: Machine, options: DoctorOptions) -> Need:
    """Of Neuron devices."""
    return Need(needs_neuron(machine, options), "To serve without Neuron: --device cpu.")


def ask_library(machine: Machine, options: DoctorOptions) -> Asked:
    """What library there is. Takes no core. One that hangs is asked once in a run."""
    if known := machine.hanging.read():
        return msgspec.json.decode(known, type=Asked)
    asked = ask(machine, options, "library", timeout_s=LIBRARY_TIMEOUT_S)
    if asked.has_timed_out:
        machine.hanging.write(msgspec.json.encode(replace(asked, log="")).decode())
    return asked


def ask(
    machine: Machine,
    options: DoctorOptions,
    *words: str,
    module: str = "nrt_probe",
    environment: Mapping[str, str] | None = None,
    timeout_s: float,
) -> Asked:
    """Run a module of this package in a process of its own, which ends with this one."""
    chosen = {} if options.libnrt is None else {PATH_VARIABLE: options.libnrt}
    environ = dict(machine.environment if environment is None else environment) | chosen
    tied = (sys.executable, "-c", _TIED, str(os.getpid()))
    command = (*tied, f"neuron_di.doctor.{module}", *words)
    with _no_lock_stays(machine):
        ran = replace(machine, environment=environ).run(*command, timeout_s=timeout_s)
    assert ran is not None, "this interpreter is there"
    steps = Steps()
    other = [line for line in ran.stdout.splitlines() if steps.hear(line) is None]
    last = last_line(ran.stderr) or last_line("\n".join(other))
    return Asked(steps, last[-_WORDS_MAX:], ran.returncode, ran.has_timed_out, ran.stderr)


@contextmanager
def _no_lock_stays(machine: Machine) -> Iterator[None]:
    """The rendezvous of older runtimes leaves a lock file that only its maker may take: one that
    was made meanwhile goes, unless somebody holds it. Otherwise root's doctor would keep servers
    of other users from sending and receiving."""
    tmp = Path(machine.root, "tmp")
    folders = (tmp, Path(machine.environment.get("TMPDIR") or tmp))
    before = set(bootstrap_locks(*folders))
    try:
        yield
    finally:
        for path in set(bootstrap_locks(*folders)) - before:
            with suppress(OSError), path.open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def core_environment(
    machine: Machine, cores: range, variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """As `serve` would start a worker on these cores, but for the port at which processes meet:
    that one is a server's. Of further variables those that are empty are not set at all."""
    environ = worker_environment(machine.environment, cores)
    environ = environ | {PORT_VARIABLE: str(_free_port())} | dict(variables or {})
    return {name: value for name, value in environ.items() if value}


def try_cores(
    machine: Machine, options: DoctorOptions, total: int, deadline: Deadline, *, wanted: int = 1
) -> Iterator[tuple[int, Asked]]:
    """Try one core after the other, until so many were not another process's.

    ConfigError where the environment names none of this host.
    """
    for lnc in candidates(machine, total)[:ATTEMPTS_MAX]:
        if deadline.has_passed():
            return
        asked = ask_core(machine, options, lnc, timeout_s=deadline.remaining_s())
        yield lnc, asked
        wanted -= not asked.is_taken
        if not wanted:
            return


def ask_core(
    machine: Machine,
    options: DoctorOptions,
    lnc: int,
    variables: Mapping[str, str] | None = None,
    *,
    timeout_s: float = CORE_TIMEOUT_S,
) -> Asked:
    """Try one core, perhaps with further variables."""
    environ = core_environment(machine, range(lnc, lnc + 1), variables)
    timeout_s = min(CORE_TIMEOUT_S, timeout_s)
    return ask(machine, options, "core", str(lnc), environment=environ, timeout_s=timeout_s)


def candidates(machine: Machine, total: int) -> list[int]:
    """The cores that may be used, the likeliest to be free first.

    `serve` takes them from the first on; so it is the last ones, on devices that no process is
    seen to have open, one of each device before the next.
    """
    allowed = allowed_cores(machine.environment, total)
    row = INSTANCES.get(instance_type(machine))
    num_devices = row.num_devices if row else len(neuron_devices(machine))
    per_device = max(total // num_devices, 1) if num_devices else total
    used = set(device_users(machine))

    def order(lnc: int) -> tuple[bool, int, int]:
        return lnc // per_device in used, per_device - lnc % per_device, -lnc

    return sorted(allowed, key=order)


def device_users(machine: Machine) -> dict[int, list[Facts]]:
    """By device, the processes that are seen to have it open: {"pid", "name"}. Other users'
    processes show only to root."""
    found: dict[int, dict[int, Facts]] = {}
    for path in machine.names("/proc/[0-9]*/fd/*"):
        with suppress(OSError, ValueError):
            target = os.readlink(machine.root / path.lstrip("/"))
            if target.startswith("/dev/neuron"):
                device = int(target.removeprefix("/dev/neuron"))
                pid = int(path.split("/")[2])
                name = machine.read(f"/proc/{pid}/comm") or "?"
                found.setdefault(device, {})[pid] = {"pid": pid, "name": name}
    return {device: list(users.values()) for device, users in sorted(found.items())}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
