"""What is said of what computes on the host."""

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

import neuron_di_bindings
import neuron_di_proxy
from neuron_di.config import DoctorOptions
from neuron_di.doctor.cpu import check
from neuron_di.doctor.finding import Finding, Grade
from neuron_di.doctor.machine import Machine
from neuron_di_bindings import cpu_kernels


def by_name(machine: Machine | None = None, device: str = "auto") -> dict[str, Finding]:
    options = DoctorOptions(device=device)  # type: ignore[arg-type]
    return {finding.check: finding for finding in check(machine or Machine(), options)}


def test_all_that_was_built_loads() -> None:
    findings = by_name()
    assert findings["cpu.kernels"].facts["instruction_sets"] == list(cpu_kernels.load().isas)
    assert findings["cpu.compiled"].facts == {"missing": [], "broken": []}
    assert findings["cpu.torch"].grade is Grade.OK


def test_what_was_not_built_is_told_with_its_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_di.doctor.cpu.EXTENSION_SUFFIXES", [".of-another-python.so"])
    compiled = by_name()["cpu.compiled"]
    assert compiled.grade is Grade.WARNING
    assert "KV is copied by numpy" in compiled.says
    assert "neuron_di_proxy._token_lane" in compiled.says


@pytest.mark.parametrize(
    ("package", "module", "grade", "effect"),
    [
        (neuron_di_bindings, "_kv_copy", Grade.WARNING, "KV is copied by numpy"),
        (neuron_di_proxy, "_token_lane", Grade.FAILED, "no proxy starts"),
    ],
)
def test_what_was_built_for_another_machine_is_told(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    package: ModuleType,
    module: str,
    grade: Grade,
    effect: str,
) -> None:
    """It is there, and the loader refuses it."""
    for path in Path(str(package.__file__)).parent.glob("*.so"):
        shutil.copy(path, tmp_path)
    assert package.__spec__ is not None
    monkeypatch.setattr(package.__spec__, "submodule_search_locations", [str(tmp_path)])
    (file,) = tmp_path.glob(f"{module}*")
    file.write_bytes(b"of another machine")
    compiled = by_name()["cpu.compiled"]
    assert compiled.grade is grade
    words = f"does not load: {package.__name__}.{module} (file too short); so {effect}"
    assert compiled.says == words
    assert compiled.facts["broken"] == [f"{package.__name__}.{module}"]


def test_kernels_that_are_not_there_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_kernels, "__file__", str(tmp_path / "cpu_kernels.py"))
    cpu_kernels.load.cache_clear()
    try:
        kernels = by_name()["cpu.kernels"]
    finally:
        cpu_kernels.load.cache_clear()
    assert kernels.grade is Grade.WARNING
    assert "pip install --force-reinstall --no-deps .` in neuron-di's folder" in kernels.mend


def test_a_torch_that_does_not_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    torch = by_name()["cpu.torch"]
    assert torch.grade is Grade.FAILED
    assert torch.says.startswith("torch does not load: ")


def test_a_torch_that_lacks_a_part_fails_whatever_its_metadata(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is there, and does not load: nobody left it out on purpose."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import no_such_part_of_torch\n")
    for name in [each for each in sys.modules if each.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    torch = by_name(Machine(package_path=[str(tmp_path)]))["cpu.torch"]
    assert torch.grade is Grade.FAILED
    assert "no_such_part_of_torch" in torch.says


@pytest.mark.parametrize(
    ("device", "grade"),
    [("auto", Grade.WARNING), ("cpu", Grade.FAILED), ("neuron", Grade.FAILED)],
)
def test_a_torch_that_is_not_installed_is_no_failure_of_a_proxy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, grade: Grade
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    torch = by_name(Machine(package_path=[str(tmp_path)]), device)["cpu.torch"]
    assert torch.grade is grade
    assert ("a proxy needs none" in torch.says) == (grade is Grade.WARNING)
