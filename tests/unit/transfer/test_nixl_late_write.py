"""Once a NIXL receive has ended with an error nothing may write to its memory any more.

Only the end of NIXL's own agent makes sure of that, whoever else uses the agent, and whatever the
error is.
"""

import threading
import weakref
from contextlib import closing

import numpy as np
import pytest
from nixl_kit import Native, use_native

from neuron_di.kv import KvLayout, KvPool, Memory, whole_block_runs
from neuron_di.transfer import BlockSource, Receive
from neuron_di.transfer.nixl_agent import NixlAgent, load_nixl
from neuron_di.transfer.nixl_engine import NixlEngine
from neuron_di.types import Incarnation

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=4, dtype="float32")
PREFILL, DECODE = Incarnation("f0" * 16), Incarnation("d0" * 16)
WAIT_S = 20.0
STALL_S = 0.3  # until a transfer that stands still is given up


class Stalling:
    """A pair of engines. From `is_stalled` on reads stand still, and registering waits."""

    def __init__(self, decode, prefill_pool, decode_pool):
        self.decode, self.prefill_pool, self.decode_pool = decode, prefill_pool, decode_pool
        self.is_stalled = False
        self.raises = None
        self.reading = weakref.WeakSet()  # agents that have a transfer on its way
        self.registering, self.closing, self.go_on = (threading.Event() for _ in range(3))

    def post(self):
        """An event that the receive is over, and how many agents could still write then."""
        receive = Receive(
            tag=1,
            runs=whole_block_runs(LAYOUT, [2], [5]),
            memory=self.decode_pool.memory(),
            source=BlockSource([2], self.prefill_pool.generations([2])),
            block_ids=[5],
        )
        alive, over = [], threading.Event()

        def ended(token):
            assert token.error() is not None
            alive.append(len(self.reading))
            over.set()

        self.decode.post_receive(PREFILL, receive).on_done(ended)
        return over, alive


@pytest.fixture
def pair(monkeypatch):
    nixl, made = load_nixl(), []

    def scene():
        return made[0] if made and made[0].is_stalled else None

    def fail(transfer):
        raise made[0].raises

    class Gated(Native):
        @property
        def getXferStatus(self):  # as of compiled code: no frame of an error has the agent
            if (now := scene()) is None:
                return self._agent.getXferStatus
            return (lambda transfer: nixl.NIXL_IN_PROG) if now.raises is None else fail

        def postXferReq(self, transfer):
            status = self._agent.postXferReq(transfer)
            if (now := scene()) is None:
                return status
            now.reading.add(self)
            return nixl.NIXL_IN_PROG

        def registerMem(self, rows):
            if (now := scene()) is not None:
                now.registering.set()
                assert now.go_on.wait(WAIT_S)
            return self._agent.registerMem(rows)

    use_native(monkeypatch, Gated)
    close = NixlAgent.close

    def close_and_tell(self):
        if made:
            made[0].closing.set()
        close(self)

    monkeypatch.setattr(NixlAgent, "close", close_and_tell)
    with (
        closing(KvPool.create(LAYOUT, 8, PREFILL)) as prefill_pool,
        closing(KvPool.create(LAYOUT, 8, DECODE)) as decode_pool,
        closing(NixlEngine(prefill_pool)) as prefill,
        closing(NixlEngine(decode_pool, timeout_s=WAIT_S)) as decode,
    ):
        prefill.accept(DECODE, decode.local_region(PREFILL), LAYOUT)
        decode.connect(PREFILL, prefill.local_region(DECODE), LAYOUT)
        decode._readers.get(PREFILL)._timeout_s = STALL_S
        made.append(Stalling(decode, prefill_pool, decode_pool))
        made[0].is_stalled = True
        yield made[0]
        made[0].is_stalled = False
        made[0].go_on.set()


def test_a_transfer_that_stands_still(pair):
    over, alive = pair.post()
    assert over.wait(WAIT_S)
    assert alive == [0]


def test_while_another_thread_registers_memory(pair):
    landing = np.zeros(1 << 16, np.uint8)
    memory = Memory(landing.ctypes.data, len(landing))
    registering = threading.Thread(target=pair.decode.register, args=(memory,))
    registering.start()
    assert pair.registering.wait(WAIT_S)
    over, alive = pair.post()
    assert pair.closing.wait(WAIT_S)
    over.wait(STALL_S)  # who does not wait for the other thread ends here
    pair.go_on.set()
    registering.join(WAIT_S)
    assert over.wait(WAIT_S)
    assert alive == [0]


def test_an_error_that_is_not_ours(pair):
    pair.raises = MemoryError  # as std::bad_alloc comes
    over, alive = pair.post()
    assert over.wait(WAIT_S)
    assert alive == [0]
