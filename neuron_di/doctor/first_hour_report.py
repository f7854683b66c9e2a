"""The report of the first hour: Markdown for a person, with all of it as JSON at its end.

It is made to be sent: `redaction.py` goes over everything that is written.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from neuron_di.doctor.finding import Finding
from neuron_di.doctor.first_hour_point import Point
from neuron_di.doctor.host import system_name
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.neuron_instances import INSTANCES
from neuron_di.doctor.pci import instance_type
from neuron_di.doctor.redaction import Redactor
from neuron_di.version import __version__

FORMAT = 1
_LEFT_OUT = {"neuron.users"}  # processes of this machine
_SHOWN = re.compile(r"(?:NEURON_RT_|NEURON_LOGICAL_|NEURON_COMBINE_|FI_|NRT_SIM_|NCCL_|OFI_)\w*\Z")
# Numbers, ranges of cores, levels, words of the runtime and of libfabric. Others may be anybody's.
_PLAIN = re.compile(
    r"\^?(?:\d+(?:[-,]\d+)*|true|false|yes|no|on|off|auto|none|trace|debug|info|warn|warning|error"
    r"|critical|efa|efa-direct|tcp|shm|neuron|(?:trn|inf)\d\w?\.\w+)",
    re.IGNORECASE,
)
_VERSION = re.compile(r"\d+(?:\.\d+){2,}")
_PACKAGES = (
    *("neuronx-cc", "torch-neuronx", "neuronx-distributed", "neuronx-distributed-inference"),
    *("torch", "nixl", "nixl-cu12", "nixl-cu13", "libneuronxla", "nki", "vllm"),
)
_HEAD = """# neuron-di on Neuron hardware: the first hour

{origin}
Names of hosts and users, addresses, homes and keys were taken out. Look it over before you send it.
"""
_ON_HARDWARE = "What `neuron-di doctor --first-hour` found on a {instance}.\n"
_ON_SIMULATOR = """**Made on a simulator of the Neuron runtime: it says nothing of hardware.**
What `neuron-di doctor --first-hour` found there, as a {instance}.
"""


def write(
    path: Path, machine: Machine, points: Sequence[Point], findings: Sequence[Finding]
) -> None:
    """Whole, or not at all."""
    text = render(machine, points, findings)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def render(machine: Machine, points: Sequence[Point], findings: Sequence[Finding]) -> str:
    document = _document(machine, points, findings)
    redactor = Redactor(machine, kept=_versions(document))
    clean: dict[str, Any] = redactor.value(document)
    return "\n".join(_lines(clean)) + "\n"


def _document(
    machine: Machine, points: Sequence[Point], findings: Sequence[Finding]
) -> dict[str, Any]:
    instance = instance_type(machine)
    first = next((point for point in points if point.number == 1), None)
    detail = str(first.facts.get("detail", "")) if first is not None else ""
    return {
        "format": FORMAT,
        "neuron_di": __version__,
        "is_simulated": "simulator" in detail,
        "instance": instance if instance in INSTANCES else "machine of another type",
        "kernel": machine.read("/proc/sys/kernel/osrelease") or "",
        "system": system_name(machine),
        "packages": {name: version for name in _PACKAGES if (version := machine.package(name))},
        "environment": _environment(machine),
        "points": [
            {
                "number": point.number,
                "question": point.question,
                "outcome": point.outcome.value,
                "answer": point.answer,
                "facts": dict(point.facts),
            }
            for point in points
        ],
        "findings": [
            {
                "check": finding.check,
                "grade": finding.grade.value,
                "says": finding.says,
                "facts": dict(finding.facts),
            }
            for finding in findings
            if finding.check not in _LEFT_OUT
        ],
    }


def _environment(machine: Machine) -> dict[str, str]:
    """What the runtime and libfabric read. Of nothing else even the name."""
    return {
        name: value if _PLAIN.fullmatch(value) else "set"
        for name, value in sorted(machine.environment.items())
        if _SHOWN.match(name)
    }


def _versions(document: dict[str, Any]) -> set[str]:
    """Versions of what is installed, by where they stand: they look like addresses."""
    texts = [document["kernel"], *document["packages"].values()]
    for finding in document["findings"]:
        facts = finding["facts"]
        texts += [facts.get(name) for name in ("version", "driver", "runtime")]
        texts += list((facts.get("versions") or {}).values())
    texts += [point["facts"].get("version") for point in document["points"]]
    return {found for text in texts if text for found in _VERSION.findall(str(text))}


def _lines(document: dict[str, Any]) -> Iterator[str]:
    origin = _ON_SIMULATOR if document["is_simulated"] else _ON_HARDWARE
    yield _HEAD.format(origin=origin.format(instance=document["instance"]).rstrip("\n"))
    yield "| | question | outcome | answer |\n|---|---|---|---|"
    for point in document["points"]:
        cells = (str(point["number"]), point["question"], point["outcome"], point["answer"])
        yield "| " + " | ".join(map(_cell, cells)) + " |"
    yield "\n## The machine\n"
    yield f"- neuron-di {document['neuron_di']}, {document['system']}, kernel {document['kernel']}"
    for name, version in document["packages"].items():
        yield f"- {name} {version}"
    yield "\n## The other checks\n\n| check | grade | it says |\n|---|---|---|"
    for finding in document["findings"]:
        said = (finding["check"], finding["grade"], finding["says"])
        yield "| " + " | ".join(map(_cell, said)) + " |"
    yield "\n## All of it\n\n```json"
    yield json.dumps(document, indent=1, ensure_ascii=False).replace("```", "'''")
    yield "```"


def _cell(text: str) -> str:
    """In one line, without what ends a cell."""
    return " ".join(text.split()).replace("|", "\\|")
