"""What is said of variables."""

from pathlib import Path

import pytest
from machine_kit import found, make_machine

from neuron_di.config import DoctorOptions
from neuron_di.doctor.environment import check
from neuron_di.doctor.finding import Grade


def test_nothing_set_is_nothing_wrong(tmp_path: Path) -> None:
    findings = found(check, make_machine(tmp_path))
    assert {each.grade for each in findings.values()} == {Grade.OK}


def test_a_variable_that_ends_every_server_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    environment = {"NEURON_DI_PROT": "1", "NEURON_DI_PORT": "8001", "NEURON_DI_CUDART": "/x"}
    wrong, well, _ = check(make_machine(tmp_path, environment=environment), DoctorOptions())
    assert wrong.grade is Grade.FAILED
    assert wrong.says.endswith("unknown variable NEURON_DI_PROT; the nearest valid one is "
                               "NEURON_DI_PORT")  # fmt: skip
    assert (wrong.check, well.check) == ("environment.ours", "environment.ours")
    assert well.facts["names"] == ["NEURON_DI_CUDART", "NEURON_DI_PORT"]


def test_a_value_that_is_refused_is_not_told(tmp_path: Path) -> None:
    environment = {"NEURON_DI_ETCD": "http://root:hunter2, not it@h:2379", "NEURON_DI_PORT": "x"}
    etcd, port, *_ = check(make_machine(tmp_path, environment=environment), DoctorOptions())
    assert "hunter2" not in f"{etcd}"
    assert " it@h" not in f"{etcd}"
    assert etcd.says.startswith("no server starts: NEURON_DI_ETCD must be ")
    assert port.says.startswith("no server starts: NEURON_DI_PORT must be a whole number")


@pytest.mark.parametrize(
    ("environment", "grade"),
    [
        ({"http_proxy": "http://user:secret@proxy:3128"}, Grade.WARNING),
        ({"HTTP_PROXY": "http://proxy:3128", "no_proxy": "localhost"}, Grade.WARNING),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost, 127.0.0.1"}, Grade.OK),
        ({"http_proxy": "http://proxy:3128", "NO_PROXY": "*"}, Grade.OK),
        ({"http_proxy": ""}, Grade.OK),
        ({"https_proxy": "http://proxy:3128"}, Grade.OK),
    ],
)
def test_a_proxy_before_our_own_machine_is_a_trouble(
    tmp_path: Path, environment: dict[str, str], grade: Grade
) -> None:
    finding = found(check, make_machine(tmp_path, environment=environment))
    proxy = finding["environment.http_proxy"]
    assert proxy.grade is grade
    assert "secret" not in f"{proxy}"


@pytest.mark.parametrize(
    ("environment", "is_bound"),
    [
        ({"OMP_PROC_BIND": "true"}, True),
        ({"OMP_PROC_BIND": "FALSE"}, False),
        ({"GOMP_CPU_AFFINITY": "0-3"}, True),
        ({"OMP_NUM_THREADS": "1"}, False),
    ],
)
def test_bound_threads_are_a_trouble(
    tmp_path: Path, environment: dict[str, str], is_bound: bool
) -> None:
    findings = found(check, make_machine(tmp_path, environment=environment))
    assert ("environment.binding" in findings) == is_bound
