"""Which NeuronCores of this host each worker of `neuron-di serve` gets.

A process owns its NeuronCores alone, from its start to its end, and the runtime reads which ones
from NEURON_RT_VISIBLE_CORES: one number, or a first and a last, counted over the whole host
(documented in AWS's "Neuron Runtime configuration"). So each worker gets neighbouring cores out of
those that the operator allows, and keeps them when it is started again.
So far this has run on a simulator of libnrt only.
"""

import itertools
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from neuron_di.errors import ConfigError
from neuron_di_bindings.nrt import (
    ENABLED_VARIABLE,
    PORT_VARIABLE,
    NrtError,
    NrtMissing,
    NrtRuntime,
    NrtUnsupported,
    load_nrt,
)

VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"
NUM_CORES = "NEURON_RT_NUM_CORES"
LOGICAL_CORES = "NEURON_LOGICAL_NC_CONFIG"  # how many physical cores are a logical one
LOAD_TIMEOUT_S = 3600.0  # hundreds of gigabytes from a shared disk, and each graph run once
# One host's workers must not send through libfabric's shared memory: it knows no device memory,
# and what arrives is wrong (AWS's disaggregated inference tutorial).
SHARED_MEMORY_OF_EFA = "FI_EFA_ENABLE_SHM_TRANSFER"
RUNTIME_MAJOR = 2  # of libnrt, whose functions the bindings know
RUNTIME_FUNCTIONS = (  # without which no worker runs
    *("nrt_init", "nrt_close", "nrt_tensor_allocate", "nrt_tensor_read", "nrt_tensor_write"),
)
# As in AWS's tutorials. Without the gate a worker offers no send/receive between devices.
SEND_RECEIVE_DEFAULTS = {ENABLED_VARIABLE: "1", PORT_VARIABLE: "45645"}
# What the rendezvous of send and receive leaves behind when its process is killed; the older name
# is of all users.
LOCK_FOLDER = Path("/tmp")  # noqa: S108
_INSTANCE = Path("/sys/devices/virtual/dmi/id/product_name")
_LOCK_NAMES = ("nrt_kv_store_server_lock_uid_*", "nrt_kv_store_server.lock")


def count_host_cores(library_path: str | None = None) -> int:
    """How many NeuronCores this host has, as the runtime counts them. ConfigError if nobody knows.

    Takes no core: the runtime may be asked before it is initialised. It reads the environment then.
    """
    if visible := os.environ.get(VISIBLE_CORES):
        parse_cores(visible)  # says more of what is wrong there than the runtime does
    try:
        with NrtRuntime(load_nrt(library_path)) as runtime:
            num_cores = runtime.total_cores()
    except NrtMissing as error:
        raise ConfigError(f"--device neuron needs the Neuron runtime: {error}") from None
    except (NrtError, NrtUnsupported) as error:
        names = [n for n in (VISIBLE_CORES, NUM_CORES, LOGICAL_CORES) if os.environ.get(n)]
        values = ", ".join(f"{name}={os.environ[name]}" for name in names)
        hint = f" (does it have those of {values}?)" if names else ""
        mend = "is the driver (aws-neuronx-dkms) loaded, and of the runtime's release?"
        if names:
            mend = f"unset {' and '.join(names)}, or set what this host has"
        raise ConfigError(
            f"the Neuron runtime cannot count this host's cores{hint}: {error}. Mend: {mend}"
        ) from None
    if num_cores == 0:
        raise ConfigError(
            "this host has no NeuronCores: is it a Trainium or Inferentia instance, and is the "
            "driver (aws-neuronx-dkms) loaded?"
        )
    return num_cores


def parse_cores(text: str) -> tuple[int, ...]:
    """The cores that NEURON_RT_VISIBLE_CORES names, ascending: `3`, `0-7`, or a list of both.

    ConfigError for what is none of these, or names a core twice.
    """
    cores: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,4})\s*(?:-\s*([0-9]{1,4})\s*)?", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise ConfigError(
                f"{VISIBLE_CORES}={text} names no cores: write one number or a range, such as 0-3"
            )
        cores += range(first, last + 1)
    if len(set(cores)) < len(cores):
        raise ConfigError(f"{VISIBLE_CORES}={text} names a core twice")
    return tuple(sorted(cores))


def allowed_cores(environ: Mapping[str, str], num_host_cores: int) -> tuple[int, ...]:
    """The cores that the operator lets us use, ascending: all of the host's, unless he says more.

    Of NEURON_RT_NUM_CORES the first so many: which ones are free is known to nobody before they
    are taken. ConfigError for numbers that this host does not have.
    """
    has = f"this host has {num_host_cores} NeuronCores, 0 to {num_host_cores - 1}"
    if visible := environ.get(VISIBLE_CORES):
        cores = parse_cores(visible)
        if cores[-1] >= num_host_cores:
            raise ConfigError(f"{VISIBLE_CORES}={visible} names core {cores[-1]}: {has}")
        return cores
    wanted = environ.get(NUM_CORES) or "0"  # all of them, as for the runtime
    if not re.fullmatch("[0-9]{1,4}", wanted):
        raise ConfigError(f"{NUM_CORES}={wanted} is no number of cores")
    if int(wanted) > num_host_cores:
        raise ConfigError(f"{NUM_CORES}={wanted}: {has}")
    return tuple(range(int(wanted) or num_host_cores))


def share_cores(allowed: tuple[int, ...], wanted: Mapping[str, int]) -> dict[str, range]:
    """Neighbouring cores for each worker, in the order given: `wanted` is how many, by its name.

    They begin at a multiple of their number, if all can: so do the groups that are wired together.
    ConfigError, with the numbers, when they do not suffice.
    """
    needed = ", ".join(f"{name} {num_cores}" for name, num_cores in wanted.items())
    mend = f"allow more with {VISIBLE_CORES}, or serve with fewer workers or a smaller --tp"
    if sum(wanted.values()) > len(allowed):
        raise ConfigError(
            f"the workers need {sum(wanted.values())} NeuronCores ({needed}) and may use "
            f"{len(allowed)} ({as_text(allowed)}): {mend}"
        )
    for is_aligned in (True, False):
        shares = _place(_runs(allowed), wanted, is_aligned=is_aligned)
        if len(shares) == len(wanted):
            return shares
    name, num_cores = list(wanted.items())[len(shares)]
    raise ConfigError(
        f"{name} needs {num_cores} NeuronCores beside each other, and of those that may be "
        f"used ({as_text(allowed)}) no such run is left ({needed}): {mend}"
    )


def _place(runs: list[range], wanted: Mapping[str, int], *, is_aligned: bool) -> dict[str, range]:
    """The first stretch that is long enough, for as many workers as there are such."""
    shares: dict[str, range] = {}
    for name, num_cores in wanted.items():
        for index, run in enumerate(runs):
            first = -(-run.start // num_cores) * num_cores if is_aligned else run.start
            if first + num_cores <= run.stop:
                shares[name] = range(first, first + num_cores)
                left = (range(run.start, first), range(first + num_cores, run.stop))
                runs[index : index + 1] = filter(len, left)
                break
        else:
            break
    return shares


def check_degree(num_cores: int) -> None:
    """ConfigError where the runtime cannot join so many cores on this machine, as its firmware
    names it: found out before minutes of compiling. The numbers are the runtime's own message.
    """
    with suppress(OSError):
        name = _INSTANCE.read_text(encoding="utf-8", errors="replace")
        if name.startswith("trn1") and num_cores not in (1, 2, 8, 16) and num_cores % 32:
            raise ConfigError(
                f"--tp {num_cores}: on Trn1 the runtime joins 1, 2, 8 or 16 NeuronCores, or a "
                "multiple of 32",
                param="tp",
            )


def worker_environment(environ: Mapping[str, str], cores: range) -> dict[str, str]:
    """What a worker on these cores finds in its environment, made from this process's own.

    It may send and receive between devices, at the documented port, unless the operator said
    otherwise. NEURON_RT_NUM_CORES goes: the cores are named.
    """
    kept = {name: value for name, value in environ.items() if name != NUM_CORES}
    return SEND_RECEIVE_DEFAULTS | kept | {VISIBLE_CORES: as_text(cores), SHARED_MEMORY_OF_EFA: "0"}


def bootstrap_locks_of_others(folder: Path | None = None) -> list[str]:
    """Lock files of the rendezvous that this user may not lock: where one was left behind, send
    and receive do not open. One of the user's own is in nobody's way.

    Without `folder` in the documented one, and where temporary files go otherwise.
    """
    folders = {LOCK_FOLDER, Path(tempfile.gettempdir())} if folder is None else {folder}
    found = []
    for path in bootstrap_locks(*folders):
        with suppress(OSError):  # it is gone by now
            if path.stat().st_uid != os.getuid() or not os.access(path, os.R_OK | os.W_OK):
                found.append(str(path))
    return found


def bootstrap_locks(*folders: Path) -> list[Path]:
    """All lock files of the rendezvous in these folders, whoever holds them, if anybody."""
    places = itertools.product(sorted(set(folders)), _LOCK_NAMES)
    return [path for folder, name in places for path in sorted(folder.glob(name))]


def as_text(cores: range | tuple[int, ...]) -> str:
    """As NEURON_RT_VISIBLE_CORES spells them: `0-3`, `5`; with gaps `0-3,6`."""
    return ",".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in _runs(tuple(cores))
    )


def _runs(cores: tuple[int, ...]) -> list[range]:
    """Ascending cores as stretches of neighbours."""
    runs: list[range] = []
    for core in cores:
        if runs and runs[-1].stop == core:
            runs[-1] = range(runs[-1].start, core + 1)
        else:
            runs.append(range(core, core + 1))
    return runs
