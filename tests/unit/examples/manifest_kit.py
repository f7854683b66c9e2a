"""The Kubernetes manifests as kubectl renders them, a tutorial's settings, neuron-di's options."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from neuron_di.cli import _COMMANDS
from neuron_di.config import FlagParser, add_flags, load_options

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
COMMON = EXAMPLES / "neuron_common"
KUBERNETES = COMMON / "kubernetes"
OVERLAYS = ("trn1", "trn2", "trn2-dra", "inf2")
# By the names of AWS's documents; their cores, logical ones where there are such.
CORES_PER_DEVICE = {"trn1": 2, "trn2": 4, "trn2-dra": 4, "inf2": 2}

Document = dict[str, Any]


@cache
def rendered(overlay: str) -> tuple[Document, ...]:
    """Every object of a folder. Skips the test where there is no kubectl: it asks no cluster."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl renders the manifests, and is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", KUBERNETES / overlay],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(documents: tuple[Document, ...], *kinds: str) -> dict[str, Document]:
    """By name, objects of these kinds. They are there: none would be a test that cannot fail."""
    found = {each["metadata"]["name"]: each for each in documents if each["kind"] in kinds}
    assert found, kinds
    return found


def pods(documents: tuple[Document, ...]) -> dict[str, Document]:
    """By name of what makes them: metadata and spec of its pods."""
    owners = of_kind(documents, "Deployment", "StatefulSet", "Job")
    return {name: owner["spec"]["template"] for name, owner in owners.items()}


def container(pod: Document) -> Document:
    (only,) = pod["spec"]["containers"]
    return only


def environ(documents: tuple[Document, ...], pod: Document) -> dict[str, str]:
    """What the container finds there; fields of the pod as a cluster might fill them in."""
    fields = {"metadata.name": "decode-6b5d9c7f4-x2x9q", "status.podIP": "10.0.3.7"}
    maps = of_kind(documents, "ConfigMap")
    found: dict[str, str] = {}
    for source in container(pod).get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]["data"]
    for variable in container(pod).get("env", ()):
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        elif "fieldRef" in variable["valueFrom"]:
            found[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
    return found


def options(documents: tuple[Document, ...], pod: Document) -> Any:
    """What neuron-di makes of a pod's arguments and variables. ConfigError if it refuses them."""
    variables = environ(documents, pod)

    def filled_in(word: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word)

    return parsed([filled_in(word) for word in container(pod)["args"]], variables)


def parsed(words: list[str], variables: Mapping[str, str]) -> Any:
    """The options of `neuron-di WORDS` in this environment."""
    options_class, _ = _COMMANDS[words[0]]
    assert is_dataclass(options_class)
    parser = FlagParser(prog="neuron-di")
    add_flags(parser, options_class)
    flags = parser.parse_args(words[1:])
    return load_options(options_class, flags, dict(variables), flags.config)


def walk(document: Any) -> Iterator[tuple[str, Any]]:
    """Every key at any depth, with its value."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield key, value
            yield from walk(value)
    elif isinstance(document, list):
        for value in document:
            yield from walk(value)


@cache
def settings(tutorial: str) -> dict[str, str]:
    """Settings of a tutorial, and the ports, as bash sets them; not simulated."""
    script = (
        'HOSTS= IS_SIMULATED=; . "$1/ports.sh"; . "$2/settings.sh"; . "$1/defaults.sh"; '
        "set -o posix; set | grep -E '^[A-Z_]+='"
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", COMMON, EXAMPLES / tutorial],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin"},
    )
    lines = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value.strip("'") for name, _, value in lines}
