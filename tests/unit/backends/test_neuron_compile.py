"""Compiling once for each configuration, and leaving nothing half-made."""

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from neuron_backend_kit import compiled, engine_options, manifest_for, simulated
from safetensors.torch import load_file, save_file

from neuron_di.backends import neuron_compile
from neuron_di.backends.neuron_artifact import MANIFEST, NEURON_CONFIG
from neuron_di.backends.neuron_compile import Compiled, compile_artifact, num_bytes_in
from neuron_di.config import EngineOptions
from neuron_di.errors import CheckpointError, ConfigError


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path / "root", monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


@pytest.fixture
def options(root: Path) -> EngineOptions:
    return engine_options(root)


class Compiler:
    """Stands before the real compile: counts, and does something meanwhile."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.work_folders: list[str] = []
        self.meanwhile = lambda: None
        self._compile = neuron_compile.compile_model
        patch.setattr(neuron_compile, "compile_model", self)

    def __call__(self, *arguments: Any) -> None:
        self.work_folders.append(os.environ["BASE_COMPILE_WORK_DIR"])
        self._compile(*arguments)
        self.meanwhile()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.delenv("BASE_COMPILE_WORK_DIR", raising=False)
    return Compiler(monkeypatch)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_second_time_is_a_hit(
    llama_folder: Path, root: Path, options: EngineOptions, compiler: Compiler
) -> None:
    key = manifest_for(llama_folder, options).key
    assert compiled(llama_folder, options) == Compiled(root / key, is_new=True)
    assert compiled(llama_folder, options) == Compiled(root / key, is_new=False)
    assert len(compiler.work_folders) == 1
    assert names(root) == [key, f"{key}.lock"]
    assert {MANIFEST, NEURON_CONFIG, "model.pt", "weights"} == set(names(root / key))
    assert "BASE_COMPILE_WORK_DIR" not in os.environ


def test_each_configuration_has_its_own(llama_folder: Path, root: Path, compiler: Compiler) -> None:
    folders = {
        compiled(llama_folder, engine_options(root, **fields)).folder
        for fields in ({}, {"tp": 2}, {"decode_batch": 2}, {"dtype": "auto"})
    }
    assert len(folders) == len(compiler.work_folders) == len(set(compiler.work_folders)) == 4


def test_weights_that_would_be_left_out_are_named_before(
    llama_folder: Path, root: Path, options: EngineOptions, compiler: Compiler, tmp_path: Path
) -> None:
    model = shutil.copytree(llama_folder, tmp_path / "model")
    name = "model.layers.0.self_attn.q_proj.bias"
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {name: torch.ones(128)}, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} is stored, but config.json implies none"):
        compiled(model, options)
    assert compiler.work_folders == []
    assert names(root) == [f"{manifest_for(model, options).key}.lock"]


def test_it_appears_whole_or_not_at_all(
    llama_folder: Path, root: Path, options: EngineOptions, compiler: Compiler
) -> None:
    key = manifest_for(llama_folder, options).key

    def look() -> None:
        assert not (root / key).exists()
        assert num_bytes_in(root, key) > 0

    compiler.meanwhile = look
    compiled(llama_folder, options)
    assert num_bytes_in(root, key) == 0


@pytest.mark.parametrize("error", [ConfigError("no"), KeyboardInterrupt(), OSError(28, "No space")])
def test_a_compile_that_fails_leaves_nothing(
    llama_folder: Path,
    root: Path,
    options: EngineOptions,
    compiler: Compiler,
    error: BaseException,
) -> None:
    def fail() -> None:
        raise error

    compiler.meanwhile = fail
    with pytest.raises((ConfigError, KeyboardInterrupt)):
        compiled(llama_folder, options)
    key = manifest_for(llama_folder, options).key
    assert names(root) == [f"{key}.lock"]
    assert (root / f"{key}.lock").read_bytes() == b"", "it does not look cut off"
    compiler.meanwhile = lambda: None
    assert compiled(llama_folder, options).is_new


def test_what_nxd_inference_cannot_compile_is_told(
    llama_folder: Path, root: Path, compiler: Compiler
) -> None:
    def compile_nothing(*_: Any) -> None:
        raise ValueError("unsupported hidden size\nsecond line")

    compiler._compile = compile_nothing
    with pytest.raises(ValueError, match="unsupported"):
        compiled(llama_folder, engine_options(root))
    compiler._compile = lambda _settings, _folder, out: (out / "model.pt").touch()
    with pytest.raises(ConfigError, match=r"NxD Inference wrote no neuron_config\.json, model\.pt"):
        compiled(llama_folder, engine_options(root))


def test_a_second_compile_at_the_same_time_is_refused_by_name(
    llama_folder: Path, root: Path, options: EngineOptions, compiler: Compiler
) -> None:
    said: list[str] = []

    def another() -> None:
        with pytest.raises(ConfigError) as refused:
            compiled(llama_folder, options)
        said.append(refused.value.message)

    compiler.meanwhile = another
    compiled(llama_folder, options)
    (words,) = said
    assert words.startswith(f"process {os.getpid()} on ")
    assert "is compiling this configuration right now: wait for it, or end it (" in words


def test_a_lock_whose_process_is_gone_is_stale(
    llama_folder: Path, root: Path, options: EngineOptions, compiler: Compiler
) -> None:
    manifest, told = manifest_for(llama_folder, options), list[str]()
    lock, left = root / f"{manifest.key}.lock", root / f"{manifest.key}.partial" / "out"
    left.mkdir(parents=True)
    (left / "junk").touch()
    lock.write_bytes(b"process 4711 on some-host")
    made = compile_artifact(manifest, llama_folder, root, told.append)
    assert made.is_new
    assert told == [
        "process 4711 on some-host began to compile this and was cut off: starting over"
    ]
    assert not (made.folder / "junk").exists()


def test_a_damaged_lock_is_no_obstacle(
    llama_folder: Path, root: Path, options: EngineOptions
) -> None:
    manifest, told = manifest_for(llama_folder, options), list[str]()
    root.mkdir()
    (root / f"{manifest.key}.lock").write_bytes(b"\xff\x00" * 300)
    assert compile_artifact(manifest, llama_folder, root, told.append).is_new
    assert told[0].startswith("another process began")


def test_who_waited_for_the_lock_finds_what_was_compiled(
    llama_folder: Path, root: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked before the other one was done, and got the lock after."""
    made = compiled(llama_folder, options)
    looks = iter([False])
    look = neuron_compile._is_there

    def late(*arguments: Any) -> bool:
        return next(looks, None) is not False and look(*arguments)

    monkeypatch.setattr(neuron_compile, "_is_there", late)
    assert compiled(llama_folder, options) == Compiled(made.folder, is_new=False)


def test_one_that_will_not_do_is_compiled_again(
    llama_folder: Path, root: Path, options: EngineOptions
) -> None:
    manifest, told = manifest_for(llama_folder, options), list[str]()
    config = compiled(llama_folder, options).folder / NEURON_CONFIG
    wanted = config.read_text()
    config.write_text(wanted.replace('"async_mode": false', '"async_mode": true'))
    assert compile_artifact(manifest, llama_folder, root, told.append).is_new
    assert "async_mode is true, and false is wanted" in told[0]
    assert config.read_text() == wanted
    assert names(root) == [manifest.key, f"{manifest.key}.lock"]


def test_one_that_lacks_a_part_is_compiled_again(
    llama_folder: Path, root: Path, options: EngineOptions
) -> None:
    manifest, told = manifest_for(llama_folder, options), list[str]()
    graphs = compiled(llama_folder, options).folder / "model.pt"
    graphs.unlink()
    assert compile_artifact(manifest, llama_folder, root, told.append).is_new
    assert "it lacks model.pt" in told[0]
    assert graphs.is_file()


def test_other_users_may_read_what_was_compiled(llama_folder: Path, options: EngineOptions) -> None:
    """As far as the umask lets them: safetensors gives its files to nobody else."""
    before = os.umask(0o027)
    try:
        folder = compiled(llama_folder, options).folder
    finally:
        os.umask(before)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


def test_a_compiled_model_is_no_folder_for_others(
    llama_folder: Path, options: EngineOptions
) -> None:
    folder = compiled(llama_folder, options).folder
    with pytest.raises(ConfigError, match="is a compiled model, and no folder of them"):
        compiled(llama_folder, engine_options(folder))


def test_a_folder_that_cannot_be_written_to_is_named(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"cannot write compiled models to {tmp_path / 'file'}"):
        compiled(llama_folder, engine_options(tmp_path / "file" / "below"))


def test_the_lock_is_the_kernels(
    llama_folder: Path, root: Path, options: EngineOptions, compiler: Compiler
) -> None:
    """So that it ends with its process."""
    key = manifest_for(llama_folder, options).key

    def look() -> None:
        with (root / f"{key}.lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    compiler.meanwhile = look
    compiled(llama_folder, options)
    with (root / f"{key}.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
