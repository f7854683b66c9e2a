"""The Neuron driver, runtime and packages: versions, and whether they belong together.

Sources: AWS's lists of packages per release and the known issues in its release notes
(neuron_releases.py); NIXL's source for what its versions take.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from neuron_di.config import DoctorOptions
from neuron_di.doctor.finding import Fact, Finding, Need
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.neuron_asked import Asked, ask_library, expects_neuron, need_of
from neuron_di.doctor.neuron_devices import DRIVER_FILE
from neuron_di.doctor.neuron_instances import INSTANCES, NEURON_IDS
from neuron_di.doctor.pci import instance_type, neuron_devices
from neuron_di.neuron_cores import RUNTIME_FUNCTIONS, RUNTIME_MAJOR
from neuron_di.neuron_releases import (
    AWS_INDEX,
    INFERENCE_MIN,
    INFERENCE_MIN_SDK,
    numbers_of,
    overflows_at_4_gib,
    sdks_of,
    short,
    why_not_together,
)

_SEND_RECEIVE = "nrt_async_sendrecv_init"
_ATTACHED_EFA = "nrt_get_attached_efa_bdf"
# Which field of Release has the version of a package.
_PARTS = {
    "neuronx-cc": "compiler",
    "torch-neuronx": "torch",
    "neuronx-distributed": "distributed",
    "neuronx-distributed-inference": "inference",
}
# Import names, and a part that an index's empty placeholders of these names do not have.
_NEEDED = {
    "torch-neuronx": ("torch_neuronx", ""),
    "neuronx-distributed-inference": ("neuronx_distributed_inference", "models"),
}
_NIXL_NAMES = ("nixl", "nixl-cu12", "nixl-cu13")
_UPDATE = "Install the driver (aws-neuronx-dkms) and the runtime (aws-neuronx-runtime-lib) of one "
_UPDATE += (
    "release of the SDK, and load the driver anew: sudo rmmod neuron && sudo modprobe neuron."
)


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Driver, runtime, the two of them together, and the Python packages."""
    if not expects_neuron(machine, options):
        return
    driver = machine.read(DRIVER_FILE)
    asked = ask_library(machine, options)
    runtime = str(asked.steps.of("version").get("version", ""))
    need = need_of(machine, options)
    yield from _driver(machine, driver, need)
    yield from _runtime(asked, runtime, need)
    if driver and runtime:
        yield _pair(driver, runtime, _family(machine), need)
    versions = {name: machine.package(name) for name in _PARTS}
    yield from _packages(machine, need)
    yield from _releases(driver, runtime, versions)
    yield from _torch(machine, versions["torch-neuronx"], need)
    yield from _inference(versions["neuronx-distributed-inference"], _family(machine), need)
    yield from _nixl(machine)


def _driver(machine: Machine, driver: str | None, need: Need) -> Iterator[Finding]:
    if driver:
        sdks = sdks_of("driver", driver)
        yield Finding.ok(
            "neuron.driver",
            f"the driver is {driver}{_of(sdks)}",
            facts={"version": driver, "sdks": list(sdks)},
        )
    elif neuron_devices(machine):
        yield need.unmet(
            "neuron.driver",
            "there are Neuron devices, and their driver is not loaded",
            "Install aws-neuronx-dkms, then sudo modprobe neuron. Where it is installed, see "
            "sudo dmesg: it is built for one kernel, and needs that kernel's headers.",
        )


def _runtime(asked: Asked, version: str, need: Need) -> Iterator[Finding]:
    if not asked.did("library"):
        yield need.unmet(
            "neuron.runtime",
            f"the Neuron runtime cannot be loaded: {asked.why_not('library')}",
            "Install aws-neuronx-runtime-lib, or name its file with --libnrt or NEURON_DI_LIBNRT.",
        )
        return
    library = asked.steps.of("library")
    lacks: list[str] = library["lacks"]
    sdks = sdks_of("runtime", version)
    facts: dict[str, Fact] = {
        "version": version,
        "detail": asked.steps.of("version").get("detail", ""),
        "sdks": list(sdks),
        "async_api": library["async_api"],
        "lacks": lacks,
    }
    major = numbers_of(version)[:1]
    if major and major != (RUNTIME_MAJOR,):
        yield need.unmet(
            "neuron.runtime",
            f"the runtime is {version}, and {RUNTIME_MAJOR}.x is supported",
            f"Install aws-neuronx-runtime-lib {RUNTIME_MAJOR}.x.",
            facts=facts,
        )
    elif missing := [name for name in RUNTIME_FUNCTIONS if name in lacks]:
        yield need.unmet(
            "neuron.runtime",
            f"the runtime {version} lacks {', '.join(missing)}",
            "Install a newer aws-neuronx-runtime-lib.",
            facts=facts,
        )
    else:
        words = f"{version}{_of(sdks)}" if version else "of a version that it does not tell"
        yield Finding.ok("neuron.runtime", f"the runtime is {words}", facts=facts)
    yield from _functions(lacks, version)


def _functions(lacks: list[str], version: str) -> Iterator[Finding]:
    """What a server does without, and what that costs."""
    if _SEND_RECEIVE in lacks:
        yield Finding.warning(
            "neuron.functions",
            "the runtime has no send and receive: KV moves by way of the host",
            "Install a newer aws-neuronx-runtime-lib for KV that goes from device to device.",
        )
    if _ATTACHED_EFA in lacks:
        yield Finding.note(
            "neuron.attached_efa",
            "which EFA adapter sits by a device, only runtimes of SDK 2.29 and later tell",
        )
    if version and overflows_at_4_gib(version):
        yield Finding.warning(
            "neuron.tensors",
            "tensors of 4 GiB and more overflow in this runtime",
            "Install a runtime 2.30 or later (SDK 2.28), or keep each KV tensor smaller: a "
            "larger --tp, or a smaller --decode-batch or --context-tokens.",
        )


def _pair(driver: str, runtime: str, family: str, need: Need) -> Finding:
    facts: dict[str, Fact] = {"driver": driver, "runtime": runtime}
    if (why := why_not_together(runtime, driver, family)) is not None:
        return need.unmet(
            "neuron.pair",
            f"the runtime {runtime} does not start with the driver {driver}: {why}",
            _UPDATE,
            facts=facts,
        )
    of_driver, of_runtime = sdks_of("driver", driver), sdks_of("runtime", runtime)
    if of_driver and of_runtime and not set(of_driver) & set(of_runtime):
        return Finding.warning(
            "neuron.pair",
            f"the driver is of SDK {of_driver[0]} and the runtime of SDK {of_runtime[0]}: AWS "
            "tests those of one release together",
            _UPDATE,
            facts=facts,
        )
    if of_driver and of_runtime:
        says = f"driver and runtime are both of SDK {of_driver[0]}"
        return Finding.ok("neuron.pair", says, facts=facts)
    says = f"nothing is known of the driver {driver} with the runtime {runtime}"
    return Finding.note("neuron.pair", says, facts=facts)


def _packages(machine: Machine, need: Need) -> Iterator[Finding]:
    """What runs a model is there, and no placeholder."""
    missing = [name for name in _NEEDED if not _has_content(machine, name)]
    if not missing:
        return
    placeholders = [name for name in missing if machine.package(name) is not None]
    hollow = f"; {', '.join(placeholders)} is an empty placeholder" if placeholders else ""
    yield need.unmet(
        "neuron.packages",
        f"{' and '.join(missing)} cannot be used: not installed from AWS's index{hollow}",
        "Install them: pip install neuronx-distributed-inference torch-neuronx neuronx-cc "
        f"--extra-index-url {AWS_INDEX}, or use AWS's image (DLAMI), whose virtual "
        "environments have them.",
        facts={"missing": list(missing), "placeholders": list(placeholders)},
    )


def _has_content(machine: Machine, name: str) -> bool:
    module, part = _NEEDED[name]
    distribution = machine.distribution(name)
    if distribution is not None and distribution.files is not None:
        wanted = (module, part) if part else (module,)
        return any(path.parts[: len(wanted)] == wanted for path in distribution.files)
    if machine.package_path is not None:
        return False
    spec = find_spec(module)  # one without metadata, as from a folder of sources
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return any((Path(folder) / part).exists() for folder in folders)


def _releases(
    driver: str | None, runtime: str, versions: dict[str, str | None]
) -> Iterator[Finding]:
    """Whether all parts are of one release."""
    parts = {"driver": ("driver", driver), "runtime": ("runtime", runtime)}
    parts |= {name: (_PARTS[name], version) for name, version in versions.items()}
    installed = {name: version for name, (_, version) in parts.items() if version}
    sdks = {
        name: found
        for name, (part, version) in parts.items()
        if (found := sdks_of(part, version or ""))
    }
    if len(installed) < 3:
        return
    common = set.intersection(*map(set, sdks.values())) if sdks else set()
    listed = ", ".join(
        f"{name} {short(version)}" + (f" (SDK {sdks[name][0]})" if name in sdks else "")
        for name, version in installed.items()
    )
    facts: dict[str, Fact] = {"versions": dict(installed)}
    if common:
        says = f"all parts that are known are of SDK {max(common, key=numbers_of)}"
        yield Finding.ok("neuron.release", says, facts=facts)
    elif not sdks:
        yield Finding.note("neuron.release", "nothing is known of these versions", facts=facts)
    else:
        yield Finding.warning(
            "neuron.release",
            f"parts of different releases of the SDK: {listed}",
            "Install all of one release. A model that was compiled with another compiler is "
            "compiled again.",
            facts=facts,
        )


def _torch(machine: Machine, torch_neuronx: str | None, need: Need) -> Iterator[Finding]:
    """torch-neuronx has code that is built for one torch, whose version its own begins with."""
    torch, wanted = machine.package("torch") or "", numbers_of(torch_neuronx or "")
    if len(wanted) > 3 and torch and numbers_of(torch)[:2] != wanted[:2]:
        yield need.unmet(
            "neuron.torch",
            f"torch-neuronx {torch_neuronx} is built for torch {short(torch_neuronx or '')}, "
            f"and torch {torch} is installed",
            f"pip install 'torch=={short(torch_neuronx or '')}.*'.",
            facts={"torch": torch, "torch_neuronx": torch_neuronx},
        )


def _inference(version: str | None, family: str, need: Need) -> Iterator[Finding]:
    numbers = numbers_of(version or "")[:2]
    if () < numbers < INFERENCE_MIN:
        yield need.unmet(
            "neuron.inference",
            f"NxD Inference {version} is too old: its KV has no room behind a slot",
            f"Install SDK {INFERENCE_MIN_SDK} or 2.28.",
            facts={"version": version},
        )
    elif numbers >= (0, 9) and family in ("trn1", "trn1n", "inf2"):
        yield Finding.warning(
            "neuron.inference",
            f"NxD Inference {version} is for Trn2: AWS supports {family} up to SDK 2.28",
            "Install SDK 2.28, with neuronx-distributed-inference 0.8.",
            facts={"version": version},
        )
    elif numbers >= (0, 10):
        yield Finding.note(
            "neuron.inference",
            f"NxD Inference {version}: AWS has it in maintenance since SDK 2.30",
            facts={"version": version},
        )


def _nixl(machine: Machine) -> Iterator[Finding]:
    """Releases that do not take Neuron memory."""
    for name in _NIXL_NAMES:
        version = machine.package(name) or ""
        if (0,) < numbers_of(version) < (1, 1):
            yield Finding.warning(
                "neuron.nixl",
                f"{name} {version} does not take Neuron memory: 1.1 and later do",
                f"pip install '{name}>=1.1'.",
                facts={"package": name, "version": version},
            )


def _family(machine: Machine) -> str:
    """Of the instance, or of its devices where the instance is not known."""
    if (row := INSTANCES.get(instance_type(machine))) is not None:
        return row.family
    return next((NEURON_IDS[each.device_id] for each in neuron_devices(machine)), "")


def _of(sdks: tuple[str, ...]) -> str:
    return f", of SDK {' or '.join(reversed(sdks))}" if sdks else ""
