"""All checks together: what each of their findings must have."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neuron_di.config import DoctorOptions
from neuron_di.doctor import checks
from neuron_di.doctor.checks import CHECKS, GROUPS, chosen
from neuron_di.doctor.finding import Finding, Grade
from neuron_di.errors import ConfigError

FOLDER = Path(checks.__file__).parent
NAME = re.compile(r"[a-z]+(\.[a-z0-9_]+)+")


def made_findings() -> Iterator[tuple[str, dict[str, ast.expr]]]:
    """Each place of the package that makes a finding: where, and its arguments."""
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func)
                arguments = {each.arg: each.value for each in node.keywords if each.arg}
                if function.startswith("Finding.") or function.endswith(".unmet"):
                    grade = function.rpartition(".")[2].upper().replace("UNMET", "FAILED")
                    arguments["grade"] = ast.parse(f"Grade.{grade}", mode="eval").body
                    arguments |= dict(zip(("check", "says", "mend"), node.args, strict=False))
                elif function != "Finding":
                    continue
                yield f"{path.name}:{node.lineno}", arguments


PLACES = dict(made_findings())


def test_the_findings_are_found() -> None:
    assert len(PLACES) > 160


@pytest.mark.parametrize("place", PLACES)
def test_each_warning_and_each_failure_says_the_mend(place: str) -> None:
    arguments = PLACES[place]
    grades = re.findall(r"Grade\.(\w+)", ast.unparse(arguments["grade"]))
    is_open = not grades  # the grade is a variable's: it may be any
    if is_open or {"WARNING", "FAILED"} & set(grades):
        mend = arguments.get("mend")
        assert mend is not None
        assert not (isinstance(mend, ast.Constant) and not mend.value)


@pytest.mark.parametrize("place", PLACES)
def test_each_name_is_a_groups(place: str) -> None:
    """`doctor` is the doctor itself: what became of a check."""
    name = PLACES[place]["check"]
    if isinstance(name, ast.Constant):
        assert isinstance(name.value, str)
        assert NAME.fullmatch(name.value)
        assert name.value.partition(".")[0] in (*GROUPS, "doctor")


def test_every_check_has_a_module_of_its_own() -> None:
    modules = [check.module for check in CHECKS]
    assert len(set(modules)) == len(modules)
    for check in CHECKS:
        tree = ast.parse((FOLDER / f"{check.module}.py").read_text(encoding="utf-8"))
        functions = [each.name for each in tree.body if isinstance(each, ast.FunctionDef)]
        assert "check" in functions, check.module


def test_a_finding_without_what_it_needs_is_a_bug() -> None:
    if not __debug__:
        pytest.skip("asserts are off")
    for arguments in (
        {"check": "host.memory", "grade": Grade.FAILED, "says": "bad"},
        {"check": "host.memory", "grade": Grade.WARNING, "says": "bad"},
        {"check": "host", "grade": Grade.OK, "says": "fine"},
        {"check": "Host.Memory", "grade": Grade.OK, "says": "fine"},
        {"check": "host.memory", "grade": Grade.OK, "says": ""},
    ):
        with pytest.raises(AssertionError):
            Finding(**arguments)  # type: ignore[arg-type]
    assert Finding(check="host.memory", grade=Grade.OK, says="fine").group == "host"


def test_groups_can_be_chosen() -> None:
    assert chosen(DoctorOptions()) == list(CHECKS)
    some = chosen(DoctorOptions(only=("etcd", "host")))
    assert [check.group for check in some] == ["host", "etcd"]
    with pytest.raises(ConfigError, match="no group 'etc'; the nearest is 'etcd'"):
        chosen(DoctorOptions(only=("etc",)))


@pytest.mark.parametrize(
    ("device", "only", "is_refused"),
    [
        ("cpu", ("neuron",), True),
        ("cpu", ("neuron", "cuda"), True),
        ("cuda", ("neuron",), True),
        ("neuron", ("neuron",), False),
        ("neuron", ("efa",), False),
        ("cpu", ("neuron", "host"), False),
        ("auto", ("neuron",), False),
    ],
)
def test_a_device_may_leave_nothing_to_look_at(
    device: Any, only: tuple[str, ...], is_refused: bool
) -> None:
    options = DoctorOptions(device=device, only=only)
    if not is_refused:
        assert chosen(options)
        return
    with pytest.raises(ConfigError, match=f"--device {device} leaves out all of --only neuron"):
        chosen(options)


def test_the_page_has_every_group_in_order() -> None:
    page = (Path(__file__).parents[3] / "docs/doctor.md").read_text(encoding="utf-8")
    table = page.partition("## What it checks")[2].partition("##")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(GROUPS)


def test_a_machine_comes_first_and_a_transfer_last() -> None:
    assert (GROUPS[0], GROUPS[-1]) == ("host", "transfer")
