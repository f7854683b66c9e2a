"""What libfabric finds: EFA's domains, and whether it can reach Neuron memory.

By `fi_info`, which takes no NeuronCore. Its log says more than its output; the words are those of
libfabric's source (hmem_neuron.c, efa_hmem.c).
"""

import re
from dataclasses import dataclass, replace

from neuron_di.doctor.machine import Machine

PROGRAM = "fi_info"
_OF_AWS = "/opt/amazon/efa/bin/fi_info"
_TIMEOUT_S = 20.0
_VERSION_TIMEOUT_S = 5.0
_DOMAIN = re.compile(r"^\s*domain:\s*(\S+)", re.MULTILINE)
_VERSION = re.compile(r"^libfabric:\s*(\S+)", re.MULTILINE)
_NUM_CORES = re.compile(r"number of neuron cores: (\d+)")
_SUFFIX = re.compile(r"-(?:rdm|dgrm|direct)$")
_WORDS_MAX = 300
# What the log has of Neuron memory, in the order in which it decides: what is said of it here.
_MEMORY = (
    ("FI_HMEM_NEURON requires p2p", "switched off by FI_HMEM_DISABLE_P2P"),
    ("RDMA read support, transfers using FI_HMEM_NEURON", "these adapters have no RDMA read"),
    ("FI_HMEM_NEURON is not initialized", "libfabric does not find the Neuron runtime"),
    ("Failed to register Neuron buffer", "registration of device memory fails"),
)
# Older versions register memory to try it, which a process without cores cannot.
_UNDECIDED = "Cannot allocate Neuron buffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What `fi_info -p efa` found. `memory` is why Neuron memory cannot be reached, in words; empty
    where it can, or nobody can tell by this means (`is_undecided`)."""

    version: str
    domains: tuple[str, ...]
    num_cores: int
    memory: str
    is_undecided: bool
    words: str  # of what went wrong
    log: str


def look(machine: Machine) -> Fabric | None:
    """None where there is no `fi_info`."""
    program = machine.program(PROGRAM) or machine.program(_OF_AWS)
    if program is None:
        return None
    environ = {**machine.environment, "FI_LOG_LEVEL": "info"}
    talking = replace(machine, environment=environ)
    ran = talking.run(program, "-p", "efa", timeout_s=_TIMEOUT_S)
    told = machine.run(program, "--version", timeout_s=_VERSION_TIMEOUT_S)
    if ran is None:
        return None
    version = _VERSION.search(told.stdout) if told is not None else None
    cores = _NUM_CORES.search(ran.stderr)
    why = [meaning for words, meaning in _MEMORY if words in ran.stderr]
    lines = [line for line in (ran.stdout + "\n" + ran.stderr).splitlines() if "fi_getinfo" in line]
    return Fabric(
        version=version[1] if version else "",
        domains=tuple(dict.fromkeys(_SUFFIX.sub("", name) for name in _DOMAIN.findall(ran.stdout))),
        num_cores=int(cores[1]) if cores else 0,
        memory=why[0] if why else "",
        is_undecided=_UNDECIDED in ran.stderr,
        words="it did not end in time" if ran.has_timed_out else "".join(lines[:1])[:_WORDS_MAX],
        log=ran.stderr,
    )
