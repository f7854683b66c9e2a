"""The backend's own tests, and those of its parts."""

from benchmarks.device_check.record import Record
from benchmarks.device_check.settings import ROOT, Settings
from benchmarks.device_check.tests_run import run_tests


def measure(settings: Settings, record: Record) -> None:
    folder = ROOT / "tests" / "unit" / "backends" / "cuda"
    paths = sorted(path.relative_to(ROOT).as_posix() for path in folder.glob("test_cuda_*.py"))
    if settings.is_small:  # `make test-kernels` runs all of them anyway
        paths = paths[:1]
    run_tests(record, paths, num_processes=2)
