"""A checkpoint made ready to compute: memory counted first, then loaded."""

import os
import secrets
from dataclasses import dataclass

from neuron_di.backends import (
    Backend,
    BackendOptions,
    available_memory_bytes,
    open_backend,
    plan_memory,
)
from neuron_di.config import EngineOptions
from neuron_di.kv import KvLayout
from neuron_di.models import LoadProgress, ModelSpec, checkpoint_digest, resolve_checkpoint
from neuron_di.obs import get_logger
from neuron_di.request import Tokenizer
from neuron_di.types import Incarnation, Role

_log = get_logger(__name__)

# Of the memory that is there, what a pool takes when nobody says how large it should be.
_POOL_SHARE_DEFAULT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What a worker computes with. The worker owns the backend and closes it."""

    name: str
    digest: str
    incarnation: Incarnation
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    backend: Backend


def load_model(
    model: str,
    name: str | None,
    role: Role,
    options: EngineOptions,
    *,
    num_siblings: int = 1,
    on_progress: LoadProgress | None = None,
) -> LoadedModel:
    """Load a checkpoint for one worker. Blocks. Raises ConfigError or CheckpointError.

    `num_siblings` workers, this one included, share the memory that is free now.
    """
    available_bytes = available_memory_bytes() // num_siblings
    folder = resolve_checkpoint(model)
    spec = ModelSpec.from_folder(folder)
    tokenizer = Tokenizer.load(folder)
    dtype = "float32" if options.dtype == "auto" else options.dtype
    layout = spec.kv_layout(block_size=options.block_size, dtype=dtype)
    num_blocks = _num_blocks(spec, layout, role, options, available_bytes)
    plan = plan_memory(spec, layout, num_blocks=num_blocks, chunk_tokens=options.chunk_tokens)
    plan.require_fits(available_bytes)
    _log.info(
        "memory_planned",
        weights_bytes=plan.weights_bytes,
        pool_bytes=plan.pool_bytes,
        workspace_bytes=plan.workspace_bytes,
        num_blocks=num_blocks,
    )
    incarnation = Incarnation(secrets.token_hex(16))
    backend = open_backend(
        options.device,
        BackendOptions(
            folder=folder,
            spec=spec,
            layout=layout,
            num_blocks=num_blocks,
            incarnation=incarnation,
            num_threads=options.threads or os.cpu_count() or 1,
            on_progress=on_progress,
        ),
    )
    return LoadedModel(
        name=name or os.path.basename(os.path.normpath(model)),
        digest=checkpoint_digest(folder),
        incarnation=incarnation,
        context_tokens=min(
            options.context_tokens or spec.context_tokens,
            spec.context_tokens,
            num_blocks * layout.block_size,
        ),
        eos_token_ids=spec.eos_token_ids,
        tokenizer=tokenizer,
        backend=backend,
    )


def _num_blocks(
    spec: ModelSpec, layout: KvLayout, role: Role, options: EngineOptions, available_bytes: int
) -> int:
    """As told, else enough for a full batch of full contexts within a share of the memory."""
    if options.num_blocks is not None:
        return options.num_blocks
    if options.kv_memory is not None:
        return max(1, options.kv_memory // layout.block_bytes)
    batch = options.prefill_batch if role == "prefill" else options.decode_batch
    context = min(options.context_tokens or spec.context_tokens, spec.context_tokens)
    wanted = batch * layout.num_blocks_for(context)
    share_bytes = available_bytes // _POOL_SHARE_DEFAULT
    return max(1, min(wanted, share_bytes // layout.block_bytes))
