"""The environment that a run's parts get: where the packages are, and a GPU's stand-in."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.device_check.settings import ROOT

_PACKAGES = ("", "proxy", "runtime_bindings")
_INSTALL_TIMEOUT_S = 240.0
_COMPILE_TIMEOUT_S = 120.0
_NAME_LIBRARY = "from contract.fake_cuda import library_path; print(library_path())"


class CannotRun(Exception):
    """Raised where a run cannot begin. Says why."""


def environment(sites: Sequence[Path] = ()) -> dict[str, str]:
    """This process's, with the checkout's packages, and `sites` before what is installed."""
    paths = [str(ROOT / name) for name in _PACKAGES] + [str(path) for path in sites]
    if before := os.environ.get("PYTHONPATH"):
        paths.append(before)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def rehearsal_environment(environ: dict[str, str]) -> dict[str, str]:
    """Triton's interpreter, and the CUDA runtime's simulator, which is compiled here."""
    path = os.pathsep.join([str(ROOT / "tests"), environ["PYTHONPATH"]])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _NAME_LIBRARY],
            env={**environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise CannotRun("the CUDA simulator was not compiled in time") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise CannotRun(f"a rehearsal needs the CUDA simulator: {last}")
    return {
        **environ,
        "TRITON_INTERPRET": "1",
        "NEURON_DI_CUDART": done.stdout.strip(),
        "CUDA_VISIBLE_DEVICES": "",  # torch must see none: addresses are the processor's
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1"),
    }


@contextmanager
def unpacked_wheels(folder: Path) -> Iterator[Path]:
    """Its wheels in a temporary folder, while entered. They are only unpacked, nothing fetched.

    Installed packages that no wheel brings stay as they are.
    """
    wheels = sorted(str(path) for path in folder.glob("*.whl"))
    if not wheels:
        raise CannotRun(f"--wheels: there is no .whl in {folder}")
    with tempfile.TemporaryDirectory(prefix="neuron-di-site-") as site:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
        command += ["--target", site, *wheels]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise CannotRun("--wheels were not unpacked in time") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no words"])[-1]
            raise CannotRun(f"--wheels cannot be unpacked: {last}")
        yield Path(site)
