"""Compiling a model for NeuronCores into the folder of artifacts, once for each configuration.

    ARTIFACTS/KEY.lock       held while somebody compiles KEY; says who
    ARTIFACTS/KEY.partial    what is being compiled; renamed to KEY when all of it is there

The lock is the kernel's (flock), so that it ends with its process, however that ends. A file that
names somebody, and is not held, is what a compile left behind that was cut off.

So far this has run with a stand-in for NxD Inference only.
"""

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from neuron_di.backends.neuron_artifact import (
    MANIFEST,
    Manifest,
    find_artifact,
    is_artifact,
    missing_files,
)
from neuron_di.backends.neuron_nxdi import compile_model, neuron_config_of
from neuron_di.errors import ConfigError
from neuron_di.models import ModelSpec, require_implied

# Where the compiler works; its default is one folder for all compiles of a host.
_WORK_VARIABLE = "BASE_COMPILE_WORK_DIR"
_LOCK_BYTES_MAX = 512

Tell = Callable[[str], None]  # a line for whoever waits


@dataclass(frozen=True, slots=True)
class Compiled:
    """Where the artifact is. `is_new`: it was compiled now; else it had been before."""

    folder: Path
    is_new: bool


def compile_artifact(manifest: Manifest, model_folder: Path, root: Path, tell: Tell) -> Compiled:
    """Make sure that the artifact is in `root`. Blocks, for minutes where it must be compiled.

    CheckpointError where the weights are not what config.json says; ConfigError where it cannot
    be, or somebody else is at it. Nothing half-made is left then.
    """
    if is_artifact(root):
        raise ConfigError(
            f"{root} is a compiled model, and no folder of them: --neuron-artifacts names where "
            "compiled models go",
            param="neuron_artifacts",
        )
    folder = root / manifest.key
    try:
        root.mkdir(parents=True, exist_ok=True)
        if _is_there(root, manifest, lambda _: None):
            return Compiled(folder, is_new=False)
        with _locked(root / f"{manifest.key}.lock", tell):
            if _is_there(root, manifest, tell):  # from whoever had the lock before
                return Compiled(folder, is_new=False)
            _compile_into(folder, manifest, model_folder)
    except OSError as error:
        raise ConfigError(f"cannot write compiled models to {root}: {error}") from None
    return Compiled(folder, is_new=True)


def num_bytes_in(root: Path, key: str) -> int:
    """How much there is so far of what is being compiled."""
    total = 0
    for folder, _, names in os.walk(root / f"{key}.partial"):  # which overlooks what is gone again
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _is_there(root: Path, manifest: Manifest, tell: Tell) -> bool:
    """False where there is none, and where it will not do, which is told."""
    if not (root / manifest.key).is_dir():
        return False
    try:
        find_artifact(root, manifest, neuron_config_of(manifest.settings), "it is compiled again")
    except ConfigError as error:
        tell(error.message)
        return False
    return True


def _compile_into(folder: Path, manifest: Manifest, model_folder: Path) -> None:
    partial = folder.with_name(f"{manifest.key}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a compile that was cut off
    require_implied(model_folder, ModelSpec.from_folder(model_folder))
    work = partial / "work"
    work.mkdir(parents=True)
    out = partial / "out"
    out.mkdir()
    before = os.environ.get(_WORK_VARIABLE)
    os.environ[_WORK_VARIABLE] = f"{work}/"
    try:
        compile_model(manifest.settings, model_folder, out)
        if missing := missing_files(out, manifest.settings.tp):
            raise ConfigError(f"NxD Inference wrote no {', '.join(missing)}")
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        (out / MANIFEST).write_bytes(text + b"\n")
        _open_to_readers(out)
        if folder.is_dir():  # one that will not do
            folder.rename(partial / "before")
        out.rename(folder)
    finally:
        if before is None:
            del os.environ[_WORK_VARIABLE]
        else:
            os.environ[_WORK_VARIABLE] = before
        shutil.rmtree(partial, ignore_errors=True)


def _open_to_readers(folder: Path) -> None:
    """Safetensors writes files for this user alone; servers run as another one, as a rule."""
    like_ours = (folder / MANIFEST).stat().st_mode & 0o666  # as this user's umask has it
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode | like_ours)


@contextlib.contextmanager
def _locked(path: Path, tell: Tell) -> Iterator[None]:
    """Hold a lock file. ConfigError while another process holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with open(fd, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _said_in(file.read(_LOCK_BYTES_MAX))
            raise ConfigError(
                f"{who} is compiling this configuration right now: wait for it, or end it ({path})"
            ) from None
        if left := file.read(_LOCK_BYTES_MAX):
            tell(f"{_said_in(left)} began to compile this and was cut off: starting over")
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield
        finally:
            file.truncate(0)  # the file stays: somebody may be waiting to lock it


def _said_in(content: bytes) -> str:
    """Who wrote a lock, in words; it may be damaged."""
    text = content.decode(errors="replace").strip()
    return text if text.isprintable() and text else "another process"
