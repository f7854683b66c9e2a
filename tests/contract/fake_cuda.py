"""The CUDA runtime's simulator (fake_cudart.c), built where there is a C compiler."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Self

from neuron_di.kv import KvLayout
from neuron_di.kv.device_pool import DevicePool
from neuron_di.types import Incarnation
from neuron_di_bindings.cuda_runtime import CudaRuntime, load_cuda

_SOURCE = Path(__file__).with_name("fake_cudart.c")
_BUILT = Path(__file__).parents[2] / "build" / "fake_cudart"
VERSION = 12090  # 12060: without batched copies; 13000: they take other arguments

COMPILER = shutil.which("gcc") or shutil.which("cc")
WHY_NOT = None if COMPILER else "the CUDA simulator needs a C compiler"


@cache
def library_path(version: int = VERSION) -> Path:
    """Built once for all processes, and anew when its source changes."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    path = _BUILT / f"fake_cudart-{digest}-{version}.so"
    if not path.exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}.so")
        flags = ["-std=gnu11", "-O1", "-g0", "-shared", "-fPIC", "-pthread"]
        command = [COMPILER, *flags, f"-DCUDART_VERSION={version}", "-o", str(made), str(_SOURCE)]
        subprocess.run(command, check=True)
        made.rename(path)
    return path


@cache
def fake_runtime(version: int = VERSION) -> CudaRuntime:
    return load_cuda(str(library_path(version)))


def make_pool(layout: KvLayout, num_blocks: int, incarnation: Incarnation) -> DevicePool:
    return DevicePool.create(layout, num_blocks, incarnation, runtime=fake_runtime())


def make_mirrored_pool(layout: KvLayout, num_blocks: int, incarnation: Incarnation) -> DevicePool:
    """As workers have it whose engine reads the mirror: what is promised is brought there."""
    pool = make_pool(layout, num_blocks, incarnation)
    pool.keeps_mirror = True
    return pool


class Steering:
    """What a test makes the simulated device of this process do."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    @classmethod
    def of(cls, version: int = VERSION) -> Self:
        return cls(str(library_path(version)))

    def calls(self, function: str) -> int:
        """How often it was called."""
        return int(self._library.fake_calls(function.encode()))

    def fail(self, function: str, code: int, times: int = 1) -> None:
        self._library.fake_fail(function.encode(), code, times)

    def delay(self, microseconds: int) -> None:
        """Before every copy and fill."""
        self._library.fake_delay(microseconds)

    def devices(self, count: int, *, can_access_peer: bool = True) -> None:
        self._library.fake_devices(count, int(can_access_peer))

    def hold(self, stream: int) -> None:
        """Launch a kernel that runs until `release`."""
        self._library.fake_hold(ctypes.c_void_p(stream))

    def release(self) -> None:
        self._library.fake_release()

    def waiting(self) -> int:
        """Streams that stand still for an event now."""
        return int(self._library.fake_waiting())

    def break_device(self, code: int) -> None:
        """Every call fails with it from now on, and nothing is copied any more."""
        self._library.fake_break(code)

    def recover(self) -> None:
        """Forget an error that stays."""
        self._library.fake_recover()
