"""Whether a worker can have its NeuronCores, found out before anything is loaded.

So far this has run on a simulator of libnrt only.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import neuron_di_bindings
from neuron_di.config import child_environment
from neuron_di.errors import ConfigError
from neuron_di.neuron_cores import (
    RUNTIME_FUNCTIONS,
    RUNTIME_MAJOR,
    VISIBLE_CORES,
    allowed_cores,
    as_text,
    count_host_cores,
    share_cores,
)
from neuron_di_bindings.nrt import (
    PATH_VARIABLE,
    NrtError,
    NrtMissing,
    NrtStatus,
    NrtUnsupported,
    load_nrt,
)

_PROC = Path("/proc")
_BINDINGS = Path(neuron_di_bindings.__file__).parents[1]
_PROBE = Path(__file__).with_name("neuron_probe.py")
_PROBE_TIMEOUT_S = 120.0  # the driver resets each core that was used before
_WORDS_MAX = 300  # of what the runtime wrote
_HOLDERS_MAX = 4


def check_devices(num_ranks: int, library_path: str | None, environ: Mapping[str, str]) -> range:
    """The host's numbers of the cores for a worker of so many ranks: they are there, and free.

    ConfigError, with the cause and the mend, where they are not. Starts no runtime in this process.
    """
    _check_library(library_path)
    allowed = allowed_cores(environ, count_host_cores(library_path))
    cores = share_cores(allowed, {"this worker": num_ranks})["this worker"]
    _check_free(cores, library_path)
    return cores


def runtime_environment(cores: range, library_path: str | None) -> dict[str, str]:
    """Variables from which this process's runtime learns which cores are its own."""
    chosen = {} if library_path is None else {PATH_VARIABLE: library_path}
    return {VISIBLE_CORES: as_text(cores), **chosen}


def _check_library(path: str | None) -> None:
    """ConfigError where it is missing, or not one whose functions these bindings know."""
    try:
        library = load_nrt(path)
    except NrtMissing as error:
        raise ConfigError(f"--device neuron needs the Neuron runtime: {error}") from None
    lacks = [name for name in RUNTIME_FUNCTIONS if not library.has(name)]
    if lacks:
        raise ConfigError(
            f"the Neuron runtime {library.path} lacks {', '.join(lacks)}: install a newer "
            "aws-neuronx-runtime-lib"
        )
    with contextlib.suppress(NrtError, NrtUnsupported):  # one that does not say is tried
        version = library.version()
        if version.major != RUNTIME_MAJOR:
            raise ConfigError(
                f"the Neuron runtime {library.path} is version {version}, and "
                f"{RUNTIME_MAJOR}.x is supported: install aws-neuronx-runtime-lib "
                f"{RUNTIME_MAJOR}.x, or name another file with {PATH_VARIABLE}"
            )


def _check_free(cores: range, library_path: str | None) -> None:
    environ = child_environment() | runtime_environment(cores, library_path)
    # It finds the bindings that this process has, whether they are installed or not.
    paths = [str(_BINDINGS), *filter(None, [environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        done = subprocess.run(  # noqa: S603 - our own file
            [sys.executable, "-P", str(_PROBE)],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the Neuron runtime did not take NeuronCores {as_text(cores)} within "
            f"{_PROBE_TIMEOUT_S:g} s: is the driver (aws-neuronx-dkms) loaded, and of its release?"
        ) from None
    found, last_words = _report_in(done.stdout), _last_line(done.stderr)
    if found is None:
        raise ConfigError(
            f"the Neuron runtime ended its process with code {done.returncode} when it was asked "
            f"for NeuronCores {as_text(cores)}: {last_words or 'it gave no reason'}. Mend: is the "
            "driver (aws-neuronx-dkms) loaded, and of the runtime's release? Or name other cores "
            f"with {VISIBLE_CORES}"
        )
    if "failed" in found:
        raise ConfigError(_why_not_taken(cores, found, last_words))
    if found.get("num_cores") != len(cores):
        raise ConfigError(
            f"the Neuron runtime took {found.get('num_cores')} cores where {VISIBLE_CORES} named "
            f"{len(cores)} ({as_text(cores)}): are they counted in another way "
            "(NEURON_LOGICAL_NC_CONFIG)?"
        )


def _why_not_taken(cores: range, found: Mapping[str, Any], last_words: str) -> str:
    said = f"{found['failed']}; {last_words}" if last_words else f"{found['failed']}"
    if holders := ", ".join(_holders()):  # of which cores is not known: also of others than these
        said += f"; processes that have Neuron devices open: {holders}"
    if found.get("status") == NrtStatus.EXEC_NC_BUSY:
        cause = "another process has one of them"
        mend = f"end it, or name other cores with {VISIBLE_CORES}"
    else:
        cause = "the runtime refuses them"
        mend = (
            f"are they cores of this host, does another process have them ({VISIBLE_CORES} names "
            "others), and is the driver (aws-neuronx-dkms) of the runtime's release?"
        )
    return f"NeuronCores {as_text(cores)} cannot be taken: {cause}: {said}. Mend: {mend}"


def _holders() -> Iterator[str]:
    """Processes of this user that have a Neuron device open, in words; others' cannot be seen."""
    num_found = 0
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            links = (os.readlink(link) for link in (folder / "fd").iterdir())
            if any(link.startswith("/dev/neuron") for link in links):
                yield f"process {folder.name}, {(folder / 'comm').read_text().strip()}"
                num_found += 1
        if num_found == _HOLDERS_MAX:
            return


def _report_in(output: str) -> dict[str, Any] | None:
    """The probe's line: the last one. The runtime may have written others."""
    try:
        report = json.loads(_last_line(output))
    except ValueError:
        return None
    return report if isinstance(report, dict) else None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-_WORDS_MAX:] if lines else ""
