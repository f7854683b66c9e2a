"""Environment variables that matter on any machine. Those of Neuron have a check of their own.

A value may hold a password, as a proxy's URL does: names are told, values are not.
"""

from collections.abc import Iterator

from neuron_di.config import DoctorOptions, refused_variables
from neuron_di.config.option import VARIABLE_PREFIX
from neuron_di.doctor.amounts import counted
from neuron_di.doctor.finding import Finding
from neuron_di.doctor.machine import Machine

# Each binds a process's first thread to the first core: tried with torch's and the system's OpenMP.
_BINDING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY")
_NOT_BOUND = {"false", ""}


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Our own variables, those of HTTP proxies, and those that bind threads."""
    yield from _ours(machine)
    yield _http_proxy(machine)
    yield from _binding(machine)


def _ours(machine: Machine) -> Iterator[Finding]:
    refused = refused_variables(machine.environment)
    for name, words in refused.items():
        reason, _, _ = words.partition(", not ")  # what it must be, without what it is
        yield Finding.failed(
            "environment.ours",
            f"no server starts: {reason}",
            f"Correct {name}, or unset it.",
            facts={"name": name},
        )
    ours = {name for name in machine.environment if name.startswith(VARIABLE_PREFIX)}
    names = sorted(ours - refused.keys())
    if names or not refused:
        words = "no variable NEURON_DI_* is set"
        if names:
            words = f"{counted(len(names), 'variable')} of ours: {', '.join(names)}"
        yield Finding.ok("environment.ours", words, facts={"names": list(names)})


def _http_proxy(machine: Machine) -> Finding:
    """Of what our commands use, urllib alone asks an HTTP proxy."""
    proxies = {
        name.lower().removesuffix("_proxy"): value
        for name, value in machine.environment.items()
        if name.lower() in ("http_proxy", "no_proxy") and value
    }
    exempt = {name.strip() for name in proxies.get("no", "").split(",")}
    if "http" in proxies and not exempt & {"127.0.0.1", "*"}:
        return Finding.warning(
            "environment.http_proxy",
            "`neuron-di status`, `top`, `drain` and `role` go by the HTTP proxy of "
            "http_proxy, also to this machine",
            "Add 127.0.0.1, localhost and the hosts of the cluster to no_proxy.",
        )
    words = "the HTTP proxy is not asked" if "http" in proxies else "no HTTP proxy is asked"
    return Finding.ok("environment.http_proxy", f"{words} for what runs here")


def _binding(machine: Machine) -> Iterator[Finding]:
    for name in _BINDING:
        if machine.environment.get(name, "").lower() not in _NOT_BOUND:
            yield Finding.warning(
                "environment.binding",
                f"{name} is set: each worker binds itself to the same first cores, and they "
                "wait for each other",
                f"Unset {name}; `neuron-di serve --pin` gives each worker cores of its own.",
                facts={"name": name},
            )
