"""The KV pool: its geometry, its shared memory, and how its bytes are verified."""

from neuron_di.kv.digest import BlockMemory, KvIdentity, block_digests
from neuron_di.kv.layout import DTYPE_BYTES, KvLayout
from neuron_di.kv.pool import KvPool, PeerPool, segment_bytes

__all__ = [
    "DTYPE_BYTES",
    "BlockMemory",
    "KvIdentity",
    "KvLayout",
    "KvPool",
    "PeerPool",
    "block_digests",
    "segment_bytes",
]
