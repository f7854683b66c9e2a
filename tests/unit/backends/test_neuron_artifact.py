"""Which compiled model is the one that is wanted, and what is said of every other."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from other_user import as_another_user

from neuron_di.backends.neuron_artifact import (
    MANIFEST,
    NEURON_CONFIG,
    Manifest,
    Settings,
    artifacts_root,
    find_artifact,
    make_manifest,
    read_manifest,
)
from neuron_di.errors import ConfigError

SETTINGS = Settings(
    runner="nxdi",
    model_digest="d" * 32,
    family="llama",
    tp=2,
    context_tokens=256,
    slots=4,
    dtype="bfloat16",
    k_transposed=False,
    prefill_buckets=(128, 256),
    decode_buckets=(256,),
    logical_cores=0,
)
PACKAGES = {"neuronx-cc": "2.15", "torch": "2.11"}
MANIFEST_WANTED = make_manifest(SETTINGS, PACKAGES)
CONFIG = {"tp_degree": 2, "apply_seq_ids_mask": True, "async_mode": False}
PARTS = ["model.pt", *(f"weights/tp{rank}_sharded_checkpoint.safetensors" for rank in range(2))]
MEND = "compile it: neuron-di compile …"


def write(folder: Path, manifest: Manifest | None, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    if manifest is not None:
        (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    document = {"vocab_size": 7, "neuron_config": {"unknown": 1} | (config or CONFIG)}
    (folder / NEURON_CONFIG).write_text(json.dumps(document))
    (folder / "weights").mkdir()
    for name in PARTS:
        (folder / name).write_bytes(b"part")
    return folder


def find(root: Path) -> Path:
    return find_artifact(root, MANIFEST_WANTED, CONFIG, MEND)


def refusal(root: Path, end: str = f". Mend: {MEND}") -> str:
    with pytest.raises(ConfigError) as refused:
        find(root)
    assert refused.value.message.endswith(end)
    return refused.value.message


def other(**fields: Any) -> Manifest:
    return make_manifest(msgspec.structs.replace(SETTINGS, **fields), PACKAGES)


def test_it_lies_under_its_key_or_is_named_itself(tmp_path: Path) -> None:
    folder = write(tmp_path / MANIFEST_WANTED.key, MANIFEST_WANTED)
    assert find(tmp_path) == folder
    assert find(folder) == folder
    assert read_manifest(folder) == MANIFEST_WANTED


def test_the_key_is_the_same_wherever_it_is_made() -> None:
    """It names folders that several machines share."""
    assert MANIFEST_WANTED.key == "4480b90b64f24c524e71d1ad29dff21a"
    assert make_manifest(SETTINGS, dict(reversed(PACKAGES.items()))) == MANIFEST_WANTED


@pytest.mark.parametrize("name", Settings.__struct_fields__)
def test_every_setting_is_in_the_key(name: str) -> None:
    value = getattr(SETTINGS, name)
    changed: Any = (1, 2, 3) if isinstance(value, tuple) else f"{value}x"
    if isinstance(value, int):
        changed = value + 1
    assert other(**{name: changed}).key != MANIFEST_WANTED.key
    newer = make_manifest(SETTINGS, PACKAGES | {"torch": "2.12"})
    assert newer.key != MANIFEST_WANTED.key


def test_where_there_is_nothing(tmp_path: Path) -> None:
    words = refusal(tmp_path / "absent")
    assert words.startswith(f"{tmp_path / 'absent'} has no compiled model of this checkpoint. ")


def test_the_nearest_of_this_model_is_told(tmp_path: Path) -> None:
    for manifest in (
        other(tp=8, slots=16, dtype="float32"),
        other(tp=4, slots=8),
        other(model_digest="e" * 32),  # nearer, but of another checkpoint
    ):
        write(tmp_path / manifest.key, manifest)
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / MANIFEST).write_text("{")
    words = refusal(tmp_path)
    assert "compiled for something else: tp is 4, and 2 is wanted; slots is 8, and 4" in words
    assert "model_digest" not in words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 4}, "tp is 4, and 2 is wanted"),
        ({"context_tokens": 512}, "context_tokens is 512, and 256 is wanted"),
        ({"slots": 8}, "slots is 8, and 4 is wanted"),
        ({"dtype": "float32"}, 'dtype is "float32", and "bfloat16" is wanted'),
        ({"k_transposed": True}, "k_transposed is true, and false is wanted"),
        ({"model_digest": "e" * 32}, f'model_digest is "{"e" * 32}", and'),
        ({"decode_buckets": (64, 256)}, "decode_buckets is [64,256], and [256] is wanted"),
    ],
)
def test_another_layout_is_told_field_by_field(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    folder = write(tmp_path / "compiled", other(**fields))
    said = refusal(folder)
    assert said.startswith(f"the compiled model in {folder} will not do: {words}")


def test_another_compiler_is_told(tmp_path: Path) -> None:
    older = make_manifest(SETTINGS, {"torch": "2.11", "neuronx-cc": "2.14"})
    assert "compiled with neuronx-cc 2.14, and here is 2.15" in refusal(
        write(tmp_path / "a", older)
    )
    without = make_manifest(SETTINGS, {"torch": "2.11"})
    assert "compiled with neuronx-cc absent" in refusal(write(tmp_path / "b", without))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"apply_seq_ids_mask": False},
            "apply_seq_ids_mask is false, and true is wanted (a decode",
        ),
        (
            {"apply_seq_ids_mask": None},
            "apply_seq_ids_mask is absent, and true is wanted (a decode",
        ),
        ({"async_mode": True}, "async_mode is true, and false is wanted (a step would run beyond"),
        ({"tp_degree": 64}, "tp_degree is 64, and 2 is wanted"),
    ],
)
def test_what_nxd_inference_says_counts_whatever_the_manifest_says(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    document = {name: value for name, value in (CONFIG | config).items() if value is not None}
    folder = write(tmp_path / MANIFEST_WANTED.key, MANIFEST_WANTED, document)
    said = refusal(tmp_path)
    assert said.startswith(f"the compiled model in {folder} will not do: {words}")


def test_a_window_would_undo_the_mask(tmp_path: Path) -> None:
    path = write(tmp_path / MANIFEST_WANTED.key, MANIFEST_WANTED) / NEURON_CONFIG
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"sliding_window": None}))
    find(tmp_path)
    path.write_text(json.dumps(document | {"sliding_window": 4096}))
    assert "sliding_window is 4096, and absent is wanted (with one, apply_seq" in refusal(tmp_path)


def test_what_others_compiled_is_of_nobody_knows_which_model(tmp_path: Path) -> None:
    said = refusal(write(tmp_path / "by_hand", None))
    assert f"it has no {MANIFEST}, so nobody knows of which model its weights are" in said


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (MANIFEST, b"{"),
        (MANIFEST, b"[]"),
        (MANIFEST, b'{"version":1,"key":"x","settings":{},"packages":{}}'),
        (MANIFEST, b"\xff"),
        (MANIFEST, b"[" * 100_000),
        (NEURON_CONFIG, b"{"),
        (NEURON_CONFIG, b'{"neuron_config": 3}'),
        (NEURON_CONFIG, b" " * (4 << 20) + b"{}"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write(tmp_path / "compiled", MANIFEST_WANTED)
    (folder / name).write_bytes(content)
    assert str(folder / name) in refusal(folder)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "compiled", MANIFEST_WANTED)
    (folder / NEURON_CONFIG).unlink()
    assert f"cannot read {folder / NEURON_CONFIG}: No such file" in refusal(folder)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("is_empty", [False, True])
def test_graphs_and_the_weights_of_each_rank_must_be_there(
    tmp_path: Path, name: str, is_empty: bool
) -> None:
    folder = write(tmp_path / MANIFEST_WANTED.key, MANIFEST_WANTED)
    (folder / name).unlink()
    if is_empty:
        (folder / name).touch()
    said = refusal(tmp_path)
    assert said.startswith(f"the compiled model in {folder} will not do: it lacks {name}. ")


@pytest.mark.parametrize("name", [".", MANIFEST_WANTED.key, *PARTS])
def test_what_this_user_may_not_read_is_told_from_what_is_not_there(
    tmp_path: Path, name: str
) -> None:
    """NxD Inference would say that there is no such file."""
    root = tmp_path / "artifacts"
    folder = write(root / MANIFEST_WANTED.key, MANIFEST_WANTED)
    closed = (folder if name in PARTS else root) / name
    closed.chmod(0o600)
    with as_another_user(tmp_path):
        said = refusal(root, "or serve as the user who compiled it")
    closed.chmod(0o700)
    assert said.startswith(f"this user may not read the compiled model in {root}: {closed}")
    assert ": Permission denied. Mend: chmod -R a+rX " in said


def test_the_same_under_another_name_is_told_so(tmp_path: Path) -> None:
    write(tmp_path / "renamed", MANIFEST_WANTED)
    assert refusal(tmp_path, f", or {MEND}") == (
        f"{tmp_path} has this model compiled, in a folder of another name: renamed. "
        f"Mend: call it {MANIFEST_WANTED.key}, or {MEND}"
    )


def test_the_cache_is_the_users() -> None:
    environ = {"XDG_CACHE_HOME": "/cache"}
    assert artifacts_root(None, environ) == Path("/cache/neuron-di/artifacts")
    assert artifacts_root(None, {}) == Path.home() / ".cache/neuron-di/artifacts"
    assert artifacts_root("~/compiled", environ) == Path.home() / "compiled"
