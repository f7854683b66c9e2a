"""One NVIDIA GPU, as the backend uses it: its stream, its memory, and tensors in a pool's memory.

With TRITON_INTERPRET=1 nothing is computed on a GPU: tensors lie in the host's memory, kernels run
in Triton's interpreter, and the pool's "device" is the CUDA runtime's simulator. This is for tests.

Run on one GPU so far (docs/cuda.md).
"""

import contextlib
import ctypes
import os
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_di.config import available_memory_bytes
from neuron_di.errors import ConfigError
from neuron_di_bindings.cuda_runtime import CudaRuntime

CAPABILITY_MIN = (8, 0)  # bfloat16 on the matrix unit, and what the kernels' tiles need
_MULTIPROCESSORS_INTERPRETED = 4


class CudaDevice:
    """What computes for one worker. Make it with `open`; the stream lives as long as it does."""

    def __init__(self, index: int, runtime: CudaRuntime, *, is_interpreted: bool) -> None:
        self.index = index
        self.is_interpreted = is_interpreted
        self.runtime = runtime
        if is_interpreted:
            self.torch_device = torch.device("cpu")
            self.name, self.capability = "Triton's interpreter", CAPABILITY_MIN
            self.num_multiprocessors = _MULTIPROCESSORS_INTERPRETED
            with runtime.on_device(index):
                self.stream = runtime.create_stream()
            return
        self.torch_device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        self.name, self.capability = properties.name, (properties.major, properties.minor)
        self.num_multiprocessors = properties.multi_processor_count
        self._torch_stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self.stream = int(self._torch_stream.cuda_stream)  # a cudaStream_t

    @classmethod
    def open(cls, index: int, runtime: CudaRuntime) -> "CudaDevice":
        """ConfigError, with the mend, where it cannot compute for us."""
        is_interpreted = _is_interpreted()
        num_devices = runtime.num_devices()
        if not 0 <= index < num_devices:
            raise ConfigError(
                f"there is no GPU {index} among the {num_devices} that this process sees: see "
                "--cuda-devices and CUDA_VISIBLE_DEVICES",
                param="cuda_devices",
            )
        if not is_interpreted:
            _check_torch()
            _check_compiler()
            capability = torch.cuda.get_device_capability(index)
            if capability < CAPABILITY_MIN:
                raise ConfigError(
                    f"GPU {index} ({torch.cuda.get_device_name(index)}) has compute capability "
                    f"{_dotted(capability)}, and --device cuda needs {_dotted(CAPABILITY_MIN)} or "
                    "higher (Ampere): choose another one with --cuda-devices, or --device cpu"
                )
        return cls(index, runtime, is_interpreted=is_interpreted)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """What torch and Triton launch within the block goes to the device, on the one stream."""
        if self.is_interpreted:
            with np.errstate(all="ignore"):  # NumPy would warn of what fillers' rows hold
                yield
            return
        with torch.cuda.device(self.index), torch.cuda.stream(self._torch_stream):
            yield

    def synchronize(self) -> None:
        """Wait until all that was launched on the stream is done."""
        with self.runtime.on_device(self.index):  # else a thread may take another GPU's memory
            self.runtime.synchronize(self.stream)

    def free_bytes(self) -> int:
        """Memory that nobody on this GPU has taken, as of now."""
        if self.is_interpreted:
            return available_memory_bytes()
        torch.cuda.empty_cache()  # what torch keeps and does not use is free to us
        free_bytes, _ = torch.cuda.mem_get_info(self.index)
        return free_bytes

    def tensor_at(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The device memory at this address as a tensor. Whoever owns the memory keeps it."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if self.is_interpreted:
            memory = (ctypes.c_uint8 * num_bytes).from_address(address)
            flat = torch.frombuffer(memory, dtype=torch.uint8)
        else:
            flat = torch.as_tensor(_Bytes(address, num_bytes), device=self.torch_device)
        return flat.view(dtype).view(*shape)

    def pinned(self, *shape: int) -> Tensor:
        """Host memory for int32 numbers, which are copied to the device without a wait."""
        return torch.zeros(shape, dtype=torch.int32, pin_memory=not self.is_interpreted)


class _Bytes:
    """Device memory, told of as CuPy and Numba do."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def _is_interpreted() -> bool:
    """Whether kernels run on the processor. ConfigError where there is no Triton."""
    from neuron_di.backends.cuda_kernels.triton_language import IS_INTERPRETED

    return IS_INTERPRETED


def _check_torch() -> None:
    if torch.version.cuda is None:
        raise ConfigError(
            f"--device cuda needs PyTorch built for CUDA, and {torch.__version__} is not: install "
            "it from the index that https://pytorch.org names for your driver"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"PyTorch {torch.__version__} finds no NVIDIA GPU: nvidia-smi says whether the driver "
            f"works, and whether it is recent enough for CUDA {torch.version.cuda}"
        )


def _check_compiler() -> None:
    """Triton builds what launches its kernels with it, when the first one is."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not compiler or not header.is_file():
        lacks = f"Python's headers ({header})" if compiler else "a C compiler (gcc or clang)"
        raise ConfigError(
            f"--device cuda needs {lacks}, by which Triton builds what launches its kernels: "
            "apt install gcc python3-dev, or what your system calls them"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
