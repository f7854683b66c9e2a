"""NVIDIA GPUs: devices, driver, CUDA's runtime library, torch's build, memory between processes.

Sources: Linux's /sys and /dev, and CUDA itself, asked in a process of its own.
"""

from collections.abc import Iterator

from neuron_di.config import DoctorOptions
from neuron_di.doctor.finding import Fact, Finding, Grade
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.neuron_asked import Asked, ask

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # the class of graphics and of 3D controllers
_PROBE_TIMEOUT_S = 45.0  # torch's CUDA build is large
_DRIVER_FILE = "/sys/module/nvidia/version"


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Whether there are GPUs, and what a server finds when it wants them."""
    if options.device not in ("auto", "cuda"):
        return
    on_bus = _on_bus(machine)
    files = machine.names("/dev/nvidia[0-9]*")
    if not on_bus and not files:
        is_wanted = options.device == "cuda"
        yield Finding(
            check="cuda.devices",
            grade=Grade.FAILED if is_wanted else Grade.NOTE,
            says="this machine has no NVIDIA GPU",
            mend="Use a machine with one, or --device auto." if is_wanted else "",
        )
        return
    yield from _devices(machine, on_bus, files)
    asked = ask(machine, options, module="cuda_probe", timeout_s=_PROBE_TIMEOUT_S)
    yield _runtime(asked)
    yield from _ipc(asked)
    yield _torch(asked, is_wanted=options.device == "cuda")


def _on_bus(machine: Machine) -> list[str]:
    found = []
    for path in machine.names("/sys/bus/pci/devices/*"):
        is_display = (machine.read(f"{path}/class") or "").startswith(_DISPLAY)
        if is_display and machine.read(f"{path}/vendor") == _NVIDIA:
            found.append(path.rpartition("/")[2])
    return found


def _devices(machine: Machine, on_bus: list[str], files: list[str]) -> Iterator[Finding]:
    driver = machine.read(_DRIVER_FILE)
    facts: dict[str, Fact] = {"addresses": list(on_bus), "driver": driver or ""}
    count = len(files)
    if not files:
        yield Finding(
            check="cuda.devices",
            grade=Grade.FAILED,
            says=f"the PCI bus has {len(on_bus)} NVIDIA GPUs, and there is no /dev/nvidia0",
            mend="Install and load NVIDIA's driver; a container needs NVIDIA's container toolkit "
            "(--gpus all)."
            if driver is None
            else "Give the container the GPUs: --gpus all, with NVIDIA's container toolkit.",
            facts=facts,
        )
        return
    of = f" of {len(on_bus)}" if count < len(on_bus) else ""
    yield Finding(
        check="cuda.devices",
        grade=Grade.OK,
        says=f"{count}{of} NVIDIA GPUs, driver {driver or 'of unknown version'}",
        facts=facts | {"num_files": count},
    )


def _runtime(asked: Asked) -> Finding:
    found, failed = asked.steps.of("runtime"), asked.failure("runtime")
    if failed is not None or not found:
        return Finding(
            check="cuda.runtime",
            grade=Grade.FAILED,
            says=f"CUDA does not start: {failed or asked.words or 'no answer'}",
            mend="Install a driver that is as new as the CUDA library (nvidia-smi shows what it "
            "takes), or a library for the driver: pip install nvidia-cuda-runtime-cu12.",
        )
    major, minor = divmod(int(found["version"]), 1000)
    return Finding(
        check="cuda.runtime",
        grade=Grade.OK,
        says=f"CUDA {major}.{minor // 10} sees {found['num_devices']} devices",
        facts=found,
    )


def _ipc(asked: Asked) -> Iterator[Finding]:
    found = asked.steps.of("ipc")
    if not found:
        return
    failed = asked.failure("ipc")
    num_devices = asked.steps.of("runtime")["num_devices"]
    if failed is not None or len(found["shares"]) < num_devices:
        yield Finding(
            check="cuda.ipc",
            grade=Grade.WARNING,
            says=f"processes cannot share device memory here: {failed or 'CUDA says so'}",
            mend="KV moves by way of the host (--transfer shm,tcp). In a virtual machine or with "
            "MIG this may be all that there is.",
            facts=found,
        )
    else:
        yield Finding(
            check="cuda.ipc",
            grade=Grade.OK,
            says="processes can share device memory"
            + (
                f"; {len(found['apart'])} pairs of GPUs do not read each other"
                if found["apart"]
                else ""
            ),
            facts=found,
        )


def _torch(asked: Asked, *, is_wanted: bool) -> Finding:
    found, failed = asked.steps.of("torch"), asked.failure("torch")
    bad = Grade.FAILED if is_wanted else Grade.WARNING
    if failed is not None or not found:
        return Finding(
            check="cuda.torch",
            grade=bad,
            says=f"torch cannot be asked: {failed or asked.words or 'no answer'}",
            mend="pip install torch.",
        )
    if found["cuda"] is None:
        return Finding(
            check="cuda.torch",
            grade=bad,
            says=f"torch {found['version']} is built without CUDA",
            mend="Install a build with CUDA: pip install torch from PyPI, not from the CPU index.",
            facts=found,
        )
    if not found["is_available"]:
        return Finding(
            check="cuda.torch",
            grade=bad,
            says=f"torch {found['version']} is built for CUDA {found['cuda']} and sees no GPU",
            mend="Update NVIDIA's driver, or install a torch for the CUDA that the driver takes.",
            facts=found,
        )
    return Finding(
        check="cuda.torch",
        grade=Grade.OK,
        says=f"torch {found['version']} with CUDA {found['cuda']}",
        facts=found,
    )
