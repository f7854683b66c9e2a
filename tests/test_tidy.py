"""What holds for every file of the packages."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("neuron_di", "proxy/neuron_di_proxy", "runtime_bindings/neuron_di_bindings")
LINES_MAX = 400
FUNCTION_LINES_MAX = 70
BANNED_NAMES = {"utils.py", "common.py", "helpers.py", "manager.py", "base.py"}
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
BANNED_CALLS = {"eval", "exec", "torch.load"}
MAY_PRINT = ("cli.py", "status.py")
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:home|Users|root|work|mnt|private)/\w")


def in_packages() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def everywhere() -> list[Path]:
    folders = [ROOT / name for name in (*PACKAGES, "tests", "examples", "benchmarks")]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@pytest.fixture(scope="module", autouse=True)
def forget_the_trees() -> Iterator[None]:
    """They are two million objects, which every garbage collection would look through."""
    yield
    tree_of.cache_clear()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_the_files_are_found():
    assert len(in_packages()) > 50
    assert all((ROOT / name / "__init__.py").is_file() for name in PACKAGES)


def test_no_two_test_files_share_a_name():
    """Without packages between them pytest takes both for one module, and collects neither."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len(paths) > 100
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(path.name, []).append(short(path))
    assert [twins for twins in by_name.values() if len(twins) > 1] == []


@pytest.mark.parametrize("path", everywhere(), ids=short)
def test_a_file_is_short_and_says_what_it_is(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_MAX
    assert path.name not in BANNED_NAMES
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < FUNCTION_LINES_MAX, node.name


@pytest.mark.parametrize("path", everywhere(), ids=short)
def test_a_file_runs_no_foreign_code_and_names_no_machine(path):
    roots = {name.split(".")[0] for name in imported_modules(path)}
    assert not roots & BANNED_MODULES
    assert not set(calls(path)) & BANNED_CALLS
    if path != Path(__file__):
        assert not MACHINE_PATH.search(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", in_packages(), ids=short)
def test_a_module_is_documented_and_keeps_to_its_means(path):
    docstring = ast.get_docstring(tree_of(path))
    assert docstring
    for line in re.findall(r"^Next: (.+)$", docstring, re.MULTILINE):
        for name in line.split(", "):
            assert (ROOT / name).is_file(), name
    assert "time" not in set(imported_modules(path)) or short(path) == "neuron_di/clock.py"
    assert "print" not in set(calls(path)) or path.name in MAY_PRINT


@pytest.mark.parametrize("path", in_packages(), ids=short)
def test_what_a_module_offers_is_sorted_and_there(path):
    names = [
        ast.literal_eval(node.value)
        for node in tree_of(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    defined = {
        name.split(".")[-1] for name in imported_modules(path) if not name.startswith("collections")
    }
    for exported in names:
        # As ruff sorts: constants, then classes, then the rest.
        assert exported == sorted(exported, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
        assert len(exported) == len(set(exported))
        assert path.name != "__init__.py" or set(exported) - {"__version__"} <= defined


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("neuron_di", ("torch", "zmq", "quart", "aiohttp", "transformers")),
        ("neuron_di.wire", ("torch", "zmq", "asyncio", "numpy")),
        ("neuron_di.core", ("torch", "zmq", "asyncio")),
        ("neuron_di.cli", ("torch",)),
        ("neuron_di_proxy.process", ("torch", "numpy", "tokenizers", "neuron_di_bindings")),
    ],
)
def test_an_import_loads_no_more_than_it_needs(module, absent):
    script = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
