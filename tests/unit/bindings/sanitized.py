"""C code under the address and undefined-behaviour sanitizers, in a process of its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

FLAGS = ("-std=gnu11", "-O1", "-g", "-fno-omit-frame-pointer", "-shared", "-fPIC")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def build(source: Path, folder: Path) -> Path:
    """The library made of a file, in `folder`. Skips the test where no compiler can."""
    sanitizer_runtime()
    library = folder / f"{source.stem}.so"
    include = f"-I{sysconfig.get_path('include')}"
    command = ["gcc", *FLAGS, *SANITIZERS, include, "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return library


def sanitizer_runtime() -> Path:
    """What is to be loaded before Python, so that the library can be."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    found = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    runtime = Path(found.stdout.strip())
    if not runtime.is_absolute():  # gcc prints the bare name of what it does not have
        pytest.skip("gcc has no address sanitizer")
    return runtime


def run(script: str, *arguments: object, timeout_s: float = 100):
    """The process, ended, of a script with these arguments, which may load such libraries."""
    # Leaks are Python's own business; its small blocks must come from malloc to be watched.
    environment = {
        **os.environ,
        "LD_PRELOAD": str(sanitizer_runtime()),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=timeout_s,
    )
