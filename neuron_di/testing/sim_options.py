"""What a simulated cluster is like: its size and its limits, drawn from their extremes."""

import random
from dataclasses import dataclass, replace

from neuron_di.config import EngineOptions, HandOverOptions, LimitOptions
from neuron_di.testing.workload import CONTEXT_TOKENS
from neuron_di.types import Role

TWO_SIDED_SHARE = 0.2
ARENA_SHARE = 0.3  # of what is left, where blocks are alike
CACHE_SHARE = 0.85  # in which KV of prompts is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """One cluster. `step_s` is how long an engine's step takes at most."""

    roles: tuple[Role, ...]
    engine: EngineOptions
    num_blocks: int
    hand_over: HandOverOptions
    limits: LimitOptions
    step_s: float
    latency_s: float
    is_two_sided: bool
    has_self_test: bool
    decode_block_size: int | None = None  # None: as prefill workers have it
    landing_bytes: int | None = None
    has_arena: bool = False  # blocks change owner

    def block_size(self, role: Role) -> int:
        own = self.decode_block_size if role == "decode" else None
        return own or self.engine.block_size

    def num_blocks_of(self, role: Role) -> int:
        """As many tokens for each role."""
        return -(-self.num_blocks * self.engine.block_size // self.block_size(role))


def draw_options(rng: random.Random) -> ClusterOptions:
    """Sizes and limits of one run."""
    # What was found by a seed stays there: these draws do not move the others.
    aside = random.Random(repr(rng.getstate()))
    block_size = rng.choice((1, 2, 4, 16))
    fewest = -(-CONTEXT_TOKENS // block_size)
    engine = EngineOptions(
        block_size=block_size,
        prefill_batch=rng.choice((1, 2, 8)),
        decode_batch=rng.choice((1, 2, 16)),
        chunk_tokens=rng.choice((1, 4, 512)),
        waiting_max=rng.choice((1, 4, 256, 256, 256)),
    )
    drawn = ClusterOptions(
        roles=_draw_roles(rng),
        engine=engine,
        num_blocks=fewest * rng.choice((1, 2, 6)),
        hand_over=_draw_hand_over(rng),
        limits=_draw_limits(rng),
        step_s=rng.choice((0.001, 0.01, 0.05)),
        latency_s=rng.choice((0.0001, 0.001, 0.02)),
        is_two_sided=rng.random() < TWO_SIDED_SHARE,
        has_self_test=rng.random() < 0.2,
        decode_block_size=aside.choice((None, None, None, 1, 2, 4, 16)),
        landing_bytes=aside.choice((4096, 3 * 4096, None)),
    )
    hand_over = replace(drawn.hand_over, stream_layers=aside.choice(("on", "off")))
    are_alike = drawn.decode_block_size in (None, block_size) and not drawn.is_two_sided
    has_arena = aside.random() < ARENA_SHARE and are_alike
    drawn = replace(drawn, hand_over=hand_over, has_arena=has_arena)
    reserve_tokens = aside.choice((1, 1, 4, 128))
    engine = replace(engine, reserve_tokens=reserve_tokens)
    if reserve_tokens == 1:  # then most answers outgrow what they began with, again and again
        engine = replace(engine, block_size=1, decode_batch=16)
        drawn = replace(drawn, num_blocks=CONTEXT_TOKENS, decode_block_size=None, step_s=0.05)
    if aside.random() >= CACHE_SHARE:
        engine = replace(engine, prefix_cache="off")
    return replace(drawn, engine=engine)


def default_options(roles: tuple[Role, ...]) -> ClusterOptions:
    """What an operator gets who sets nothing."""
    return ClusterOptions(
        roles=roles,
        engine=EngineOptions(block_size=4),
        num_blocks=96,
        hand_over=HandOverOptions(signal_curve="off"),
        limits=LimitOptions(),
        step_s=0.005,
        latency_s=0.001,
        is_two_sided=False,
        has_self_test=False,
    )


def draw_single_fault_options(rng: random.Random) -> ClusterOptions:
    """A cluster of defaults in which any one worker can be spared. In some of them chunks are so
    short that KV of prompts is found."""
    aside = random.Random(repr(rng.getstate()))
    two: list[Role] = ["prefill", "prefill", "decode", "decode"]
    options = default_options(tuple(two))
    step_s = rng.choice((0.001, 0.01, 0.05))
    options = replace(options, step_s=step_s, has_arena=aside.random() < ARENA_SHARE)
    engine = replace(options.engine, chunk_tokens=aside.choice((None, None, 8)))
    return replace(options, engine=engine)


def _draw_roles(rng: random.Random) -> tuple[Role, ...]:
    kind = rng.random()
    both: list[Role] = ["both"]
    if kind < 0.05:
        return tuple(both * rng.randint(1, 2))
    prefill: list[Role] = ["prefill"]
    decode: list[Role] = ["decode"]
    roles = prefill * rng.randint(1, 3) + decode * rng.randint(1, 3)
    return tuple(roles + both if kind < 0.2 else roles)


def _draw_hand_over(rng: random.Random) -> HandOverOptions:
    return HandOverOptions(
        signal_curve="off",  # nobody listens on a simulated link
        kv_lease_s=rng.choice((0.3, 2.0, 10.0)),
        kv_lease_max_s=rng.choice((1.0, 20.0)),
        heartbeat_s=rng.choice((0.2, 1.0, 1.0)),
        peer_silence_s=rng.choice((0.5, 3.0, 5.0)),
        peer_connect_timeout_s=rng.choice((0.2, 5.0)),
        transfer_timeout_s=rng.choice((0.05, 1.0, 5.0)),
        quarantine_s=rng.choice((0.1, 3.0, 10.0)),
        peers_max=1 if rng.random() < 0.05 else 256,
        remembered_max=rng.choice((16, 4096)),
    )


def _draw_limits(rng: random.Random) -> LimitOptions:
    return LimitOptions(
        requests_max=rng.choice((4, None, None, None)),
        queue_max=rng.choice((4, None, None, None)),
        request_timeout_s=rng.choice((3.0, 20.0, 30.0)),
        queue_timeout_s=rng.choice((0.0, 3.0, 10.0)),
        idle_timeout_s=rng.choice((1.0, 15.0)),
        stall_timeout_s=rng.choice((1.0, 15.0)),
        connect_timeout_s=rng.choice((0.2, 2.0)),
        retries_max=rng.choice((0, 2, 4, 4)),
        continuations_max=rng.choice((0, 2, 4, 4)),
        retry_share=rng.choice((0.1, 100.0)),
        probe_interval_s=rng.choice((0.3, 0.5, 1.0)),
        freeze_timeout_s=rng.choice((0.5, 2.5)),
    )
