"""How a model would run on NeuronCores: slots, settings of its compiled form, and which cores.

A block of the KV pool is a slot: a request's whole context. There are as many as rows in the
compiled decode step, for a prefill worker as for a decode worker, so that one compiled model does
for both, and for a change of role.
"""

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from neuron_di.backends.neuron_artifact import (
    Manifest,
    Settings,
    artifacts_root,
    find_artifact,
    is_artifact,
    make_manifest,
)
from neuron_di.backends.neuron_nxdi import neuron_config_of
from neuron_di.backends.neuron_packages import require_packages
from neuron_di.backends.neuron_preflight import check_devices
from neuron_di.backends.open_backend import DevicePlan
from neuron_di.config import EngineOptions
from neuron_di.errors import ConfigError
from neuron_di.kv import KvMap
from neuron_di.models import ModelSpec, checkpoint_digest
from neuron_di.neuron_cores import LOGICAL_CORES, check_degree

_BUCKET_MIN = 128  # prompts are padded to this, and then to its doubles


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronPlan(DevicePlan):
    """What the backend opens."""

    artifact: Path
    manifest: Manifest
    cores: range  # the host's numbers
    library_path: str | None


def plan_device(options: EngineOptions, spec: ModelSpec, folder: Path) -> NeuronPlan:
    """What cannot work is found out here, before anything is loaded: ConfigError says what."""
    manifest = manifest_of(options, spec, folder)
    settings = manifest.settings
    for name in ("num_blocks", "kv_memory"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is not for --device neuron: the compiled model has "
                f"{settings.slots} slots, by --decode-batch",
                param=name,
            )
    neuron = options.neuron
    root = artifacts_root(neuron.neuron_artifacts, os.environ)
    artifact = find_artifact(
        root, manifest, neuron_config_of(settings), f"compile it: {_mend(options, folder, root)}"
    )
    cores = check_devices(options.tp, neuron.libnrt, os.environ)
    return NeuronPlan(
        dtype=settings.dtype,
        block_size=settings.context_tokens,
        num_ranks=1,  # of the mirror: it has each head once
        chunk_tokens=settings.context_tokens,  # a prompt is one call
        workspace_tokens=0,
        num_slots=settings.slots,
        artifact=artifact,
        manifest=manifest,
        cores=cores,
        library_path=neuron.libnrt,
    )


def manifest_of(options: EngineOptions, spec: ModelSpec, folder: Path) -> Manifest:
    """What a model must be compiled for, to serve with these options.

    ConfigError where its runner, or this model, cannot work there.
    """
    packages = require_packages(options.neuron)
    check_degree(options.tp)
    context_tokens = spec.context_of(options.context_tokens)
    if spec.sliding_window is not None and spec.sliding_window < context_tokens:
        raise ConfigError(
            f"the model's attention sees {spec.sliding_window} positions, and on NeuronCores KV of "
            "such a window is kept in a ring, which is not supported: give --context-tokens "
            f"{spec.sliding_window} or less"
        )
    KvMap.of_tensor_parallel(options.tp, spec.num_kv_heads, spec.num_heads)
    decode_buckets = options.neuron.decode_buckets
    if decode_buckets and decode_buckets[-1] > context_tokens:
        raise ConfigError(
            f"--neuron-decode-buckets goes up to {decode_buckets[-1]}, and the context has "
            f"{context_tokens} tokens",
            param="neuron_decode_buckets",
        )
    logical_cores = os.environ.get(LOGICAL_CORES) or "0"
    if not logical_cores.isdecimal():
        raise ConfigError(f"{LOGICAL_CORES}={logical_cores} is no number of cores")
    settings = Settings(
        runner=options.neuron.neuron_runner,
        model_digest=checkpoint_digest(folder),
        family=spec.family,
        tp=options.tp,
        context_tokens=context_tokens,
        slots=options.decode_batch,
        dtype="bfloat16" if options.dtype == "auto" else options.dtype,
        k_transposed=options.neuron.neuron_k_transposed,
        prefill_buckets=_doubles_to(context_tokens),
        decode_buckets=tuple(sorted({*decode_buckets, context_tokens})),
        logical_cores=int(logical_cores),
    )
    return make_manifest(settings, packages)


def compile_command(options: EngineOptions, folder: Path) -> str:
    """What to type for an artifact that these options can use."""
    neuron = options.neuron
    words = ["neuron-di", "compile", str(folder), "--tp", str(options.tp)]
    words += ["--decode-batch", str(options.decode_batch)]
    if options.context_tokens is not None:
        words += ["--context-tokens", str(options.context_tokens)]
    if options.dtype != "auto":
        words += ["--dtype", options.dtype]
    if neuron.neuron_k_transposed:
        words.append("--neuron-k-transposed")
    if neuron.neuron_decode_buckets:
        words += ["--neuron-decode-buckets", ",".join(neuron.neuron_decode_buckets)]
    if neuron.neuron_artifacts is not None:
        words += ["--neuron-artifacts", neuron.neuron_artifacts]
    return shlex.join(words)


def _mend(options: EngineOptions, folder: Path, root: Path) -> str:
    if not is_artifact(root):
        return compile_command(options, folder)
    # Nothing is compiled into a compiled model: beside it.
    neuron = replace(options.neuron, neuron_artifacts=str(root.parent))
    command = compile_command(replace(options, neuron=neuron), folder)
    return f"{command}, and name with --neuron-artifacts the folder that it prints"


def _doubles_to(context_tokens: int) -> tuple[int, ...]:
    buckets, bucket = [], _BUCKET_MIN
    while bucket < context_tokens:
        buckets.append(bucket)
        bucket *= 2
    return (*buckets, context_tokens)
