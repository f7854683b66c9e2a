"""The kernel of copy_runs.ptx: many runs within the memory that a GPU reaches, in one launch.

A copy engine takes some microseconds for each run, however short it is: on an H200 4,096 runs of
64 KiB take 14 ms, and as many bytes in one piece 0.14 ms. The kernel takes 0.18 ms.

Source of the signatures: cuda.h of CUDA 12.9.
"""

import contextlib
import ctypes
from importlib.resources import files
from typing import Self

import numpy as np

from neuron_di_bindings.cuda_runtime import CudaRuntime, Pointers, check_driver

ALIGNMENT = 16  # of addresses and lengths
_NAME = "copy_runs"
_ITEM_BYTES = 4096  # as in the kernel: what a warp copies at a time
_WARPS_PER_PROGRAM = 8
PROGRAMS_PER_MULTIPROCESSOR: float = 1  # has 95 % of what four have, and leaves room for a step's
_ITEMS_MAX = 1 << 31


def evened(
    destinations: Pointers, sources: Pointers, lengths: Pointers
) -> tuple[Pointers, Pointers, Pointers]:
    """The same bytes in runs about as long as each other, at most twice as many: the kernel has as
    much work with each as with the longest. So none is longer than the mean was, in whole items."""
    size = -(-int(lengths.sum()) // (len(lengths) * _ITEM_BYTES)) * _ITEM_BYTES
    counts = -(-lengths.astype(np.int64) // size)
    firsts = np.cumsum(counts) - counts
    numbers = np.arange(counts.sum()) - firsts.repeat(counts)
    begins = (numbers * size).astype(np.uint64)
    left = lengths.repeat(counts) - begins
    pieces = np.minimum(left, np.uint64(size))
    return destinations.repeat(counts) + begins, sources.repeat(counts) + begins, pieces


class CopyKernel:
    """Loaded for one device, which is the calling thread's current one. Owned by who loaded it."""

    def __init__(self, runtime: CudaRuntime, module: int, function: int, num_programs: int) -> None:
        self._runtime = runtime
        self._module = module
        self._function = function
        self._num_programs = num_programs
        takes = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, *(ctypes.c_uint,) * 7, *(ctypes.c_void_p,) * 3
        )
        self._launch = takes(runtime.driver_function("cuLaunchKernel"))

    @classmethod
    def load(cls, runtime: CudaRuntime, device: int) -> Self:
        """CudaError where the driver does not take it."""
        image = (files("neuron_di_bindings") / f"{_NAME}.ptx").read_bytes()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        takes = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
        load = takes(runtime.driver_function("cuModuleLoadData"))
        check_driver("cuModuleLoadData", load(ctypes.addressof(module), image))
        assert module.value is not None, "the driver says that it has it"
        with contextlib.ExitStack() as undo:
            undo.callback(_unload, runtime, module.value)
            takes = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 2, ctypes.c_char_p)
            find = takes(runtime.driver_function("cuModuleGetFunction"))
            code = find(ctypes.addressof(function), module.value, _NAME.encode())
            check_driver("cuModuleGetFunction", code)
            assert function.value is not None, "the driver says that it has found it"
            num_programs = max(
                1, int(PROGRAMS_PER_MULTIPROCESSOR * runtime.num_multiprocessors(device))
            )
            kernel = cls(runtime, module.value, function.value, num_programs)
            undo.pop_all()  # it is the kernel's now
        return kernel

    @staticmethod
    def takes(num_runs: int, longest: int, num_bytes: int) -> bool:
        """Whether it is made for so many runs: enough of them, and about as long as each other."""
        num_items = num_runs * -(-longest // _ITEM_BYTES)
        return num_items <= min(_ITEMS_MAX, 2 * num_runs + 4 * (num_bytes // _ITEM_BYTES))

    def launch(self, table: int, num_runs: int, longest: int, stream: int) -> None:
        """Copy, in the stream's order. `table` is the address of the runs' destinations, sources
        and lengths, each uint64 [num_runs], in memory that the device reaches. It stays as it is,
        and the runs where they are, until the stream has come past it.

        Runs lie within memory that the device reaches, at multiples of ALIGNMENT.
        """
        num_parts = -(-longest // _ITEM_BYTES)
        num_items = num_runs * num_parts
        values = (
            ctypes.c_uint64(table),
            *map(ctypes.c_uint32, (num_runs, num_parts, num_items)),
        )
        arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        num_programs = min(self._num_programs, -(-num_items // _WARPS_PER_PROGRAM))
        grid, block = (num_programs, 1, 1), (32 * _WARPS_PER_PROGRAM, 1, 1)
        code = self._launch(self._function, *grid, *block, 0, stream, arguments, None)
        check_driver("cuLaunchKernel", code)

    def unload(self) -> None:
        """After its last launch has run."""
        _unload(self._runtime, self._module)


def _unload(runtime: CudaRuntime, module: int) -> None:
    takes = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    unload = takes(runtime.driver_function("cuModuleUnload"))
    check_driver("cuModuleUnload", unload(module))
