"""What is said of packages: their metadata makes them."""

from pathlib import Path

import pytest
from machine_kit import make_machine, make_package

from neuron_di.config import DoctorOptions, EtcdOptions, TransferOptions
from neuron_di.doctor.finding import Finding, Grade
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.packages import check

NEEDED = ("torch>=2.11", "hypercorn<0.19,>=0.17", 'uvloop>=0.20; sys_platform != "win32"')
EXTRAS = (
    'grpcio>=1.60; extra == "etcd"',
    'protobuf>=3.20; extra == "etcd"',
    'nixl-cu12==1.5.1; extra == "nixl"',
    'etcd3==0.12.0; extra == "etcd3"',
    'protobuf<3.21; extra == "etcd3"',
    'nvidia-cuda-runtime-cu12<13,>=12.8; extra == "cuda"',
)
WELL = {"torch": "2.13.0+cpu", "hypercorn": "0.18.0", "uvloop": "0.21"}
ETCD = DoctorOptions(etcd=EtcdOptions(etcd=("127.0.0.1:2379",)))


def machine_with(tmp_path: Path, packages: dict[str, str | None]) -> Machine:
    site = tmp_path / "site"
    names = [text.split(" == ")[1].strip('"') for text in EXTRAS]
    make_package(site, "neuron-di", "0.1.0", *NEEDED, *EXTRAS, extras=names)
    for name, version in (WELL | packages).items():
        if version is not None:
            make_package(site, name, version)
    return make_machine(tmp_path / "root", package_path=[str(site)])


def found_in(
    tmp_path: Path, packages: dict[str, str | None], options: DoctorOptions | None = None
) -> dict[str, Finding]:
    findings = check(machine_with(tmp_path, packages), options or DoctorOptions())
    return {finding.check: finding for finding in findings}


def grades(findings: dict[str, Finding]) -> set[Grade]:
    return {finding.grade for finding in findings.values()}


def test_what_is_needed_is_there(tmp_path: Path) -> None:
    findings = found_in(tmp_path, {})
    assert grades(findings) == {Grade.OK, Grade.NOTE}
    assert findings["packages.needed"].facts == {"num_wanted": 3, "num_well": 3}
    assert findings["packages.extras"].says == "no extra is installed"


def test_this_environment_is_understood() -> None:
    findings = {each.check: each for each in check(Machine(), DoctorOptions())}
    needed = findings["packages.needed"]
    assert needed.grade is Grade.OK
    assert needed.facts["num_wanted"] == needed.facts["num_well"]


def test_what_is_missing_fails_with_the_command_that_mends_it(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, {"uvloop": None})
    (missing,) = (each for each in check(machine, DoctorOptions()) if each.grade is Grade.FAILED)
    assert missing.check == "packages.needed"
    assert missing.grade is Grade.FAILED
    assert missing.mend == "pip install 'uvloop>=0.20'"


@pytest.mark.parametrize(
    ("device", "grade"),
    [("auto", Grade.WARNING), ("cpu", Grade.FAILED), ("neuron", Grade.FAILED)],
)
def test_a_torch_that_is_missing_may_be_a_proxys(tmp_path: Path, device: str, grade: Grade) -> None:
    options = DoctorOptions(device=device)  # type: ignore[arg-type]
    found = list(check(machine_with(tmp_path, {"torch": None}), options))
    (missing,) = (each for each in found if each.grade.needs_mend)
    assert (missing.check, missing.grade) == ("packages.needed", grade)
    assert "pip install 'torch>=2.11'" in missing.mend
    assert ("a proxy needs none" in missing.says) == (grade is Grade.WARNING)


def test_another_version_was_never_tried(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, {"hypercorn": "0.19.1"})
    (other,) = (each for each in check(machine, DoctorOptions()) if each.grade is Grade.WARNING)
    assert other.check == "packages.needed"
    assert "hypercorn is 0.19.1, and neuron-di asks for <0.19,>=0.17" in other.says


def test_an_old_torch_is_not_replaced_where_torch_neuronx_wants_it(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, {"torch": "2.9.1"})
    make_package(tmp_path / "site", "torch-neuronx", "2.9.0.2.11", "torch==2.9.*")
    (old,) = (each for each in check(machine, DoctorOptions()) if each.grade is Grade.WARNING)
    mend = old.mend
    assert mend.startswith("Leave it so for Neuron devices: torch-neuronx asks for torch==2.9.*")
    assert "pip install" not in mend


@pytest.mark.parametrize(
    ("packages", "options", "grade"),
    [
        ({}, ETCD, Grade.FAILED),
        ({"grpcio": "1.62"}, ETCD, Grade.FAILED),
        ({"grpcio": "1.62"}, DoctorOptions(), Grade.NOTE),
        ({"grpcio": "1.62", "protobuf": "3.19.6"}, ETCD, Grade.WARNING),
        ({"grpcio": "1.48", "protobuf": "4.21"}, ETCD, Grade.WARNING),
        ({"grpcio": "1.62", "protobuf": "7.0"}, ETCD, None),
        ({"grpcio": "1.62", "protobuf": "3.20.3"}, ETCD, None),
    ],
)
def test_the_pair_that_etcd_needs_is_looked_at_where_it_is_needed(
    tmp_path: Path, packages: dict[str, str | None], options: DoctorOptions, grade: Grade | None
) -> None:
    findings = found_in(tmp_path, packages, options)
    if grade is None:
        assert "packages.extra.etcd" not in findings
        assert findings["packages.extras"].facts == {"extras": ["etcd"]}
    else:
        assert findings["packages.extra.etcd"].grade is grade
        assert findings["packages.extra.etcd"].mend == "pip install '.[etcd]' in neuron-di's folder"


def test_nixl_is_of_the_version_that_was_tried(tmp_path: Path) -> None:
    options = DoctorOptions(kv_transfer=TransferOptions(transfer=("nixl", "tcp")))
    extra = found_in(tmp_path, {"nixl-cu12": "1.0.1"}, options)["packages.extra.nixl"]
    assert extra.grade is Grade.WARNING
    assert "nixl-cu12==1.5.1 (1.0.1)" in extra.says


def test_etcd3_beside_a_later_protobuf_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    clash = found_in(tmp_path / "a", {"etcd3": "0.12.0", "protobuf": "5.29"})["packages.etcd3"]
    assert clash.grade is Grade.NOTE
    assert "protobuf 5.29" in clash.says
    fine = found_in(tmp_path / "b", {"etcd3": "0.12.0", "protobuf": "3.20.3"})
    assert "packages.etcd3" not in fine


def test_a_torch_for_cuda_without_a_gpu_is_a_note(tmp_path: Path) -> None:
    torch = found_in(tmp_path / "a", {"torch": "2.13.0+cu130"})["packages.torch"]
    assert torch.grade is Grade.NOTE
    machine = machine_with(tmp_path / "b", {"torch": None})
    make_package(tmp_path / "b/site", "torch", "2.13.0", "nvidia-cudnn-cu13==9.1")
    assert "packages.torch" in {each.check for each in check(machine, DoctorOptions())}
    machine = machine_with(tmp_path / "c", {"torch": "2.13.0+cu130"})
    (tmp_path / "c/root/dev/nvidia0").write_text("")
    assert "packages.torch" not in {each.check for each in check(machine, DoctorOptions())}


def test_what_other_packages_want_is_a_note(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, {})
    make_package(tmp_path / "site", "vllm", "0.16", "torch==2.10.0", "elsewhere==1")
    make_package(tmp_path / "site", "fits", "1", "torch>=2", "garbage ===== 1")
    conflicts = {each.check: each for each in check(machine, DoctorOptions())}["packages.conflicts"]
    assert conflicts.grade is Grade.NOTE
    expected = "vllm 0.16 asks for torch==2.10.0, and there is 2.13.0+cpu"
    assert conflicts.facts["conflicts"] == [expected]


def test_without_metadata_of_our_own_nothing_is_guessed(tmp_path: Path) -> None:
    machine = make_machine(tmp_path, package_path=[str(tmp_path)])
    findings = {each.check: each for each in check(machine, DoctorOptions())}
    assert findings["packages.needed"].grade is Grade.SKIPPED
    assert set(findings) == {"packages.python", "packages.neuron_di", "packages.needed"}
