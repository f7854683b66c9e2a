"""NVIDIA GPUs: devices, driver, CUDA's runtime library, torch's build, memory between processes.

Sources: Linux's /sys and /dev, and CUDA itself, asked in a process of its own.
"""

from collections.abc import Iterator

from neuron_di.config import DoctorOptions
from neuron_di.doctor.amounts import counted
from neuron_di.doctor.finding import Fact, Finding, Grade
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
    if not on_bus and not files:
        is_wanted = options.device == "cuda"
        yield Finding(
            check="cuda.devices",
            grade=Grade.FAILED if is_wanted else Grade.NOTE,
            says="this machine has no NVIDIA GPU",
            mend="Use a machine with one, or --device auto." if is_wanted else "",
        )
        return
    is_wanted = options.device == "cuda"
    yield from _devices(machine, on_bus, files, is_wanted=is_wanted)
    asked = ask(machine, options, module="cuda_probe", timeout_s=_PROBE_TIMEOUT_S)
    yield _runtime(asked, is_wanted=is_wanted)
    yield from _ipc(asked)
    yield _torch(asked, is_wanted=is_wanted)
    yield from _capability(asked, is_wanted=is_wanted)
    yield _triton(asked, is_wanted=is_wanted)


def _on_bus(machine: Machine) -> list[str]:
    found = []
    for path in machine.names("/sys/bus/pci/devices/*"):
        is_display = (machine.read(f"{path}/class") or "").startswith(_DISPLAY)
        if is_display and machine.read(f"{path}/vendor") == _NVIDIA:
            found.append(path.rpartition("/")[2])
    return found


def _bad(*, is_wanted: bool) -> Grade:
    """A container may see a GPU that nobody means to use: only --device cuda needs it."""
    return Grade.FAILED if is_wanted else Grade.WARNING


def _or_without(mend: str, *, is_wanted: bool) -> str:
    return mend if is_wanted else f"{mend} To serve without it: --device cpu."


def _devices(
    machine: Machine, on_bus: list[str], files: list[str], *, is_wanted: bool
) -> Iterator[Finding]:
    driver = machine.read(_DRIVER_FILE)
    facts: dict[str, Fact] = {"addresses": list(on_bus), "driver": driver or ""}
    count = len(files)
    if not files:
        yield Finding(
            check="cuda.devices",
            grade=_bad(is_wanted=is_wanted),
            says=f"the PCI bus has {counted(len(on_bus), 'NVIDIA GPU')}, and there is no "
            "/dev/nvidia0",
            mend=_or_without(
                "Install and load NVIDIA's driver; a container needs NVIDIA's container toolkit "
                "(--gpus all)."
                if driver is None
                else "Give the container the GPUs: --gpus all, with NVIDIA's container toolkit.",
                is_wanted=is_wanted,
            ),
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


def _runtime(asked: Asked, *, is_wanted: bool) -> Finding:
    found, failed = asked.steps.of("runtime"), asked.failure("runtime")
    if failed is not None or not found:
        return Finding(
            check="cuda.runtime",
            grade=_bad(is_wanted=is_wanted),
            says=f"CUDA does not start: {failed or asked.words or 'no answer'}",
            mend=_or_without(
                "Install a driver that is as new as the CUDA library (nvidia-smi shows what it "
                "takes), or a library for the driver: pip install nvidia-cuda-runtime-cu12.",
                is_wanted=is_wanted,
            ),
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


def _torch(asked: Asked, *, is_wanted: bool) -> Finding:
    found, failed = asked.steps.of("torch"), asked.failure("torch")
    bad = _bad(is_wanted=is_wanted)
    if failed is not None or not found:
        return Finding(
            check="cuda.torch",
            grade=bad,
            says=f"torch cannot be asked: {failed or asked.words or 'no answer'}",
            mend=_or_without("pip install torch.", is_wanted=is_wanted),
        )
    if found["cuda"] is None:
        return Finding(
            check="cuda.torch",
            grade=bad,
            says=f"torch {found['version']} is built without CUDA",
            mend=_or_without(
                "Install a build with CUDA, from the index that https://pytorch.org names for "
                "your driver, and not from the CPU index.",
                is_wanted=is_wanted,
            ),
            facts=found,
        )
    if not found["is_available"]:
        return Finding(
            check="cuda.torch",
            grade=bad,
            says=f"torch {found['version']} is built for CUDA {found['cuda']} and sees no GPU",
            mend=_or_without(
                "Update NVIDIA's driver, or install a torch for the CUDA that the driver takes.",
                is_wanted=is_wanted,
            ),
            facts=found,
        )
    return Finding.ok(
        "cuda.torch", f"torch {found['version']} with CUDA {found['cuda']}", facts=found
    )


def _capability(asked: Asked, *, is_wanted: bool) -> Iterator[Finding]:
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
    yield Finding(
        check="cuda.capability",
        grade=Grade.WARNING if others else _bad(is_wanted=is_wanted),
        says=f"--device cuda needs compute capability {_dotted(CAPABILITY_MIN)} or higher "
        f"(Ampere); here: {listed}",
        mend=f"Leave the older ones out: --cuda-devices {','.join(others)}."
        if others
        else _or_without("Use a newer GPU.", is_wanted=is_wanted),
        facts=facts,
    )


def _triton(asked: Asked, *, is_wanted: bool) -> Finding:
    found, failed = asked.steps.of("triton"), asked.failure("triton")
    if failed is not None or not found:
        return Finding(
            check="cuda.triton",
            grade=_bad(is_wanted=is_wanted),
            says=f"Triton cannot be imported: {failed or asked.words or 'no answer'}",
            mend=_or_without("pip install '.[cuda]' in neuron-di's folder.", is_wanted=is_wanted),
        )
    return Finding.ok("cuda.triton", f"Triton {found['version']}", facts=found)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
