"""The wheel holds the three packages and works without the source tree."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"neuron_di", "neuron_di_proxy", "neuron_di_bindings"}
BUILD_TIMEOUT_S = 300


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git would hand to a user: a build leaves traces in its tree."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith(("tests/", "examples/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source],
        check=True,
        capture_output=True,
        timeout=BUILD_TIMEOUT_S,
    )
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_has_exactly_the_three_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_the_wheel_works_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import neuron_di, neuron_di_proxy, neuron_di_bindings.cpu_kernels as kernels\n"
        "from neuron_di.cli import main\n"
        "assert neuron_di.__file__.startswith(__import__('os').getcwd()), neuron_di.__file__\n"
        "kernels.load()\n"
        "main(['--version'])\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("neuron-di ")


def test_the_source_roots_are_no_packages() -> None:
    """A top-level `proxy` would shadow, or be shadowed by, another project's."""
    for folder in ("proxy", "runtime_bindings"):
        assert not (ROOT / folder / "__init__.py").exists()


def made_venv(folder: Path, extra: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """How `.ci/make-venv` ended in a folder that has no more than it reads."""
    (folder / ".ci").mkdir()
    for name in (".ci/make-venv", "pyproject.toml"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    command = ["bash", folder / ".ci/make-venv", extra]
    env = os.environ | environ
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def program(path: Path, words: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{words}\n")
    path.chmod(0o755)
    return str(path)


def test_no_environment_is_made_of_a_python_that_is_too_old(tmp_path: Path) -> None:
    old = program(tmp_path / "python3.10", '[ "$1" = -m ] && mkdir -p "$3/bin"')
    made = made_venv(tmp_path, "demo", PYTHON=old)
    assert made.returncode == 1
    assert f"{old} is no Python 3.11 or newer: name one with PYTHON=" in made.stderr
    assert not (tmp_path / ".venv/bin").exists()


def test_an_environment_whose_packages_are_unknown_is_not_said_to_be_made(tmp_path: Path) -> None:
    program(tmp_path / ".venv/bin/pip", "exit 0")
    program(tmp_path / ".venv/bin/python", f'[ "$1" = - ] || exit 0; exec {sys.executable} "$@"')
    assert made_venv(tmp_path, "dmeo").returncode == 1
    assert not (tmp_path / ".venv/dmeo").exists()
