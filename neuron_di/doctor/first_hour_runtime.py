"""Points 1 to 3 of the first hour: the library, send and receive on one core, libfabric."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neuron_di.config import DoctorOptions
from neuron_di.doctor import libfabric, nrt_layout
from neuron_di.doctor.elf_exports import NoElf, exported_functions
from neuron_di.doctor.finding import Grade
from neuron_di.doctor.first_hour_point import Point, skipped
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.neuron_asked import Asked, ask_core
from neuron_di.doctor.neuron_variables import ROOT_COMM
from neuron_di.neuron_cores import RUNTIME_FUNCTIONS
from neuron_di_bindings.nrt import ENABLED_VARIABLE, FUNCTIONS, PORT_VARIABLE

# What may be needed, one by one, and at last all of it.
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "FI_PROVIDER": {"FI_PROVIDER": "efa"},
    "FI_EFA_USE_DEVICE_RDMA": {"FI_EFA_USE_DEVICE_RDMA": "1"},
    "FI_HMEM": {"FI_HMEM": "neuron"},
    ROOT_COMM: {ROOT_COMM: "127.0.0.1:20644"},
}
_LOG_LINES_MAX = 40


def library(machine: Machine, asked: Asked) -> Point:
    """Version, exports and struct sizes, against the bindings' tables."""
    found = asked.steps.of("library")
    if not found or "failed" in found:
        return Point(1, Grade.FAILED, f"No runtime: {found.get('failed') or asked.words}")
    facts: dict[str, Any] = {
        "version": asked.steps.of("version").get("version", ""),
        "detail": asked.steps.of("version").get("detail", ""),
        "async_api": found["async_api"],
        "num_cores": asked.steps.of("total").get("num_cores"),
        "lacks": found["lacks"],
    }
    facts["exports"] = _exports(Path(found["path"]), facts["async_api"])
    missing = [name for name in RUNTIME_FUNCTIONS if name in found["lacks"]]
    num_unknown = len(facts["exports"].get("unknown", ()))
    words = f"Version {facts['version']}; of the functions in our table it lacks "
    words += f"{len(found['lacks'])}, and {num_unknown} of its own are not in the table"
    layouts = nrt_layout.compare(machine)
    if isinstance(layouts, str):
        facts["layouts"], differing = layouts, {}
    else:
        same, differing = len(layouts.same), layouts.differing
        facts["layouts"] = {"same": same, "differing": differing, "unknown": layouts.unknown}
        words += f"; {same} structs and statuses are as its headers say"
        if differing:
            words += f", {len(differing)} are not: {', '.join(differing)}"
    is_bad = bool(missing or differing)
    return Point(1, Grade.FAILED if is_bad else Grade.OK, f"{words}.", facts)


def _exports(path: Path, async_api: int | None) -> dict[str, Any]:
    """What the library's file offers, beside the table."""
    try:
        exports = exported_functions(path)
    except (NoElf, OSError) as error:
        return {"failed": str(error)}
    ours = {row.name for row in FUNCTIONS}
    expected = {row.name for row in FUNCTIONS if row.generation in (None, async_api)}
    theirs = {name: label for name, label in exports.items() if name.startswith("nrt")}
    versions: dict[str, int] = {}
    for label in theirs.values():
        versions[label or "none"] = versions.get(label or "none", 0) + 1
    return {
        "count": len(theirs),
        "symbol_versions": versions,
        "unknown": sorted(set(theirs) - ours),
        "absent": sorted(expected - set(theirs)),
        "names": sorted(theirs),
    }


def send_receive(
    machine: Machine, options: DoctorOptions, lnc: int, asked: Asked
) -> tuple[Point, Mapping[str, str] | None]:
    """Limits, and whether it opens: as it is, or with what may be needed. And the variables with
    which it does; None where it does not."""
    asked.steps.of("library").pop("path", None)  # of this machine alone
    facts: dict[str, Any] = {"core": lnc, "steps": asked.steps.found}
    if not asked.did("runtime"):
        why = f"The runtime does not start on core {lnc}: {asked.why_not('runtime')}."
        return Point(2, Grade.FAILED, why, facts), None
    limits = asked.steps.of("limits")
    said = (
        f"at most {limits['communicators_max']} connections and {limits['pending_max']} requests"
        if "pending_max" in limits
        else f"limits are not told ({asked.failure('limits')})"
    )
    if asked.did("send_receive"):
        without = ask_core(machine, options, lnc, {ENABLED_VARIABLE: "", PORT_VARIABLE: ""})
        facts["opens_without_gates"] = without.did("send_receive")
        needs = "" if facts["opens_without_gates"] else ", and needs its two variables"
        answer = f"It opens, {said}{needs}; no other variable is needed."
        return Point(2, Grade.OK, answer, facts), {}
    failed = asked.failure_in_full("send_receive") or "it was not tried"
    if asked.failure("efa") is None and asked.steps.of("efa").get("address") is None:
        answer = f"It does not open: there is no EFA beside the device ({failed})."
        return Point(2, Grade.NOTE, answer, facts), None
    tried = {
        name: ask_core(machine, options, lnc, variables) for name, variables in _variants().items()
    }
    facts["variants"] = {
        name: "opens" if one.did("send_receive") else str(one.failure_in_full("send_receive"))
        for name, one in tried.items()
    }
    opened = [name for name, one in tried.items() if one.did("send_receive")]
    if opened:
        answer = f"It opens with {' or '.join(opened)}, {said}; without: {failed}."
        return Point(2, Grade.NOTE, answer, facts), _variants()[opened[0]]
    return Point(2, Grade.FAILED, f"It does not open ({said}): {failed}.", facts), None


def _variants() -> dict[str, Mapping[str, str]]:
    everything = {name: value for one in VARIANTS.values() for name, value in one.items()}
    return {**VARIANTS, "all of them": everything}


def fabric(machine: Machine) -> Point:
    """By fi_info, with its log."""
    found = libfabric.look(machine)
    if found is None:
        return skipped(3, "There is no fi_info, in PATH or in /opt/amazon/efa/bin.")
    lines = [line for line in found.log.splitlines() if "hmem" in line.lower() or "efa" in line]
    facts: dict[str, Any] = {
        "version": found.version,
        "domains": list(found.domains),
        "num_cores": found.num_cores,
        "memory": found.memory,
        "is_undecided": found.is_undecided,
        "words": found.words,
        "log": lines[:_LOG_LINES_MAX],
    }
    seen = (
        f"libfabric {found.version or '(unknown version)'} sees {len(found.domains)} EFA adapters"
    )
    if not found.domains:
        return Point(3, Grade.FAILED, f"{seen}: {found.words or 'no reason given'}.", facts)
    if found.memory:
        return Point(3, Grade.FAILED, f"{seen}; Neuron memory: {found.memory}.", facts)
    if found.is_undecided or not found.num_cores:
        return Point(3, Grade.NOTE, f"{seen}; of Neuron memory its log says nothing.", facts)
    return Point(3, Grade.OK, f"{seen}, and knows Neuron memory.", facts)
