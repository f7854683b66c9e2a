"""A link that is being connected while its worker closes makes nothing that nobody gives back."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
from contract.fake_cuda import make_pool
from transfer_kit import LAYOUT, until

from neuron_di.kv import Memory
from neuron_di.transfer import ShmEngine
from neuron_di.transfer.cuda_ipc_engine import CudaIpcEngine
from neuron_di.types import Incarnation

WAIT_S = 20.0


async def test_landing_memory_that_comes_late_is_given_back(cluster, monkeypatch):
    calls, allocating, go_on = [], threading.Event(), threading.Event()

    class Recording(ShmEngine):
        def register(self, memory):
            calls.append("register")
            super().register(memory)

        def close(self):
            calls.append("close")
            super().close()

    prefill = cluster.prefill()
    decode = cluster.decode(layout=replace(LAYOUT, block_size=8), make_transfer=Recording)
    landing = decode.connector.landing
    allocate = landing._allocate

    def allocate_late(size_bytes):
        allocating.set()
        assert go_on.wait(WAIT_S)
        return allocate(size_bytes)

    monkeypatch.setattr(landing, "_allocate", allocate_late)
    buffer = decode.buffer(prefill)
    await until(allocating.is_set)
    await decode.close()  # as Worker.close has it
    go_on.set()
    await asyncio.gather(buffer._link._connecting, return_exceptions=True)
    assert calls == ["close"]
    assert landing._memory is None
    assert landing._view is None


def test_a_closed_engine_pins_nothing():
    pool = make_pool(LAYOUT, 4, Incarnation("c" * 32))
    try:
        engine = CudaIpcEngine(pool)
        engine.close()
        landing = np.zeros(1 << 16, np.uint8)
        engine.register(Memory(landing.ctypes.data, len(landing)))
        assert pool.runtime.memory_kind(landing.ctypes.data) == "unregistered"
    finally:
        pool.close()
