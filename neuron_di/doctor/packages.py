"""Python, this package, and the packages that it needs: there, and of versions that work.

What is needed is read from this package's own metadata. Of other packages' wishes only those are
told that concern packages of ours.
"""

import importlib.metadata
import platform
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from neuron_di.config import DoctorOptions
from neuron_di.doctor.amounts import counted
from neuron_di.doctor.finding import Fact, Finding, Grade
from neuron_di.doctor.machine import Machine
from neuron_di.version import __version__

_OWN = "neuron-di"
# By extra the package that nobody has for another reason. Those of Neuron have their own check.
_EXTRAS = {"etcd": "grpcio", "etcd3": "etcd3", "cuda": "nvidia-cuda-runtime-cu12"}
_EXTRAS |= {"nixl": "nixl-cu12"}
_CONFLICTS_MAX = 5
_PROTOBUF_OF_ETCD3 = Version("3.21")  # the extra etcd3 has the ones before it


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """One finding for each thing that is missing or does not fit."""
    yield Finding.ok(
        "packages.python",
        f"{platform.python_implementation()} {platform.python_version()}",
        facts={"version": platform.python_version()},
    )
    yield Finding.ok(
        "packages.neuron_di", f"neuron-di {__version__}", facts={"version": __version__}
    )
    wanted = _requirements(machine)
    if wanted is None:
        yield Finding.skipped(
            "packages.needed",
            "neuron-di is not installed as a package, so nothing says what it needs",
        )
        return
    yield from _needed(machine, wanted.get("", []), options)
    yield from _extras(machine, wanted, options)
    yield from _torch(machine)
    yield from _conflicts(machine, wanted)


def _requirements(machine: Machine) -> dict[str, list[Requirement]] | None:
    """By extra, `""` for what is always needed. None where there is no metadata of ours."""
    own = machine.distribution(_OWN)
    if own is None:
        return None
    by_extra: dict[str, list[Requirement]] = {}
    for requirement in _read(own):
        for extra in ("", *_EXTRAS):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                by_extra.setdefault(extra, []).append(requirement)
                break
    return by_extra


def _needed(
    machine: Machine, requirements: list[Requirement], options: DoctorOptions
) -> Iterator[Finding]:
    num_well = 0
    for requirement in requirements:
        version = machine.package(requirement.name)
        if _fits(requirement, version):
            num_well += 1
        elif version is None:
            yield _not_installed(requirement, options)
        else:
            yield _other_version(machine, requirement, version)
    yield Finding(
        check="packages.needed",
        grade=Grade.OK if num_well == len(requirements) else Grade.NOTE,
        says=f"{num_well} of {counted(len(requirements), 'needed package')} "
        f"{'is' if num_well == 1 else 'are'} there, of a version that was asked for",
        facts={"num_wanted": len(requirements), "num_well": num_well},
    )


def _not_installed(requirement: Requirement, options: DoctorOptions) -> Finding:
    """Nobody knows of a machine whether it is to be a proxy's, which has no torch."""
    facts: dict[str, Fact] = {"name": requirement.name, "wanted": str(requirement.specifier)}
    mend = f"pip install '{_words(requirement)}'"
    if requirement.name == "torch" and options.device == "auto":
        says = "torch is not installed: a proxy needs none, a worker does"
        mend = f"For a proxy nothing, else {mend}"
        return Finding.warning("packages.needed", says, mend, facts=facts)
    says = f"{requirement.name} is not installed, and neuron-di needs it"
    return Finding.failed("packages.needed", says, mend, facts=facts)


def _other_version(machine: Machine, requirement: Requirement, version: str) -> Finding:
    mend = f"pip install '{_words(requirement)}'"
    if requirement.name == "torch" and (pin := _pin_of_torch_neuronx(machine)):
        mend = f"Leave it so for Neuron devices: torch-neuronx asks for {pin}, and is built for "
        mend += "that one; elsewhere, make an environment without torch-neuronx."
    return Finding.warning(
        "packages.needed",
        f"{requirement.name} is {version}, and neuron-di asks for {requirement.specifier}: "
        "with others it was never tried",
        mend,
        facts={
            "name": requirement.name,
            "version": version,
            "wanted": str(requirement.specifier),
        },
    )


def _pin_of_torch_neuronx(machine: Machine) -> str:
    """What torch-neuronx says of torch; empty where it is not installed, or says nothing."""
    distribution = machine.distribution("torch-neuronx")
    asked = [] if distribution is None else _read(distribution)
    return next((_words(each) for each in asked if each.name == "torch" and each.specifier), "")


def _extras(
    machine: Machine, wanted: dict[str, list[Requirement]], options: DoctorOptions
) -> Iterator[Finding]:
    needed = {"etcd": bool(options.etcd.etcd), "nixl": "nixl" in options.kv_transfer.transfer}
    needed["cuda"] = "cuda_ipc" in options.kv_transfer.transfer
    whole = []
    for extra, marker in _EXTRAS.items():
        is_needed = needed.get(extra, False)
        if machine.package(marker) is None and not is_needed:
            continue
        bad = [
            (each, version)
            for each in wanted.get(extra, [])
            if not _fits(each, version := machine.package(each.name))
        ]
        if not bad:
            whole.append(extra)
        elif extra == "etcd3":
            yield from _etcd3(machine)
        else:
            yield _extra(extra, bad, is_needed=is_needed)
    words = f"extras that are installed: {', '.join(whole)}" if whole else "no extra is installed"
    yield Finding.note("packages.extras", words, facts={"extras": list(whole)})


def _extra(extra: str, bad: list[tuple[Requirement, str | None]], *, is_needed: bool) -> Finding:
    lacks = ", ".join(f"{_words(each)} ({version or 'not there'})" for each, version in bad)
    is_missing = any(version is None for _, version in bad)
    grade = Grade.NOTE
    if is_needed:
        grade = Grade.FAILED if is_missing else Grade.WARNING
    return Finding(
        check=f"packages.extra.{extra}",
        grade=grade,
        says=f"the extra {extra} asks for {lacks}",
        mend=f"pip install '.[{extra}]' in neuron-di's folder",
        facts={"names": [each.name for each, _ in bad]},
    )


def _etcd3(machine: Machine) -> Iterator[Finding]:
    version = machine.package("protobuf")
    if version is None or _version(version) >= _PROTOBUF_OF_ETCD3:
        yield Finding.note(
            "packages.etcd3",
            f"etcd3 is installed beside protobuf {version}, and wants one before 3.21; only "
            "an etcd3.Client of your own needs it, --etcd does not",
            "pip uninstall etcd3, or for a client of your own pip install '.[etcd3]' in "
            "neuron-di's folder.",
            facts={"protobuf": version},
        )


def _torch(machine: Machine) -> Iterator[Finding]:
    distribution = machine.distribution("torch")
    if distribution is None:
        return
    on_cuda = "+cu" in distribution.version or any(
        each.name.startswith(("nvidia-", "cuda-")) and _applies(each)
        for each in _read(distribution)
    )
    if on_cuda and not machine.names("/dev/nvidia[0-9]*"):
        yield Finding.note(
            "packages.torch",
            f"torch {distribution.version} is a build for CUDA, and there is no NVIDIA GPU: "
            "it works, and takes some gigabytes of disk that the CPU build does not",
            facts={"version": distribution.version},
        )


def _conflicts(machine: Machine, wanted: dict[str, list[Requirement]]) -> Iterator[Finding]:
    """Installed packages that ask for other versions of what neuron-di uses."""
    ours = {canonicalize_name(each.name) for group in wanted.values() for each in group}
    clashes = []
    for distribution in machine.distributions():
        if canonicalize_name(distribution.name) == _OWN:
            continue
        for each in _read(distribution):
            if canonicalize_name(each.name) in ours and _applies(each):
                version = machine.package(each.name)
                if version is not None and not _fits(each, version):
                    name = f"{distribution.name} {distribution.version}"
                    clashes.append(f"{name} asks for {_words(each)}, and there is {version}")
    if clashes:
        more = f"; and {len(clashes) - _CONFLICTS_MAX} more" * (len(clashes) > _CONFLICTS_MAX)
        yield Finding.note(
            "packages.conflicts",
            f"other packages want other versions: {'; '.join(clashes[:_CONFLICTS_MAX])}{more}",
            "Nothing, unless those are needed: then give neuron-di an environment of its own.",
            facts={"conflicts": list(clashes)},
        )


def _read(distribution: importlib.metadata.Distribution) -> list[Requirement]:
    """What a package asks for, without what cannot be read."""
    found = []
    for text in distribution.requires or []:
        try:
            found.append(Requirement(text))
        except InvalidRequirement:
            continue
    return found


def _applies(requirement: Requirement) -> bool:
    """Here, without any extra."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _fits(requirement: Requirement, version: str | None) -> bool:
    if version is None:
        return False
    try:
        return requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return True  # nobody can say


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def _words(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"
