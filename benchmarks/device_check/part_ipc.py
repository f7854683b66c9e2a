"""cuda_ipc between two processes, with a real GPU's handles and events."""

from benchmarks.device_check.record import Record
from benchmarks.device_check.settings import Settings
from benchmarks.device_check.tests_run import run_tests


def measure(_: Settings, record: Record) -> None:
    run_tests(record, ["tests/device"])
