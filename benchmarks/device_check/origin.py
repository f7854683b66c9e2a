"""Which source was run, on what machine, by which command. The standard library only."""

import hashlib
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.device_check.gpu import query
from benchmarks.device_check.settings import ROOT

_FOLDERS = ("neuron_di", "proxy", "runtime_bindings", "benchmarks", "tests")
_ENDINGS = (".py", ".c", ".h")


def source_words() -> str:
    """The commit, where there is one, and always a digest of the files themselves."""
    words = f"tree {tree_digest(ROOT)[:16]}"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return words
    commit = done.stdout.strip()
    return f"commit {commit}, {words}" if commit else words


def tree_digest(root: Path) -> str:
    """Over names and contents of all source files: equal trees have equal ones anywhere."""
    total = hashlib.sha256()
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _ENDINGS and path.is_file():
                name = path.relative_to(root).as_posix().encode()
                total.update(name + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def machine_words() -> str:
    gpus = [f"{gpu['name']} (driver {gpu['driver_version']})" for gpu in query(
        "gpu", ("name", "driver_version"))]  # fmt: skip
    parts = [
        ", ".join(gpus) or "no GPU",
        f"{len(os.sched_getaffinity(0))} cores of {_processor()}",
        f"Python {platform.python_version()}",
        *(f"{name} {found}" for name in ("torch", "triton") if (found := _version(name))),
    ]
    return ", ".join(parts)


def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    found = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
