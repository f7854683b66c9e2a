"""Finding a checkpoint, telling whether two are the same, and loading its weights."""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from neuron_di.config import local_folder, require_no_pointer
from neuron_di.errors import CheckpointError
from neuron_di.models.shard import Part, Shard
from neuron_di.models.spec import ModelSpec, read_json_object
from neuron_di.models.weights import ModelWeights

# Bytes loaded so far, bytes in all: both as the weights will lie in memory.
LoadProgress = Callable[[int, int], None]

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_ADAPTER_NAME = "adapter_config.json"  # of peft
_FLOAT_DTYPES = ("F32", "BF16", "F16")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 4096  # of two tensors that are compared
# Endings of what GPTQ, AWQ, FP8, bitsandbytes and compressed-tensors store beside or for a weight.
_QUANTIZED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|absmax|nested_absmax|quant_map|weight_packed|weight_shape"
    r"|weight_zero_point|(weight|input|output|k|v)_(global_)?scale(_inv|_2)?)$|\.quant_state\."
)
_DIGEST_SAMPLES = 64  # per weights file
_DIGEST_SAMPLE_BYTES = 4096


def resolve_checkpoint(model: str) -> Path:
    """The local folder of a model given as a folder or as a Hugging Face hub id.

    A hub id is downloaded, or taken from the hub's cache. Raises CheckpointError, also for an
    adapter: its weights would be left out, and transformers applies them wherever peft is there.
    """
    folder = local_folder(model) or _downloaded(model)
    if (folder / _ADAPTER_NAME).exists():
        raise CheckpointError(
            f"{folder / _ADAPTER_NAME}: adapters (LoRA) are not supported: serve a folder with the "
            "merged model (peft's merge_and_unload), or remove this file where that is done"
        )
    return folder


def _downloaded(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # A chat template may lie in a .jinja file; some repositories hold the weights twice.
        patterns = ["*.json", "model*.safetensors", "*.jinja"]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{model} is neither a folder here nor a model that the hub can deliver now: {reason}"
        ) from error


def weight_files(folder: Path) -> list[str]:
    """Names of the checkpoint's safetensors files.

    Raises CheckpointError that names what is missing, config.json and tokenizer.json included, or
    where the weights are there twice: transformers leaves a single file when it saves shards.
    """
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing")
    index = folder / _INDEX_NAME
    is_single = (folder / _SINGLE_NAME).is_file()
    if is_single and not index.is_file():
        return [_SINGLE_NAME]
    if not index.is_file():
        raise CheckpointError(
            f"{folder} has neither {_SINGLE_NAME} nor {_INDEX_NAME}: other forms (.bin, .gguf) are "
            "not read; load them with transformers, and save_pretrained writes these"
        )
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    names: set[str] = set()
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is not a file name in this folder")
        names.add(name)
    missing = sorted(name for name in names if not (folder / name).is_file())
    if is_single and (missing or names == {_SINGLE_NAME}):  # an index of before
        return [_SINGLE_NAME]
    if is_single:  # readers differ in which ones count
        raise CheckpointError(
            f"{folder} has {_SINGLE_NAME}, and the files that {_INDEX_NAME} lists: remove the one "
            "or the others, whichever are older"
        )
    if missing:
        raise CheckpointError(f"{folder / missing[0]} is missing; {_INDEX_NAME} lists it")
    return sorted(names)


_DIGEST_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)


def checkpoint_digest(folder: Path) -> str:
    """Equal on two workers that serve the same checkpoint, without reading all of it.

    Covers what decides tokens and text, and of every weights file the name, the size, the header
    and evenly spread samples, so that two fine-tunes of one model differ.
    """
    digest = hashlib.sha256()
    for name in (*_DIGEST_FILES, *weight_files(folder)):
        path = folder / name
        if not path.exists():
            continue
        size = path.stat().st_size
        digest.update(f"{name}:{size};".encode())
        with path.open("rb") as file:
            if path.suffix != ".safetensors":
                digest.update(file.read())
                continue
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, size)))
            for sample in range(_DIGEST_SAMPLES):
                file.seek(size * sample // _DIGEST_SAMPLES)
                digest.update(file.read(_DIGEST_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def load_weights(
    folder: Path,
    spec: ModelSpec,
    *,
    dtype: str,
    on_progress: LoadProgress | None = None,
    shard: Shard | None = None,
    device: torch.device | str = "cpu",
) -> ModelWeights:
    """Read every tensor straight into its place on the device, converted to `dtype`.

    With a shard, whose `spec` this is, only its part is read.

    Raises CheckpointError that names the file and the tensor when one is missing, has another
    shape than config.json implies or values that `dtype` cannot hold, when a file is damaged, when
    a head is stored that is not the embedding that it is said to be, or a part of the decoder that
    nothing reads, or one twice.
    """
    if shard is None or shard.rank == 0:
        require_implied(folder, spec)
    weights = ModelWeights.allocate(spec, getattr(torch, dtype), device)
    targets = dict(weights.stored_tensors(spec))
    bytes_total = sum(target.nbytes for target in targets.values())
    bytes_done = 0
    for file_name in weight_files(folder):
        path = folder / file_name
        with _told_as_damage(path), safe_open(path, framework="pt") as stored:
            for name in sorted(targets.keys() & set(stored.keys())):
                target = targets.pop(name)
                part = None if shard is None else shard.part_of(name)
                view = stored.get_slice(name)
                expected = _stored_shape(target, part)
                _check_tensor(path, name, view.get_shape(), view.get_dtype(), expected)
                if part is None:
                    target.copy_(stored.get_tensor(name))
                elif part.dim == 0:
                    target.copy_(view[part.own.start : part.own.stop])
                else:
                    target.copy_(view[:, part.own.start : part.own.stop])
                _check_range(path, name, target, view.get_dtype())
                bytes_done += target.nbytes
                if on_progress is not None:
                    on_progress(bytes_done, bytes_total)
    if targets:
        names = sorted(targets)
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(
            f"{folder}: the weights lack tensor {names[0]} {list(targets[names[0]].shape)}{others}"
        )
    return weights


def require_implied(folder: Path, spec: ModelSpec) -> None:
    """Refuse weights of which config.json says something else, for whoever loads them by whatever
    means. CheckpointError where a part of the decoder is stored that nothing would read, or twice,
    or a head that is not the embedding that it is said to be."""
    weights = ModelWeights.allocate(spec, torch.float32, "meta")
    known = {name for name, _ in weights.stored_tensors(spec)}
    found: set[str] = set()
    for file_name in weight_files(folder):
        path = folder / file_name
        with _told_as_damage(path), safe_open(path, framework="pt") as stored:
            names = set(stored.keys())
        _require_known(path, names - known)
        if twice := names & known & found:  # readers differ in which one counts
            raise CheckpointError(
                f"{path}: tensor {min(twice)} is stored in another file, too: remove one of them"
            )
        found |= names
    if spec.has_tied_embeddings:
        _require_tied(folder)


@contextlib.contextmanager
def _told_as_damage(path: Path) -> Iterator[None]:
    try:
        require_no_pointer(path)
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cannot be read: {error}") from error


def _require_tied(folder: Path) -> None:
    """Refuse a head of its own where config.json says that there is none: who is right?"""
    found: dict[str, Any] = {}  # slices, which read what is asked for
    with contextlib.ExitStack() as stack:
        for file_name in weight_files(folder):
            path = folder / file_name
            with _told_as_damage(path):
                stored = stack.enter_context(safe_open(path, framework="pt"))
                names = {_HEAD, _EMBEDDING} & set(stored.keys())
                found |= {name: stored.get_slice(name) for name in names}
        if len(found) < 2:
            return
        head, embedding = found[_HEAD], found[_EMBEDDING]
        num_rows = head.get_shape()[0]
        is_equal = head.get_shape() == embedding.get_shape() and all(
            torch.equal(head[start : start + _ROWS], embedding[start : start + _ROWS])
            for start in range(0, num_rows, _ROWS)
        )
        if not is_equal:
            raise CheckpointError(
                f"{folder}: config.json says tie_word_embeddings, and {_HEAD} is stored and is not "
                f"{_EMBEDDING}: set it to false, or remove the tensor that is not meant"
            )


def _require_known(path: Path, others: set[str]) -> None:
    """Refuse a bias, a norm or a layer that would be left out: another text would be generated."""
    for name in sorted(others):
        # What is beside the decoder changes no token; old checkpoints hold RoPE's frequencies.
        is_meant = name.startswith(("model.", "lm_head.")) or ".lora_" in name
        if not is_meant or name == _HEAD or ".rotary_emb." in name:
            continue
        if _QUANTIZED.search(name):
            raise CheckpointError(
                f"{path}: tensor {name} is of a quantized model, which is not supported; use the "
                "float32, bfloat16 or float16 checkpoint"
            )
        raise CheckpointError(
            f"{path}: tensor {name} is stored, but config.json implies none: mend config.json "
            "(attention_bias, mlp_bias, num_hidden_layers, architectures), or remove the tensor"
        )


def _stored_shape(target: torch.Tensor, part: Part | None) -> list[int]:
    shape = list(target.shape)
    if part is not None:
        assert shape[part.dim] == len(part.own), "a shard's parts and its spec are of one size"
        shape[part.dim] = part.whole
    return shape


def _check_tensor(path: Path, name: str, shape: list[int], dtype: str, expected: list[int]) -> None:
    if shape != expected:
        raise CheckpointError(
            f"{path}: tensor {name} has shape {shape}; config.json implies {expected}"
        )
    if dtype not in _FLOAT_DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name} is stored as {dtype}; supported: {', '.join(_FLOAT_DTYPES)}"
        )


def _check_range(path: Path, name: str, loaded: torch.Tensor, stored_dtype: str) -> None:
    """Of what bfloat16 holds, float16 makes infinities from 65,520 on: tokens would be nonsense."""
    if loaded.dtype is torch.float16 and stored_dtype != "F16" and loaded.isinf().any():
        raise CheckpointError(
            f"{path}: tensor {name} has values beyond float16's range; use --dtype bfloat16"
        )
