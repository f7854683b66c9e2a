"""The KV pool: its geometry, its shared memory, and how its bytes are verified."""

from neuron_di.kv.arena import create_arena
from neuron_di.kv.arena_pool import ArenaPool, PoolMaker, open_peer_pool
from neuron_di.kv.digest import KvIdentity, block_digests
from neuron_di.kv.geometry import KvGeometry, Strides
from neuron_di.kv.holds import SETTLE_S
from neuron_di.kv.kv_map import KvMap
from neuron_di.kv.layout import DTYPE_BYTES, KvLayout
from neuron_di.kv.neuron_copies import DeviceKv
from neuron_di.kv.neuron_pool import NeuronPool
from neuron_di.kv.ownership import Group
from neuron_di.kv.placement import place_on_host
from neuron_di.kv.planner import Planner
from neuron_di.kv.pool import (
    GENERATIONS_OFFSET,
    KvPool,
    PeerPool,
    check_header,
    head_bytes,
    segment_bytes,
)
from neuron_di.kv.resharding import Resharding, whole_block_runs
from neuron_di.kv.runs import BlockIds, Memory, Runs, as_ids, ids_below
from neuron_di.kv.transfer_sequences import runs_of, transfer_sequences

__all__ = [
    "DTYPE_BYTES",
    "GENERATIONS_OFFSET",
    "SETTLE_S",
    "ArenaPool",
    "BlockIds",
    "DeviceKv",
    "Group",
    "KvGeometry",
    "KvIdentity",
    "KvLayout",
    "KvMap",
    "KvPool",
    "Memory",
    "NeuronPool",
    "PeerPool",
    "Planner",
    "PoolMaker",
    "Resharding",
    "Runs",
    "Strides",
    "as_ids",
    "block_digests",
    "check_header",
    "create_arena",
    "head_bytes",
    "ids_below",
    "open_peer_pool",
    "place_on_host",
    "runs_of",
    "segment_bytes",
    "transfer_sequences",
    "whole_block_runs",
]
