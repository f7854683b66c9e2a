"""Compile what a call launches for Hopper, on a machine without a GPU, and report on the code.

    python hopper_compiler.py < calls.json

Runs in a process of its own: Triton decides at import whether its kernels are compiled.
"""

import json
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def compile_only(kernels):
    """From here on a launch compiles its kernel and puts it into `kernels`, and nothing runs."""
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )

    def launcher(self, grid):
        def launch(*args, **kwargs):
            kernels.append(self.run(*args, grid=grid, warmup=True, **kwargs))

        return launch

    jit.KernelInterface.__getitem__ = launcher


def dump(kernel, *flags):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), *flags, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def report(kernel):
    """Of one kernel: what it takes of a multiprocessor, and which instructions it has."""
    registers, stack, _, local = map(
        int, _USAGE.search(dump(kernel, "--dump-resource-usage")).groups()
    )
    sass = dump(kernel, "--dump-sass")
    return {
        "name": kernel.metadata.name,
        "registers": registers,
        "spilled_bytes": stack + local + 4 * len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "shared_bytes": kernel.metadata.shared,
        "threads": 32 * kernel.metadata.num_warps,
        "instructions": sorted(set(re.findall(r"\b(HGMMA|HMMA|DFMA|LDGSTS|MUFU\.\w+)", sass))),
    }


def make(argument):
    """A tensor for {"shape", "dtype"}, of which only the address and the shape matter."""
    if isinstance(argument, list):
        return [make(one) for one in argument]
    if not isinstance(argument, dict):
        return argument
    tensor = torch.empty(argument["shape"], dtype=getattr(torch, argument["dtype"]))
    return tensor[:, : argument["columns"]] if "columns" in argument else tensor


def main():
    """Of each call, [module, function, positional, named], the reports on what it launches."""
    kernels = []
    compile_only(kernels)
    reports = []
    for module, function, positional, named in json.load(sys.stdin):
        kernels.clear()
        call = getattr(import_module(module), function)
        call(*map(make, positional), **{name: make(value) for name, value in named.items()})
        reports.append([report(kernel) for kernel in kernels])
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main()
