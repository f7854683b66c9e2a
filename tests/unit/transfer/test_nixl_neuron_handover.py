"""Whole hand-overs over the signal link, of KV that NIXL reads from device to device.

Real links, NIXL and digests; the devices' tensors lie in host memory (tests/contract/nixl_end.py).
"""

from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import transfer_kit
from contract import nixl_end
from transfer_kit import R, until

from neuron_di.errors import KvCorrupt, PeerGone
from neuron_di.transfer import ShmEngine, nixl_neuron_reader
from neuron_di.types import BlockId, RequestId
from neuron_di.wire import Done

pytestmark = pytest.mark.skipif(
    find_spec("nixl_cu12") is None, reason="the package nixl-cu12 is not installed"
)

LAYOUT = transfer_kit.KvLayout(
    num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="float32"
)


@pytest.fixture
def of_device(monkeypatch):
    """How a worker is made whose KV is on a device of so many ranks."""

    def options(num_ranks, make_transfer=nixl_end.make_engine, **more):
        def create(layout, num_blocks, incarnation):
            return nixl_end.make_pool(layout, num_blocks, incarnation, num_ranks=num_ranks)

        monkeypatch.setattr(transfer_kit, "KvPool", SimpleNamespace(create=create))
        return {"layout": LAYOUT, "make_transfer": make_transfer, **more}

    return options


def compute(prefill):
    """Block n holds n, and its device has it."""
    for block_id in prefill.pool.block_ids():
        prefill.pool.to_device(block_id, LAYOUT.block_size)


def numbers_in(pool, block_id, num_tokens):
    """What the device has for this slot's first tokens."""
    pool.view(block_id)[:] = bytes(LAYOUT.block_bytes)
    pool.to_host(block_id, num_tokens)
    block = np.frombuffer(pool.view(block_id), np.float32)
    rows = 2 * LAYOUT.num_layers * LAYOUT.num_kv_heads
    return block.reshape(rows, LAYOUT.block_size, LAYOUT.head_dim)[:, :num_tokens]


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 2), (1, 4), (4, 2)])
async def test_kv_goes_from_device_to_device_and_is_verified(
    cluster, of_device, prefill_ranks, decode_ranks
):
    prefill = cluster.prefill(**of_device(prefill_ranks))
    decode = cluster.decode(**of_device(decode_ranks))
    compute(prefill)
    prefill.park(R, (3,), num_tokens=9)
    token = await decode.hand_over(prefill, [5])
    assert token.error() is None
    assert token.kv_bytes == 9 * LAYOUT.block_bytes // LAYOUT.block_size
    assert decode.pool.is_on_device(BlockId(5))
    assert (numbers_in(decode.pool, 5, 9) == 3.0).all()
    await until(lambda: prefill.ended)
    ((_, done),) = prefill.ended
    assert isinstance(done, Done)
    assert (done.engine, done.form) == ("nixl_neuron", "direct")
    assert decode.buffer(prefill).lane.reason == "nixl_neuron: chosen"


async def test_a_device_that_cannot_be_read_costs_a_hand_over_nothing(
    cluster, of_device, monkeypatch
):
    """It goes by way of the host, and the status says why."""
    both = {"more_engines": (ShmEngine,)}
    prefill = cluster.prefill(**of_device(2, **both))
    decode = cluster.decode(**of_device(2, **both))
    compute(prefill)

    def try_device(reader, sample, deadline):
        raise PeerGone("a transfer from the prefill worker failed")

    monkeypatch.setattr(nixl_neuron_reader.NixlNeuronReader, "_try", try_device)
    prefill.park(R, (3,))
    assert (await decode.hand_over(prefill, [5])).error() is None
    assert (numbers_in(decode.pool, 5, LAYOUT.block_size) == 3.0).all()
    lane = decode.buffer(prefill).lane
    assert lane.reason == "nixl_neuron: a transfer from the prefill worker failed; shm: chosen"


async def test_kv_that_is_not_what_was_promised_is_not_taken(cluster, of_device):
    prefill = cluster.prefill(**of_device(2))
    decode = cluster.decode(**of_device(2))
    compute(prefill)
    prefill.park(R, (3,))
    prefill.pool.tensors[0].bytes[:] ^= 1  # whatever the reason
    token = await decode.hand_over(prefill, [5])
    assert isinstance(token.error(), KvCorrupt)
    prefill.pool.tensors[0].bytes[:] ^= 1
    prefill.park(RequestId("next"), (4,))
    assert (await decode.hand_over(prefill, [6], RequestId("next"))).error() is None
    assert (numbers_in(decode.pool, 6, LAYOUT.block_size) == 4.0).all()
