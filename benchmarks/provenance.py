"""What every result file says about its making: the command and the machine, no paths."""

import argparse
import os
import re
import subprocess
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # those that decide GEMM speed


def command_line(module: str, options: argparse.Namespace, defaults: argparse.Namespace) -> str:
    """The command that gives these options. Values that are paths are named, not shown."""
    words = [f"python -m {module}"]
    for name, value in vars(options).items():
        if value == getattr(defaults, name):
            continue
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, Path):
            words.append(f"{flag} PATH")
        else:
            values = value if isinstance(value, list) else [value]
            words.append(" ".join([flag, *map(str, values)]))
    return " ".join(words)


def machine_description() -> str:
    """The CPU, its cores and memory, and the torch that computes."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = _field(info, "model name")
    features = [name for name in _CPU_FEATURES if name in _field(info, "flags").split()]
    memory_gib = psutil.virtual_memory().total / (1 << 30)
    cores = len(os.sched_getaffinity(0))
    return (
        f"{name} ({', '.join(features)}), {cores} cores, {memory_gib:.0f} GiB, "
        f"torch {version('torch')}"
    )


def commit_description() -> str:
    """The commit that was measured, and whether the working tree differed from it."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "no commit"


def _field(cpuinfo: str, name: str) -> str:
    found = re.search(rf"^{name}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else ""


def choose_cores(num_cores: int, available: Collection[int]) -> set[int]:
    """The last cores: the first one usually serves the interrupts, too."""
    if not 1 <= num_cores <= len(available):
        raise ValueError(f"{num_cores} cores were asked for, {len(available)} are there")
    return set(sorted(available)[-num_cores:])
