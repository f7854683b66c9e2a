"""The Triton kernels' own tests: on the GPU here, in Triton's interpreter in a rehearsal."""

from benchmarks.device_check.record import Record
from benchmarks.device_check.settings import Settings
from benchmarks.device_check.tests_run import run_tests

FOLDER = "tests/unit/backends/cuda_kernels"


def measure(settings: Settings, record: Record) -> None:
    # A rehearsal of all of them takes minutes, and `make test-kernels` runs them anyway.
    paths = [f"{FOLDER}/test_cuda_write_kv.py"] if settings.is_small else [FOLDER]
    run_tests(record, paths, num_processes=1 if settings.is_small else 4)
