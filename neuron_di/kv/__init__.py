"""The KV pool: its geometry and its shared memory."""

from neuron_di.kv.layout import DTYPE_BYTES, KvLayout
from neuron_di.kv.pool import KvPool, PeerPool, segment_bytes

__all__ = ["DTYPE_BYTES", "KvLayout", "KvPool", "PeerPool", "segment_bytes"]
