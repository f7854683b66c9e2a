"""Builds the simulator of libnrt: a shared library with libnrt's functions, in C.

`library_path()` compiles it once for each content of the sources and gives its path, to be loaded
by `NEURON_DI_LIBNRT` or found as `libnrt.so.1` through `LD_LIBRARY_PATH`. Source: AWS's
public headers and guides. All declarations are our own.

What is where: `sim.h` the services that all files share; `calls.c`, `faults.c`, `trace.c` what
surrounds each call; `handles.c`, `memory.c`, `tensors.c`, `tensor_views.c` memory; `instance.c`,
`cores.c`, `lifecycle.c` hosts and ownership; `sendrecv*.c` send and receive; `neff.c`, `models.c`,
`execute.c` and their programs the models; `queue*.c` asynchronous execution. `plain.py` calls it
by ctypes, `neff.py` makes models, `check_trace.py` judges traces.

The environment, read at nrt_init: NRT_SIM_INSTANCE (instance.c), NRT_SIM_HOST and NRT_SIM_ROOT
(this host's address; the folder that all hosts of a test share), NRT_SIM_HBM_BYTES (of each core,
256 MiB), NRT_SIM_FAULTS (faults.c), NRT_SIM_TRACE (trace.c), NRT_SIM_STRICT=abort (a breach that
the real library leaves undefined ends the process; else it is counted), NEURON_RT_VISIBLE_CORES,
NEURON_RT_NUM_CORES and NEURON_LOGICAL_NC_CONFIG (cores.c). Send and receive: sendrecv.c.

What passes here proves: the types, sizes and order of calls of the bindings; who owns and frees
what, also between threads; that each status leads to the right error; that no device address or
handle is looked into; that cores have one owner; that KV reaches the right place, through the
right order of posts and flushes; and recovery from the failures of a schedule.

What it cannot prove, and nothing here claims: registration of device memory with EFA and its
limits; real limits, timings, bandwidth and overlap; when received bytes become visible to a
device; what the real library does where its documents are silent (a status for a core that is
taken, what happens at a peer's death, the units of a time-out); compiled NEFFs; copies on the
device that a version of the runtime refuses although both tensors are on one core, as one third
party saw between tensors of different sizes.

Nothing here is collective. nrt_build_global_comm, nrt_cc_global_comm_init and nrt_barrier work for
a group of one rank, and fail for more. nrt_load_collectives loads any rank, in a process of its own
or not, and looks for NEURON_RT_ROOT_COMM_ID where one is due; but ranks never meet: none waits for
another, misses one that is not there or died, or gets a byte from it. nrta_cc_prepare and
nrta_cc_schedule fail, and nrt_get_libnccl_net finds no plug-in. The stand-in for NxD Inference has
all ranks of a model in one process, as NxD Inference has, and computes them as one.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY_NAME = "libnrt.so.1"
_BUILD_FOLDER = FOLDER.parents[1] / "build" / "nrt_sim"
_BUILD_TIMEOUT_S = 100
_FLAGS = (
    "-std=gnu11",
    "-D_GNU_SOURCE=",
    "-g",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=default",
    "-Wall",
    "-Wextra",
    "-Werror",
    f"-Wl,-soname,{LIBRARY_NAME}",
    "-Wl,--no-undefined",
    "-Wl,-Bsymbolic-functions",  # two of them in one process do not call each other
)
_SANITIZERS = (
    "-O1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
)


class CannotBuild(Exception):
    """Raised when there is no compiler here or it has no address sanitizer: a test then skips."""


def compiler() -> str:
    """Path of the system's C compiler. Raises CannotBuild when there is none."""
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        raise CannotBuild("there is no C compiler")
    return found


def sanitizer_runtime() -> Path:
    """What LD_PRELOAD must name for the sanitized library. Raises CannotBuild without one."""
    done = subprocess.run(
        [compiler(), "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        check=True,
        timeout=_BUILD_TIMEOUT_S,
    )
    runtime = Path(done.stdout.strip())
    if not runtime.is_absolute():  # gcc prints the bare name of what it does not have
        raise CannotBuild("the C compiler has no address sanitizer")
    return runtime


@cache
def library_path(api: int = 3) -> Path:
    """Path of the library with the asynchronous functions of API 2 or 3."""
    return _built(api, ("-O2",))


@cache
def sanitized_library_path(api: int = 3) -> Path:
    """The same under the address and undefined-behaviour sanitizers; see sanitizer_runtime()."""
    sanitizer_runtime()
    return _built(api, _SANITIZERS)


def _built(api: int, more_flags: tuple[str, ...]) -> Path:
    if api not in (2, 3):
        raise ValueError(f"there is no API {api} of the asynchronous functions")
    script = FOLDER / f"exports_api{api}.map"
    flags = (*_FLAGS, *more_flags, f"-DSIM_API={api}", f"-Wl,--version-script={script}")
    sources = sorted(FOLDER.glob("*.c"))
    digest = hashlib.sha256(repr((compiler(), flags)).encode())
    for path in (script, *sources, *sorted(FOLDER.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    path = _BUILD_FOLDER / digest.hexdigest()[:16] / LIBRARY_NAME
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile([compiler(), *flags], sources, path)
    return path


def _compile(command: list[str], sources: list[Path], path: Path) -> None:
    """Several processes may do this at once: each writes its own file, the last rename stays."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / LIBRARY_NAME
        done = subprocess.run(
            [*command, "-o", str(made), *map(str, sources), "-ldl", "-lm"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_BUILD_TIMEOUT_S,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the simulator of libnrt does not compile:\n{done.stderr}")
        os.replace(made, path)


if __name__ == "__main__":
    print(library_path())  # noqa: T201
