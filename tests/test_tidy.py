"""What holds for every file of the packages."""

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Source:
    """What the tests ask of a file, without its tree: two million objects would slow them all."""

    text: str
    docstring: str | None
    modules: frozenset[str]  # that it imports, and the names that it takes from them
    calls: frozenset[str]
    functions: tuple[tuple[str, int], ...]  # name, and lines below the first one
    exports: tuple[list[str], ...]  # every __all__


@cache
def source_of(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, str(path))
    modules: set[str] = set()
    calls: set[str] = set()
    functions = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                modules.update(alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                modules.add(module)
                modules.update(f"{module}.{alias.name}" for alias in node.names)
            case ast.Call(func=ast.Name(id=name)):
                calls.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)):
                calls.add(f"{owner}.{name}")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                assert node.end_lineno is not None
                functions.append((node.name, node.end_lineno - node.lineno))
    exports = tuple(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    docstring = ast.get_docstring(tree)
    return Source(text, docstring, frozenset(modules), frozenset(calls), tuple(functions), exports)


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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
def test_a_file_is_short_runs_no_foreign_code_and_names_no_machine(path):
    source = source_of(path)
    assert len(source.text.splitlines()) <= LINES_MAX
    assert path.name not in BANNED_NAMES
    assert [name for name, lines in source.functions if lines >= FUNCTION_LINES_MAX] == []
    assert not {name.split(".")[0] for name in source.modules} & BANNED_MODULES
    assert not source.calls & BANNED_CALLS
    if path != Path(__file__):
        assert not MACHINE_PATH.search(source.text)


@pytest.mark.parametrize("path", in_packages(), ids=short)
def test_a_module_is_documented_keeps_to_its_means_and_offers_what_is_there(path):
    source = source_of(path)
    assert source.docstring
    for line in re.findall(r"^Next: (.+)$", source.docstring, re.MULTILINE):
        for name in line.split(", "):
            assert (ROOT / name).is_file(), name
    assert "time" not in source.modules or short(path) == "neuron_di/clock.py"
    assert "print" not in source.calls or path.name in MAY_PRINT
    defined = {name.split(".")[-1] for name in source.modules if not name.startswith("collections")}
    for exported in source.exports:
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
