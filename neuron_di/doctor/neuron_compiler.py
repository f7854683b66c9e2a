"""The Neuron compiler: needed by the machine that compiles a model, and by no other.

Source: AWS's pages on neuronx-cc.
"""

import re
from collections.abc import Iterator

from neuron_di.config import DoctorOptions
from neuron_di.doctor.finding import Finding
from neuron_di.doctor.machine import Machine, last_line
from neuron_di.doctor.neuron_asked import needs_neuron
from neuron_di.neuron_releases import AWS_INDEX, sdks_of

_PROGRAM = "neuronx-cc"
_TIMEOUT_S = 30.0
_VERSION = re.compile(r"\d+(?:\.\d+)+")
_ELSEWHERE = "A model that was compiled elsewhere, with a compiler of this release, does as well."


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Whether neuronx-cc is on PATH, and its version."""
    if not needs_neuron(machine, options):
        return
    ran = machine.run(_PROGRAM, "--version", timeout_s=_TIMEOUT_S)
    if ran is None:
        yield _unusable("the compiler neuronx-cc is not on PATH: models cannot be compiled here")
        return
    if ran.returncode != 0:
        words = last_line(ran.stderr or ran.stdout) or f"it ended with code {ran.returncode}"
        if ran.has_timed_out:
            words = f"it did not end within {_TIMEOUT_S:g} s"
        yield _unusable(f"neuronx-cc --version does not do: {words}")
        return
    found = _VERSION.search(ran.stdout) or _VERSION.search(ran.stderr)
    version = found[0] if found else (machine.package(_PROGRAM) or "")
    sdks = sdks_of("compiler", version)
    of_sdk = f", of SDK {' or '.join(reversed(sdks))}" if sdks else ""
    yield Finding.ok(
        "neuron.compiler",
        f"the compiler is {version or 'of a version that it does not tell'}{of_sdk}",
        facts={"path": machine.program(_PROGRAM), "version": version, "sdks": list(sdks)},
    )


def _unusable(says: str) -> Finding:
    return Finding.warning(
        "neuron.compiler",
        says,
        f"pip install neuronx-cc --extra-index-url {AWS_INDEX}, or activate the virtual "
        f"environment that has it. {_ELSEWHERE}",
    )
