"""What is said of the clock."""

from pathlib import Path

import pytest
from machine_kit import make_machine

from neuron_di.config import DoctorOptions
from neuron_di.doctor.clock import KernelClock, check, judged, read_kernel_clock
from neuron_di.doctor.finding import Grade
from neuron_di.doctor.machine import Machine


@pytest.mark.parametrize(
    ("is_synchronised", "max_error_s", "grade"),
    [
        (True, 0.0012, Grade.OK),
        (True, 3.0, Grade.WARNING),
        (False, 0.0012, Grade.WARNING),
        (False, 16.0, Grade.WARNING),
    ],
)
def test_the_kernels_word_decides(is_synchronised: bool, max_error_s: float, grade: Grade) -> None:
    clock = KernelClock(is_synchronised=is_synchronised, max_error_s=max_error_s)
    finding = judged(clock, "chronyd")
    assert finding.grade is grade
    assert finding.facts == {
        "is_synchronised": is_synchronised,
        "max_error_s": max_error_s,
        "daemon": "chronyd",
    }


def test_this_machines_kernel_is_asked() -> None:
    clock = read_kernel_clock()
    assert 0 <= clock.max_error_s < 1e6
    (finding,) = check(Machine(), DoctorOptions())
    assert finding.facts["is_synchronised"] == clock.is_synchronised


def test_what_keeps_the_time_is_found_by_its_name(tmp_path: Path) -> None:
    files = {"/proc/1/comm": "systemd\n", "/proc/77/comm": "chronyd\n"}
    (finding,) = check(make_machine(tmp_path, files), DoctorOptions())
    assert finding.facts["daemon"] == "chronyd"
