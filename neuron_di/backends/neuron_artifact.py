"""A model compiled for NeuronCores: what it was compiled for, and whether that is what is wanted.

    ARTIFACTS/KEY/neuron_di.json       our manifest: settings, versions of packages, the key
    ARTIFACTS/KEY/neuron_config.json   NxD Inference's own account of its configuration
    ARTIFACTS/KEY/model.pt, weights/   its graphs, and the weights as each rank has them

KEY is the hash of settings and versions, so that another shape never replaces this one. What is
loaded is held against the manifest and against NxD Inference's own file: somebody may have
compiled into the folder by other means.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from neuron_di.errors import ConfigError

MANIFEST = "neuron_di.json"
NEURON_CONFIG = "neuron_config.json"
_GRAPHS = "model.pt"
_FILE_BYTES_MAX = 4 << 20
_VERSION = 1

# What is wrong with an artifact where a value of these is another, beyond that it is another.
_WHY = {
    "apply_seq_ids_mask": "a decode step would write into slots that it does not decode, where KV "
    "may just be coming in or going out",
    "async_mode": "a step would run beyond the one whose tokens are known, and write into a slot "
    "after its request has ended",
    "sliding_window": "with one, apply_seq_ids_mask has no effect",
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a model is compiled for. Lengths are token positions."""

    runner: str
    model_digest: str
    family: str
    tp: int
    context_tokens: int  # of a slot
    slots: int  # sequences that have KV at once, and the rows of a decode step
    dtype: str
    k_transposed: bool
    prefill_buckets: tuple[int, ...]
    decode_buckets: tuple[int, ...]
    logical_cores: int  # physical cores of a logical one; 0: as the platform has it


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What `neuron-di compile` writes beside what it compiled."""

    version: int
    key: str
    settings: Settings
    packages: dict[str, str]


def make_manifest(settings: Settings, packages: Mapping[str, str]) -> Manifest:
    """With the key: equal settings and versions have equal keys, on every machine."""
    ordered = dict(sorted(packages.items()))
    text = msgspec.json.encode([_VERSION, settings, ordered])
    key = hashlib.sha256(text).hexdigest()[:32]
    return Manifest(version=_VERSION, key=key, settings=settings, packages=ordered)


def artifacts_root(folder: str | None, environ: Mapping[str, str]) -> Path:
    """Where compiled models are: as told, else in the user's cache."""
    if folder is not None:
        return Path(folder).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "neuron-di" / "artifacts"


def find_artifact(
    root: Path, wanted: Manifest, neuron_config: Mapping[str, Any], mend: str
) -> Path:
    """The folder of the artifact that is wanted: one of those in `root`, or `root` itself.

    `neuron_config` is what NxD Inference must say of it. ConfigError, which says what is there
    instead and gives `mend`.
    """
    try:
        return _find(root, wanted, neuron_config, mend)
    except PermissionError as error:
        raise ConfigError(
            f"this user may not read the compiled model in {root}: {error.filename}: "
            f"{error.strerror}. Mend: chmod -R a+rX {root}, or serve as the user who compiled it"
        ) from None


def _find(root: Path, wanted: Manifest, neuron_config: Mapping[str, Any], mend: str) -> Path:
    folder = root if is_artifact(root) else root / wanted.key
    if not folder.is_dir():
        raise ConfigError(_nearest(root, wanted, mend))
    try:
        differences = _differences(folder, wanted, neuron_config)
    except ConfigError as error:
        raise ConfigError(f"{error.message}. Mend: {mend}") from None
    if not differences and (missing := missing_files(folder, wanted.settings.tp)):
        differences = [f"it lacks {', '.join(missing)}"]
    if differences:
        raise ConfigError(
            f"the compiled model in {folder} will not do: {'; '.join(differences)}. Mend: {mend}"
        )
    return folder


def is_artifact(folder: Path) -> bool:
    """Whether this is one compiled model, and no folder of several."""
    return any(os.path.exists(folder / name) for name in (NEURON_CONFIG, MANIFEST))


def missing_files(folder: Path, num_ranks: int) -> list[str]:
    """Which of NxD Inference's files are not there, or have nothing in them."""
    shards = [f"weights/tp{rank}_sharded_checkpoint.safetensors" for rank in range(num_ranks)]
    return [name for name in (NEURON_CONFIG, _GRAPHS, *shards) if not _has_bytes(folder / name)]


def read_manifest(folder: Path) -> Manifest:
    """ConfigError where there is none, or none of ours."""
    path = folder / MANIFEST
    try:
        return msgspec.json.decode(_read(path), type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no manifest of a compiled model: {error}") from None


def _differences(folder: Path, wanted: Manifest, neuron_config: Mapping[str, Any]) -> list[str]:
    """In words, what is not as it must be. ConfigError where that cannot be told."""
    if not (folder / MANIFEST).exists():
        return [f"it has no {MANIFEST}, so nobody knows of which model its weights are"]
    found = read_manifest(folder)
    differences = _manifest_differences(found, wanted)
    path = folder / NEURON_CONFIG
    try:
        config = msgspec.json.decode(_read(path), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    inner = config.get("neuron_config")
    if not isinstance(inner, dict):
        raise ConfigError(f"{path} has no neuron_config: it is not NxD Inference's")
    differences += [
        _difference(name, inner.get(name), value)
        for name, value in neuron_config.items()
        if inner.get(name) != value
    ]
    if (window := config.get("sliding_window")) is not None:
        differences.append(_difference("sliding_window", window, None))
    return differences


def _manifest_differences(found: Manifest, wanted: Manifest) -> list[str]:
    settings, names = found.settings, Settings.__struct_fields__
    differences = [
        _difference(name, getattr(settings, name), getattr(wanted.settings, name))
        for name in names
        if getattr(settings, name) != getattr(wanted.settings, name)
    ]
    differences += [
        f"it was compiled with {name} {found.packages.get(name, 'absent')}, and here is {version}"
        for name, version in wanted.packages.items()
        if found.packages.get(name) != version
    ]
    return differences


def _difference(name: str, found: object, wanted: object) -> str:
    words = f"{name} is {_text(found)}, and {_text(wanted)} is wanted"
    return f"{words} ({_WHY[name]})" if name in _WHY else words


def _text(value: object) -> str:
    """As JSON has it."""
    return "absent" if value is None else msgspec.json.encode(value).decode()


def _nearest(root: Path, wanted: Manifest, mend: str) -> str:
    """What there is of this model instead, and the mend."""
    best: list[str] | None = None
    for path in sorted(root.glob(f"*/{MANIFEST}")):
        try:
            found = read_manifest(path.parent)
        except ConfigError:
            continue  # it is not wanted anyway
        if found.settings.model_digest == wanted.settings.model_digest:
            differences = _manifest_differences(found, wanted)
            if not differences:
                return (
                    f"{root} has this model compiled, in a folder of another name: "
                    f"{path.parent.name}. Mend: call it {wanted.key}, or {mend}"
                )
            if best is None or len(differences) < len(best):
                best = differences
    if best is None:
        return f"{root} has no compiled model of this checkpoint. Mend: {mend}"
    return f"{root} has this model compiled for something else: {'; '.join(best)}. Mend: {mend}"


def _has_bytes(path: Path) -> bool:
    """PermissionError where this user may not read it: NxD Inference would miss it, too."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return bool(file.read(1))
    except PermissionError:
        raise
    except OSError:
        return False


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"{path} has more than {_FILE_BYTES_MAX} bytes: it is not what it says")
    return content
