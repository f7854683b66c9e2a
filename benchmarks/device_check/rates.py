"""What this GPU does at best, measured: a copy within its memory, and a product of matrices."""

import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.device_check.settings import Settings


def synchronize() -> None:
    """Until all that was launched is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed_s(call: Callable[[], object], *, warm_ups: int, repeats: int) -> list[float]:
    """Seconds of each call, to the end of what it launches."""
    for _ in range(warm_ups):
        call()
    durations_s = []
    for _ in range(repeats):
        synchronize()
        start_s = time.perf_counter()
        call()
        synchronize()
        durations_s.append(time.perf_counter() - start_s)
    return durations_s


def copy_bytes_per_s(settings: Settings) -> float:
    """Of bytes read and bytes written together."""
    num_bytes = settings.pick(4 << 30, 4 << 30, 1 << 20)
    durations_s = _copy_s(settings, num_bytes)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # a KV pool's memory is not torch's
    return 2 * num_bytes / median(durations_s)


def _copy_s(settings: Settings, num_bytes: int) -> list[float]:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=_device(settings))
    target = torch.empty_like(source)
    return timed_s(lambda: target.copy_(source), warm_ups=3, repeats=10)


def matrix_flops_per_s(settings: Settings) -> float:
    """Of a bfloat16 product of two random square matrices."""
    size = settings.pick(8192, 8192, 64)
    left, right = (
        torch.randn(size, size, dtype=torch.bfloat16, device=_device(settings)) for _ in range(2)
    )
    durations_s = timed_s(lambda: left @ right, warm_ups=5, repeats=20)
    return 2.0 * size**3 / median(durations_s)


def _device(settings: Settings) -> str:
    return "cpu" if settings.is_small else "cuda"
