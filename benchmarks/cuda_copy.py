"""Runs within GPU memory: by the copy engines, by the copy kernel, and as many bytes in one piece.

    python -m benchmarks.cuda_copy

Microseconds from the call until the device is done, medians. The kernel has so many programs on
each multiprocessor: what CopyKernel takes is a compromise between its speed and that of the steps
beside it. Needs an NVIDIA GPU with 5 GiB free.
"""

import statistics
from collections.abc import Callable
from contextlib import closing

import numpy as np

from neuron_di.clock import now_s
from neuron_di.kv.device_pool import open_runtime
from neuron_di.transfer.cuda_run_copier import CudaRunCopier
from neuron_di_bindings import cuda_copy_kernel
from neuron_di_bindings.cuda_runtime import CudaRuntime

_KIB, _GIB = 1 << 10, 1 << 30
_REGION_BYTES = 2 * _GIB
_ROUNDS = 15
# Runs and the bytes of each, all scattered.
_CASES = (
    (256, 64 * _KIB),
    (4096, 16 * _KIB),
    (4096, 64 * _KIB),
    (16_384, 4 * _KIB),
    (256, 1024 * _KIB),
    (64, 4096 * _KIB),
    (32, 16_384 * _KIB),
)
_PROGRAMS = (0.25, 0.5, 1, 2, 4)


def median_us(runtime: CudaRuntime, stream: int, launch: Callable[[], object]) -> float:
    durations_s = []
    for _ in range(_ROUNDS):
        runtime.synchronize(stream)
        start_s = now_s()
        launch()
        runtime.synchronize(stream)
        durations_s.append(now_s() - start_s)
    return 1e6 * statistics.median(durations_s)


def main() -> None:
    runtime, rng = open_runtime(), np.random.default_rng(0)
    runtime.set_device(0)
    stream = runtime.create_stream()
    source, destination = (runtime.allocate(_REGION_BYTES) for _ in range(2))
    for address in (source, destination):
        runtime.fill(address, 1, _REGION_BYTES, stream)
    heads = [f"kernel, {programs:g}" for programs in _PROGRAMS]
    print(" ".join(f"{head:>14}" for head in ("runs", "one piece", "engines", *heads)))
    for num_runs, num_bytes in _CASES:
        offsets = [
            rng.permutation(_REGION_BYTES // num_bytes)[:num_runs].astype(np.uint64) * num_bytes
            for _ in range(2)
        ]
        rows = (
            (offsets[0] + destination).astype(np.uint64),
            (offsets[1] + source).astype(np.uint64),
            np.full(num_runs, num_bytes, np.uint64),
        )
        whole = num_runs * num_bytes
        found = [
            median_us(runtime, stream, lambda: runtime.copy(destination, source, whole, stream)),  # noqa: B023
            median_us(runtime, stream, lambda: runtime.copy_runs(*rows, stream)),  # noqa: B023
        ]
        for programs in _PROGRAMS:
            cuda_copy_kernel.PROGRAMS_PER_MULTIPROCESSOR = programs
            with closing(CudaRunCopier(runtime, 0)) as copier:
                launch = copier.copy
                found.append(median_us(runtime, stream, lambda: launch(*rows, stream)))  # noqa: B023
        words = [f"{num_runs} x {num_bytes // _KIB} KiB", *(f"{each:,.0f}" for each in found)]
        print(" ".join(f"{word:>14}" for word in words))
    for address in (source, destination):
        runtime.free(address)
    runtime.destroy_stream(stream)


if __name__ == "__main__":
    main()
