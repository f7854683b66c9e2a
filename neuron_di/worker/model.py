"""A checkpoint made ready to compute: memory counted first, then loaded."""

import gc
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

from neuron_di.backends import (
    Backend,
    BackendOptions,
    DevicePlan,
    open_backend,
    plan_device,
)
from neuron_di.config import EngineOptions, model_name_of, usable_cores
from neuron_di.core import BlockPool, PrefixCache
from neuron_di.errors import ConfigError
from neuron_di.kv import KvLayout, KvPool, PoolMaker, segment_bytes
from neuron_di.models import (
    LoadProgress,
    ModelSpec,
    checkpoint_digest,
    read_sampling_defaults,
    resolve_checkpoint,
)
from neuron_di.obs import get_logger
from neuron_di.request import Tokenizer
from neuron_di.types import Incarnation, Role
from neuron_di.wire import SIGNAL_BYTES_MAX, SamplingDefaults, ready_bytes_max

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """How large a worker's KV pool is. Of all that was loaded, only this depends on the role."""

    spec: ModelSpec
    layout: KvLayout
    options: EngineOptions
    device: DevicePlan
    available_bytes: int  # before anything was loaded

    def num_blocks(self, role: Role) -> int:
        """As told, else enough for a full batch of full contexts within a share of the memory.

        Where the device has slots, all of them, in any role.
        """
        options = self.options
        if self.device.num_slots is not None:
            return self.device.num_slots
        if options.num_blocks is not None:
            return options.num_blocks
        if options.kv_memory is not None:
            return max(1, options.kv_memory // self.layout.block_bytes)
        batch = options.prefill_batch if role == "prefill" else options.decode_batch
        wanted = batch * self.layout.num_blocks_for(self._context_tokens())
        share_bytes = self.device.pool_bytes(self.spec, self.available_bytes)
        return max(1, min(wanted, share_bytes // self.layout.block_bytes))

    def context_tokens(self, num_blocks: int) -> int:
        """The longest prompt and answer together. None is longer than the pool, which is said."""
        wanted, held = self._context_tokens(), num_blocks * self.layout.block_size
        if held < wanted:
            reason = f"the KV pool has {num_blocks} blocks"
            _log.warning("context_cut", wanted=wanted, context_tokens=held, reason=reason)
        return min(wanted, held)

    def require_ready_fits(self, role: Role) -> None:
        """ConfigError where the longest request could not be handed over: its Ready is too large.

        Such a message would cost the link, and with it every other request on it.
        """
        if role == "both":
            return
        size = self.layout.block_size
        num_tokens = min(self._context_tokens(), self.num_blocks(role) * size)
        num_bytes = ready_bytes_max(num_tokens, self.layout.num_blocks_for(num_tokens))
        if num_bytes > SIGNAL_BYTES_MAX:
            raise ConfigError(
                f"a context of {num_tokens} tokens in blocks of {size} cannot be handed over: what "
                f"a prefill worker says of it takes up to {num_bytes} bytes, and a message may "
                f"have {SIGNAL_BYTES_MAX}. Mend: a larger --block-size or a smaller "
                "--context-tokens"
            )

    def _context_tokens(self) -> int:
        return self.spec.context_of(self.options.context_tokens)


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
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    def limits(self, options: EngineOptions) -> EngineOptions:
        """The options as its device takes them: a device may have blocks and chunks of its own."""
        if self.pool_plan is None:
            return options
        device = self.pool_plan.device
        limits = replace(options, block_size=device.block_size, chunk_tokens=device.chunk_tokens)
        if device.num_slots is None:
            return limits
        return replace(limits, prefill_batch=min(options.prefill_batch, device.num_slots))

    def prefix_cache(self, options: EngineOptions, pool: BlockPool) -> PrefixCache | None:
        """Of a worker that computes prompts. None where it is off, or blocks are whole contexts."""
        has_slots = self.pool_plan is not None and self.pool_plan.device.num_slots is not None
        if options.prefix_cache == "off" or has_slots:
            return None
        limits = self.limits(options)
        return PrefixCache(pool, block_size=limits.block_size, chunk_tokens=limits.chunk)


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
    folder = resolve_checkpoint(model)
    spec = ModelSpec.from_folder(folder)
    spec.context_of(options.context_tokens)  # refused before anything is loaded
    device = plan_device(options, spec, folder)
    available_bytes = device.free_bytes() // (device.num_sharing or num_siblings)
    tokenizer = Tokenizer.load(folder)
    sampling_defaults = _sampling_defaults(folder, options)
    layout = spec.kv_layout(
        block_size=device.block_size, dtype=device.dtype, num_ranks=device.num_ranks
    )
    if arena is not None:
        available_bytes += arena.held_bytes(layout)
    pool_plan = PoolPlan(
        spec=spec, layout=layout, options=options, device=device, available_bytes=available_bytes
    )
    num_blocks = pool_plan.num_blocks(role)
    pool_plan.require_ready_fits(role)
    plan = device.memory_plan(spec, layout, num_blocks)
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
            num_threads=options.threads or usable_cores(),
            make_pool=arena or KvPool.create,
            on_progress=on_progress,
            plan=device,
        ),
    )
    return LoadedModel(
        name=name or model_name_of(model),
        digest=checkpoint_digest(folder),
        incarnation=incarnation,
        context_tokens=pool_plan.context_tokens(num_blocks),
        eos_token_ids=_eos_token_ids(spec, tokenizer),
        tokenizer=tokenizer,
        backend=backend,
        pool_plan=pool_plan,
        sampling_defaults=sampling_defaults,
    )


def _eos_token_ids(spec: ModelSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What ends an answer. Many a model was tuned to end with another token than the one that its
    configuration has from the model it was made of: only its tokenizer names that one."""
    own = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return tuple(dict.fromkeys(spec.eos_token_ids + own))


def _sampling_defaults(folder: Path, options: EngineOptions) -> SamplingDefaults:
    if options.sampling_defaults == "openai":
        return SamplingDefaults()
    defaults = read_sampling_defaults(folder)
    if values := defaults.given():
        _log.info("sampling_defaults", **values)
    return defaults


def why_impossible(model: LoadedModel, role: Role) -> str:
    """Why this model cannot be served in this role here, as for want of memory; empty: it can."""
    plan, pool = model.pool_plan, model.backend.pool
    assert plan is not None, "the model was loaded from a checkpoint"
    try:
        plan.require_ready_fits(role)
    except ConfigError as error:
        return error.message
    wanted_bytes = segment_bytes(plan.layout, plan.num_blocks(role))
    free_bytes = plan.device.free_bytes() + segment_bytes(pool.layout, pool.num_blocks)
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
