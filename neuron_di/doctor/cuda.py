"""NVIDIA GPUs: devices, driver, CUDA's runtime library, torch's build, memory between processes.

Sources: Linux's /sys and /dev, and CUDA itself, asked in a process of its own.
"""

from collections.abc import Iterator

from neuron_di.config import DoctorOptions
from neuron_di.doctor.amounts import counted
from neuron_di.doctor.finding import Fact, Finding, Need
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.neuron_asked import Asked, ask

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # the class of graphics and of 3D controllers
CAPABILITY_MIN = (8, 0)  # as the backend has it, whose file loads torch
_PROBE_TIMEOUT_S = 45.0  # torch's CUDA build is large
_DRIVER_FILE = "/sys/module/nvidia/version"


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Whether there are GPUs, and what a server finds when it wants them."""
    if options.device not in ("auto", "cuda"):
        return
    on_bus = _on_bus(machine)
    files = machine.names("/dev/nvidia[0-9]*")
    # A container may see a GPU that nobody means to use.
    need = Need(options.device == "cuda", "To serve without it: --device cpu.")
    if not on_bus and not files:
        says = "this machine has no NVIDIA GPU"
        if need.is_needed:
            mend = "Use a machine with one, or --device auto."
            yield Finding.failed("cuda.devices", says, mend)
        else:
            yield Finding.note("cuda.devices", says)
        return
    yield from _devices(machine, on_bus, files, need)
    asked = ask(machine, options, module="cuda_probe", timeout_s=_PROBE_TIMEOUT_S)
    yield _runtime(asked, need)
    yield from _ipc(asked)
    yield _torch(asked, need)
    yield from _capability(asked, need)
    yield _triton(asked, need)


def _on_bus(machine: Machine) -> list[str]:
    found = []
    for path in machine.names("/sys/bus/pci/devices/*"):
        is_display = (machine.read(f"{path}/class") or "").startswith(_DISPLAY)
        if is_display and machine.read(f"{path}/vendor") == _NVIDIA:
            found.append(path.rpartition("/")[2])
    return found


def _devices(
    machine: Machine, on_bus: list[str], files: list[str], need: Need
) -> Iterator[Finding]:
    driver = machine.read(_DRIVER_FILE)
    facts: dict[str, Fact] = {"addresses": list(on_bus), "driver": driver or ""}
    count = len(files)
    if not files:
        yield need.unmet(
            "cuda.devices",
            f"the PCI bus has {counted(len(on_bus), 'NVIDIA GPU')}, and there is no /dev/nvidia0",
            "Install and load NVIDIA's driver; a container needs NVIDIA's container toolkit "
            "(--gpus all)."
            if driver is None
            else "Give the container the GPUs: --gpus all, with NVIDIA's container toolkit.",
            facts=facts,
        )
        return
    of = f" of {len(on_bus)}" if count < len(on_bus) else ""
    yield Finding.ok(
        "cuda.devices",
        f"{count}{of} NVIDIA GPU{'s' * (count != 1 or bool(of))}, "
        f"driver {driver or 'of unknown version'}",
        facts=facts | {"num_files": count},
    )


def _runtime(asked: Asked, need: Need) -> Finding:
    found, failed = asked.steps.of("runtime"), asked.failure("runtime")
    if failed is not None or not found:
        return need.unmet(
            "cuda.runtime",
            f"CUDA does not start: {failed or asked.words or 'no answer'}",
            "Install a driver that is as new as the CUDA library (nvidia-smi shows what it "
            "takes), or a library for the driver: pip install nvidia-cuda-runtime-cu12.",
        )
    major, minor = divmod(int(found["version"]), 1000)
    return Finding.ok(
        "cuda.runtime",
        f"CUDA {major}.{minor // 10} sees {counted(found['num_devices'], 'device')}",
        facts=found,
    )


def _ipc(asked: Asked) -> Iterator[Finding]:
    found = asked.steps.of("ipc")
    if not found:
        return
    failed = asked.failure("ipc")
    num_devices = asked.steps.of("runtime")["num_devices"]
    if failed is not None or len(found["shares"]) < num_devices:
        yield Finding.warning(
            "cuda.ipc",
            f"processes cannot share device memory here: {failed or 'CUDA says so'}",
            "KV moves by way of the host (--transfer shm,tcp). In a virtual machine or with "
            "MIG this may be all that there is.",
            facts=found,
        )
    else:
        yield Finding.ok(
            "cuda.ipc",
            "processes can share device memory"
            + (
                f"; of {counted(len(found['apart']), 'pair')} of GPUs neither reads the other"
                if found["apart"]
                else ""
            ),
            facts=found,
        )


def _torch(asked: Asked, need: Need) -> Finding:
    found, failed = asked.steps.of("torch"), asked.failure("torch")
    if failed is not None or not found:
        return need.unmet(
            "cuda.torch",
            f"torch cannot be asked: {failed or asked.words or 'no answer'}",
            "pip install torch.",
        )
    if found["cuda"] is None:
        return need.unmet(
            "cuda.torch",
            f"torch {found['version']} is built without CUDA",
            "Install a build with CUDA, from the index that https://pytorch.org names for "
            "your driver, and not from the CPU index.",
            facts=found,
        )
    if not found["is_available"]:
        return need.unmet(
            "cuda.torch",
            f"torch {found['version']} is built for CUDA {found['cuda']} and sees no GPU",
            "Update NVIDIA's driver, or install a torch for the CUDA that the driver takes.",
            facts=found,
        )
    return Finding.ok(
        "cuda.torch", f"torch {found['version']} with CUDA {found['cuda']}", facts=found
    )


def _capability(asked: Asked, need: Need) -> Iterator[Finding]:
    """Which GPUs can do what the kernels need."""
    found = asked.steps.of("torch")
    names: list[str] = found.get("names", [])
    capabilities = [(each[0], each[1]) for each in found.get("capabilities", [])]
    if not capabilities:
        return
    old = [number for number, each in enumerate(capabilities) if each < CAPABILITY_MIN]
    listed = ", ".join(
        f"GPU {number} ({name}) {_dotted(each)}"
        for number, (name, each) in enumerate(zip(names, capabilities, strict=True))
    )
    facts: dict[str, Fact] = {"capabilities": [list(each) for each in capabilities]}
    facts["too_old"] = list(old)
    if not old:
        yield Finding.ok("cuda.capability", f"compute capability: {listed}", facts=facts)
        return
    others = [str(number) for number in range(len(capabilities)) if number not in old]
    words = (
        f"--device cuda needs compute capability {_dotted(CAPABILITY_MIN)} or higher "
        f"(Ampere); here: {listed}"
    )
    if others:
        mend = f"Leave the older ones out: --cuda-devices {','.join(others)}."
        yield Finding.warning("cuda.capability", words, mend, facts=facts)
    else:
        yield need.unmet("cuda.capability", words, "Use a newer GPU.", facts=facts)


def _triton(asked: Asked, need: Need) -> Finding:
    found, failed = asked.steps.of("triton"), asked.failure("triton")
    if failed is not None or not found:
        return need.unmet(
            "cuda.triton",
            f"Triton cannot be imported: {failed or asked.words or 'no answer'}",
            "pip install '.[cuda]' in neuron-di's folder.",
        )
    return Finding.ok("cuda.triton", f"Triton {found['version']}", facts=found)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
