"""The doctor where torch is not installed, as in the image of a proxy: a Python of its own.

It is a virtual environment with links to all packages of this one but torch's; whatever the doctor
starts there is of that Python, too.
"""

import json
import os
import site
import subprocess
import venv
from pathlib import Path

import pytest
from neuron_machines import instance

from neuron_di.etcd.child import free_ports

ROOT = Path(__file__).resolve().parents[3]
SOURCES = (ROOT, ROOT / "proxy", ROOT / "runtime_bindings")
TIMEOUT_S = 100
CHECK = """if True:
    import os, sys
    from pathlib import Path
    from neuron_di.config import DoctorOptions
    from neuron_di.doctor.checks import CHECKS
    from neuron_di.doctor.machine import Machine

    machine = Machine(root=Path(sys.argv[1]), environment=dict(os.environ))
    for check in CHECKS:
        if check.group == "neuron" or check.group == "efa":
            for finding in check.function()(machine, DoctorOptions(device=sys.argv[2])):
                print(finding.encoded().decode())
    assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that cannot import torch, and sees no metadata of it."""
    folder = tmp_path_factory.mktemp("without-torch")
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for site_packages in filter(Path.is_dir, map(Path, site.getsitepackages())):
        for each in site_packages.iterdir():
            is_torch = each.name == "torch" or each.name.startswith("torch-")
            if not is_torch and not (packages / each.name).exists():
                (packages / each.name).symlink_to(each)
    interpreter = folder / "bin/python"
    failed = subprocess.run(
        [interpreter, "-c", "import torch"], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert "No module named 'torch'" in failed.stderr
    return interpreter


def run(python: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {
        "PATH": "/nowhere",
        "HOME": str(python.parents[1]),
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
    }
    return subprocess.run(
        [python, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def doctor(python: Path, *flags: str) -> tuple[int, dict[str, str]]:
    """(exit code, the worst grade of each check)."""
    (port,) = free_ports(1)
    ended = run(python, "-m", "neuron_di", "doctor", "--json", "--port", str(port), *flags)
    assert ended.stderr == ""
    order = ("skipped", "ok", "note", "warning", "failed")
    grades: dict[str, str] = {}
    for finding in json.loads(ended.stdout)["findings"]:
        worst = max(grades.get(finding["check"], "skipped"), finding["grade"], key=order.index)
        grades[finding["check"]] = worst
    return ended.returncode, grades


def test_a_proxys_machine_is_well(python: Path) -> None:
    """This one, whatever it has."""
    code, grades = doctor(python, "--only", "packages,cpu,neuron,transfer,environment")
    assert (code, [check for check, grade in grades.items() if grade == "failed"]) == (0, [])
    assert grades["packages.needed"] == grades["cpu.torch"] == "warning"


def test_a_machine_that_is_to_compute_is_not(python: Path) -> None:
    code, grades = doctor(python, "--only", "packages,cpu", "--device", "cpu")
    assert code == 1
    assert {check for check, grade in grades.items() if grade == "failed"} == {
        "packages.needed",
        "cpu.torch",
    }


def test_the_compiler_is_missing_and_that_is_no_bug(python: Path) -> None:
    code, grades = doctor(python, "--only", "neuron", "--device", "neuron")
    assert code == 1
    assert grades["neuron.compiler"] == "warning"
    assert "doctor.bug" not in grades


@pytest.mark.parametrize("device", ["auto", "neuron"])
def test_every_check_of_devices_is_made_to_its_end(
    python: Path, tmp_path: Path, device: str
) -> None:
    """On a node's bus; with "auto" there is no file in /dev, as in the container of a proxy."""
    root = instance(tmp_path / "root", "trn1.32xlarge")
    if device == "auto":
        root.remove("/dev/neuron*")
        root.remove("/dev/infiniband/*")
    ended = run(python, "-c", CHECK, str(root.folder), device)
    assert (ended.returncode, ended.stderr) == (0, "")
    findings = [json.loads(line) for line in ended.stdout.splitlines()]
    grades = {each["check"]: each["grade"] for each in findings}
    assert ("failed" in grades.values()) == (device == "neuron")
    packages = next(each for each in findings if each["check"] == "neuron.packages")
    assert "--extra-index-url https://pip.repos.neuron.amazonaws.com" in packages["mend"]
    assert ("neuron.compiler" in grades) == (device == "neuron")
