"""What computes on the host: compiled kernels, instruction sets, torch."""

import ctypes
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

from neuron_di.config import DoctorOptions
from neuron_di.doctor.finding import Finding, Need
from neuron_di.doctor.machine import Machine
from neuron_di_bindings import cpu_kernels

BUILD = (
    "Install a C compiler (gcc), then build it: `python setup.py build_ext --inplace` in a source "
    "tree, else `pip install --force-reinstall --no-deps .` in neuron-di's folder."
)
# What is slower without each: none of them is needed, and a build without a compiler leaves out
# all of them without a word.
_COMPILED = {
    "neuron_di_bindings._kv_copy": "KV is copied by numpy",
    "neuron_di_bindings._owner_words": "workers of one host copy KV instead of passing it on",
    "neuron_di_bindings._socket_runs": "more of a transfer over TCP runs in Python",
    "neuron_di_proxy._json_members": "the proxy reads long prompts more slowly",
    "neuron_di_proxy._token_lane": "every token goes through Python in the proxy",
}
# The bindings go on without a module that does not load, a proxy does not.
_PROXY, _NO_PROXY = "neuron_di_proxy.", "no proxy starts"


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Our kernels as they load here, and torch as it loads here."""
    yield _kernels()
    yield _compiled()
    yield _torch(machine, options)


def _kernels() -> Finding:
    try:
        kernels = cpu_kernels.load()
    except cpu_kernels.KernelsNotBuilt:
        return Finding.warning(
            "cpu.kernels",
            "the compiled CPU kernels do not load: --device cpu is slower, by torch alone",
            BUILD,
        )
    best = kernels.isas[-1]
    words = f"the compiled CPU kernels load, and use {best}"
    facts = {"instruction_sets": list(kernels.isas)}
    if best == "plain":
        words += ": this processor lacks AVX2, FMA or F16C, so --device cpu is slow"
        return Finding.note("cpu.kernels", words, facts=facts)
    return Finding.ok("cpu.kernels", words, facts=facts)


def _compiled() -> Finding:
    paths = {name: _file_of(name) for name in _COMPILED}
    missing = [name for name, path in paths.items() if path is None]
    faults = {name: _fault_of(path) for name, path in paths.items() if path is not None}
    broken = [name for name, fault in faults.items() if fault]
    facts = {"missing": missing, "broken": broken}
    if not missing and not broken:
        return Finding.ok(
            "cpu.compiled", f"all {len(_COMPILED)} other compiled modules load", facts=facts
        )
    is_fatal = any(name.startswith(_PROXY) for name in broken)
    effects = [_NO_PROXY] if is_fatal else []
    effects += [_COMPILED[name] for name in missing]
    effects += [_COMPILED[name] for name in broken if not name.startswith(_PROXY)]
    words = [f"not compiled: {', '.join(missing)}"] if missing else []
    words += [f"does not load: {name} ({faults[name][:100]})" for name in broken]
    says = f"{'; '.join(words)}; so {'; '.join(effects)}"
    return Need(is_fatal).unmet("cpu.compiled", says, BUILD, facts=facts)


def _file_of(name: str) -> Path | None:
    """A compiled module's file for this interpreter. One of them Python cannot import."""
    package, _, module = name.rpartition(".")
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    paths = (
        Path(folder) / f"{module}{suffix}" for folder in folders for suffix in EXTENSION_SUFFIXES
    )
    return next((path for path in paths if path.is_file()), None)


def _fault_of(path: Path) -> str:
    """Why it does not load, as where it was built with a newer C library. Empty: it does."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error).removeprefix(f"{path}: ")
    return ""


def _torch(machine: Machine, options: DoctorOptions) -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:  # also a library of its own that does not load
        if options.device == "auto" and _is_absent(machine, error):
            return Finding.warning(
                "cpu.torch",
                "torch is not installed: a proxy needs none, a worker does",
                "For a proxy nothing; for a worker pip install torch, on a machine without a "
                "GPU from PyTorch's CPU index, as the README says.",
            )
        return Finding.failed(
            "cpu.torch",
            f"torch does not load: {str(error)[:200]}",
            "Install it again for this Python; on a machine without a GPU from PyTorch's CPU "
            "index, as the README says.",
        )
    return Finding.ok(
        "cpu.torch", f"torch {torch.__version__} loads", facts={"version": str(torch.__version__)}
    )


def _is_absent(machine: Machine, error: Exception) -> bool:
    """Whether there is no torch at all, rather than one that lacks a part or does not load."""
    is_not_found = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    return is_not_found and machine.package("torch") is None
