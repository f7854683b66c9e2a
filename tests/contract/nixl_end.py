"""A Neuron worker's pool whose KV tensors lie in host memory, for NIXL to read as if on a device.

The engine, its plans and NIXL are the real ones, and real bytes move. What is not: the kind of the
tensors' memory, which NIXL takes as the host's.
"""

import ctypes
from typing import Any

import numpy as np

from neuron_di.kv import DeviceKv, KvGeometry, KvLayout, KvMap, NeuronPool
from neuron_di.kv.geometry import Order
from neuron_di.transfer import nixl_connect
from neuron_di.transfer.nixl_agent import NixlAgent
from neuron_di.transfer.nixl_neuron_engine import NixlNeuronEngine, open_libfabric
from neuron_di.types import Incarnation

PAD = 4  # token positions behind each slot's last, as NxDI has
_BESIDE = 64  # bytes around each tensor that nobody may touch
_UNTOUCHED = 0xA5


class HostTensor:
    """A DeviceTensor in host memory. Nothing around it may change."""

    nrt = None
    torch_tensor = None

    def __init__(self, num_bytes: int, core: int) -> None:
        self.num_bytes, self.core = num_bytes, core
        self._all = np.full(num_bytes + 2 * _BESIDE, _UNTOUCHED, np.uint8)
        self.bytes = self._all[_BESIDE : _BESIDE + num_bytes]
        self.bytes[:] = 0
        self.address: int | None = self.bytes.ctypes.data

    def read(self, offset: int, into: memoryview) -> None:
        assert 0 <= offset <= self.num_bytes - len(into)
        ctypes.memmove((ctypes.c_char * len(into)).from_buffer(into), self._at(offset), len(into))

    def write(self, offset: int, data: memoryview) -> None:
        assert 0 <= offset <= self.num_bytes - len(data)
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def check(self) -> None:
        if (self._all[:_BESIDE] != _UNTOUCHED).any() or (self._all[-_BESIDE:] != _UNTOUCHED).any():
            raise AssertionError("something was written beside a KV tensor")

    def _at(self, offset: int) -> int:
        return int(self.bytes.ctypes.data) + offset


class HostDevicePool(NeuronPool):
    """Its tensors are HostTensors."""

    tensors: list[HostTensor]

    def close(self) -> None:
        super().close()
        for tensor in self.tensors:
            tensor.check()


def make_pool(
    layout: KvLayout,
    num_blocks: int,
    incarnation: Incarnation,
    *,
    num_ranks: int = 2,
    keys: Order = "HSD",
    values: Order = "HSD",
    pad: int = PAD,
    num_q_heads: int | None = None,
) -> HostDevicePool:
    """`num_ranks` may be more than there are heads: then they have replicas."""
    geometry = KvGeometry.of_rank_tensors(
        KvMap.of_tensor_parallel(
            num_ranks, layout.num_kv_heads, num_q_heads or max(num_ranks, layout.num_kv_heads)
        ),
        num_layers=layout.num_layers,
        head_dim=layout.head_dim,
        block_size=layout.block_size + pad,
        num_blocks=num_blocks + 1,
        dtype=layout.dtype,
        keys=keys,
        values=values,
    )
    ranks = geometry.rank_of_tensor()
    tensors = [
        HostTensor(num_bytes, ranks[number])
        for number, num_bytes in sorted(geometry.tensor_bytes().items())
    ]
    device = DeviceKv(tensors=tensors, geometry=geometry, lncs=tuple(range(8, 8 + num_ranks)))
    pool = HostDevicePool.create(layout, num_blocks, incarnation, device)
    pool.tensors = tensors
    return pool


def open_ucx(name: str, is_serving: bool) -> NixlAgent:
    options = {
        "ucx_error_handling_mode": "peer",
        "engine_config": "NET_DEVICES=lo",
    }
    return NixlAgent(name, "UCX", options, is_serving=is_serving)


def make_engine(pool: Any, **fields: Any) -> NixlNeuronEngine:
    return NixlNeuronEngine(pool, **{"open_agent": open_ucx, "kind": "DRAM", **fields})


def make_libfabric_engine(pool: Any) -> NixlNeuronEngine:
    nixl_connect._given_up.clear()  # by tests of dead peers: each is one worker's
    return NixlNeuronEngine(pool, open_agent=open_libfabric, kind="DRAM", timeout_s=10.0)
