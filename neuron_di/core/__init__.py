"""Who may use which blocks and who computes next. Bookkeeping only: no tensors, I/O or clocks."""

from neuron_di.core.block_count import BlockCount
from neuron_di.core.block_pool import BlockPool
from neuron_di.core.combined_scheduler import CombinedScheduler
from neuron_di.core.completion import CompletionToken
from neuron_di.core.decode_scheduler import DecodeScheduler
from neuron_di.core.plan import DecodeBatch, PrefillChunk, StepPlan
from neuron_di.core.prefill_scheduler import PrefillScheduler
from neuron_di.core.prefix_cache import PrefixCache
from neuron_di.core.scheduler import Scheduler

__all__ = [
    "BlockCount",
    "BlockPool",
    "CombinedScheduler",
    "CompletionToken",
    "DecodeBatch",
    "DecodeScheduler",
    "PrefillChunk",
    "PrefillScheduler",
    "PrefixCache",
    "Scheduler",
    "StepPlan",
]
