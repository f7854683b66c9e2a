"""A checkpoint made ready to compute: memory counted first, then loaded."""

import gc
import os
import secrets
from dataclasses import dataclass, replace

from neuron_di.backends import (
    Backend,
    BackendOptions,
    available_memory_bytes,
    open_backend,
    plan_memory,
)
from neuron_di.config import EngineOptions
from neuron_di.kv import KvLayout, KvPool, PoolMaker, segment_bytes
from neuron_di.models import (
    LoadProgress,
    ModelSpec,
    checkpoint_digest,
    require_divisible,
    resolve_checkpoint,
)
from neuron_di.obs import get_logger
from neuron_di.request import Tokenizer
from neuron_di.types import Incarnation, Role

_log = get_logger(__name__)

# Of the memory that is there, what a pool takes when nobody says how large it should be.
_POOL_SHARE_DEFAULT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """How large a worker's KV pool is. Of all that was loaded, only this depends on the role."""

    spec: ModelSpec
    layout: KvLayout
    options: EngineOptions
    available_bytes: int  # before anything was loaded

    def num_blocks(self, role: Role) -> int:
        """As told, else enough for a full batch of full contexts within a share of the memory."""
        options = self.options
        if options.num_blocks is not None:
            return options.num_blocks
        if options.kv_memory is not None:
            return max(1, options.kv_memory // self.layout.block_bytes)
        batch = options.prefill_batch if role == "prefill" else options.decode_batch
        wanted = batch * self.layout.num_blocks_for(self._context_tokens())
        share_bytes = self.available_bytes // _POOL_SHARE_DEFAULT
        return max(1, min(wanted, share_bytes // self.layout.block_bytes))

    def context_tokens(self, num_blocks: int) -> int:
        """The longest prompt and answer together. None is longer than the pool."""
        return min(self._context_tokens(), num_blocks * self.layout.block_size)

    def _context_tokens(self) -> int:
        own = self.spec.context_tokens
        return min(self.options.context_tokens or own, own)


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
    pool_plan: PoolPlan | None = None  # where another worker may take the weights over


def load_model(
    model: str,
    name: str | None,
    role: Role,
    options: EngineOptions,
    *,
    num_siblings: int = 1,
    on_progress: LoadProgress | None = None,
    arena: PoolMaker | None = None,
) -> LoadedModel:
    """Load a checkpoint for one worker. Blocks. Raises ConfigError or CheckpointError.

    `num_siblings` workers, this one included, share the memory that is free now. The pool lies in
    `arena`, if there is one, where an earlier worker of this name may have left its blocks.
    """
    available_bytes = available_memory_bytes() // num_siblings
    folder = resolve_checkpoint(model)
    spec = ModelSpec.from_folder(folder)
    tokenizer = Tokenizer.load(folder)
    dtype = "float32" if options.dtype == "auto" else options.dtype
    require_divisible(spec, options.tp)
    layout = spec.kv_layout(block_size=options.block_size, dtype=dtype, num_ranks=options.tp)
    if arena is not None:
        available_bytes += arena.held_bytes(layout)
    pool_plan = PoolPlan(spec=spec, layout=layout, options=options, available_bytes=available_bytes)
    num_blocks = pool_plan.num_blocks(role)
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
            make_pool=arena or KvPool.create,
            on_progress=on_progress,
        ),
    )
    return LoadedModel(
        name=name or os.path.basename(os.path.normpath(model)),
        digest=checkpoint_digest(folder),
        incarnation=incarnation,
        context_tokens=pool_plan.context_tokens(num_blocks),
        eos_token_ids=spec.eos_token_ids,
        tokenizer=tokenizer,
        backend=backend,
        pool_plan=pool_plan,
    )


def missing_memory(model: LoadedModel, role: Role) -> str:
    """Why the machine's memory does not suffice for the pool of this role; empty when it does."""
    plan, pool = model.pool_plan, model.backend.pool
    assert plan is not None, "the model was loaded from a checkpoint"
    wanted_bytes = segment_bytes(plan.layout, plan.num_blocks(role))
    free_bytes = available_memory_bytes() + segment_bytes(pool.layout, pool.num_blocks)
    if wanted_bytes <= free_bytes:
        return ""
    return (
        f"the KV pool of a {role} worker takes {wanted_bytes} bytes, and {free_bytes} would be "
        "free once this worker has given its own back"
    )


def renewed(model: LoadedModel, role: Role) -> LoadedModel:
    """The same weights for a worker of this role and a fresh incarnation. Blocks.

    The pool of before is gone, even where this raises ConfigError; then it may be called again.
    """
    plan = model.pool_plan
    assert plan is not None, "the model was loaded from a checkpoint"
    num_blocks, incarnation = plan.num_blocks(role), Incarnation(secrets.token_hex(16))
    model.backend.close_pool()
    gc.collect()  # what the former worker's parts knew of the old pool keeps its memory
    model.backend.open_pool(num_blocks, incarnation)
    _log.info("pool_renewed", role=role, num_blocks=num_blocks)
    return replace(model, incarnation=incarnation, context_tokens=plan.context_tokens(num_blocks))
