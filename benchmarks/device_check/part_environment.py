"""The machine: GPU, driver, clocks, who else computes there, packages, and what it does at best."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from benchmarks.device_check.gpu import FIELDS, processes, query
from benchmarks.device_check.parts import PARTS
from benchmarks.device_check.record import Record, Skip
from benchmarks.device_check.settings import Settings

_PACKAGES = ("torch", "triton", "transformers", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings")


def measure(settings: Settings, record: Record) -> None:
    gpus = query("gpu", FIELDS)
    record.table(
        "nvidia-smi",
        ["", *(f"GPU {number}" for number in range(len(gpus)))],
        [[field, *(gpu[field] for gpu in gpus)] for field in FIELDS],
    )
    others = processes()
    record.note(f"Processes on the GPUs, as nvidia-smi sees them: {len(others) or 'none'}.")
    versions = [f"{name} {found}" for name in _PACKAGES if (found := _version(name))]
    record.note(f"Python {platform.python_version()}, {', '.join(versions) or 'no torch'}.")
    record.note(_compilers())
    missing = sorted({name for part in PARTS for name in part.needs if find_spec(name) is None})
    record.note(f"Packages that parts need and that are missing: {', '.join(missing) or 'none'}.")
    if find_spec("torch") is None:
        raise Skip("torch is missing: no rates")
    _rates(settings, record)


def _compilers() -> str:
    found = [name for name in ("cc", "nvcc", "nvidia-cuda-mps-control") if shutil.which(name)]
    return f"Programs: {', '.join(found) or 'none'}; user id {os.getuid()}."


def _rates(settings: Settings, record: Record) -> None:
    import torch

    from benchmarks.device_check.rates import copy_bytes_per_s, matrix_flops_per_s

    if not settings.is_small:
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU")
        gpu = torch.cuda.get_device_properties(0)
        free_bytes, total_bytes = torch.cuda.mem_get_info(0)
        record.note(
            f"torch has CUDA {torch.version.cuda} and sees {torch.cuda.device_count()}: "
            f"{gpu.name}, sm{gpu.major}{gpu.minor}, {gpu.multi_processor_count} multiprocessors, "
            f"{free_bytes >> 20:,} of {total_bytes >> 20:,} MiB free."
        )
    record.figure("", "copy within GPU memory, read and written, TB/s",
                  copy_bytes_per_s(settings) / 1e12)  # fmt: skip
    record.figure("", "bf16 product of random matrices, TFLOP/s",
                  matrix_flops_per_s(settings) / 1e12)  # fmt: skip


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
