"""Hand-overs from and to GPU memory, by each engine there is of, in each other's layouts."""

import asyncio
import threading
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from contract.fake_cuda import WHY_NOT, Steering, make_pool
from gpu_kit import PAGED, blocks_of, compute, mirror_bytes, side, tokens_of
from transfer_kit import NUM_BLOCKS, R, end_of, until

from neuron_di.clock import Deadline
from neuron_di.errors import BackendLost
from neuron_di.kv import device_copies
from neuron_di.types import BlockId, Incarnation, RequestId
from neuron_di.wire import Done

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

NO_MEMORY, ILLEGAL_ADDRESS = 2, 700
ROUTES = [
    ("cuda_ipc", "gpu", "gpu"),
    ("tcp", "gpu", "gpu"),
    ("tcp", "gpu", "host"),
    ("tcp", "host", "gpu"),
    ("shm", "gpu", "gpu"),
    ("shm", "gpu", "host"),
    ("shm", "host", "gpu"),
]
SOURCE_IDS = [5, 1, 2, 9, 3, 15, 0]
OWN_IDS = [14, 3, 8, 9, 0, 5, 1, 2, 6, 4, 7, 10, 11, 12]


@pytest.fixture
def steering():
    steering = Steering.of()
    yield steering
    steering.release()
    steering.recover()


def pull(decode, prefill, ready, num_blocks, **options):
    own = [BlockId(n) for n in OWN_IDS[:num_blocks]]
    return own, decode.buffer(prefill).pull(ready, own, **options)


@pytest.mark.parametrize(("engine", "source", "destination"), ROUTES)
@pytest.mark.parametrize(
    "fields", [{}, {"block_size": 8}, {"block_size": 2}, {"dtype": "bfloat16"}], ids=str
)
async def test_kv_arrives_where_kernels_read_it_and_no_mirror_keeps_it(
    cluster, engine, source, destination, fields
):
    layout, num_tokens = replace(PAGED, **fields), 4 * len(SOURCE_IDS) - 3
    prefill = cluster.prefill(**side(source, engine))
    decode = cluster.decode(**side(destination, engine, layout))
    compute(prefill.pool)
    ready = prefill.park(block_ids=tuple(SOURCE_IDS), num_tokens=num_tokens)
    await decode.lookup(prefill)
    own, arrival = pull(decode, prefill, ready, layout.num_blocks_for(num_tokens))
    token = await end_of(arrival)
    assert token.error() is None
    assert (token.engine, token.form) == (engine, "landed" if fields else "direct")
    found = tokens_of(decode.pool, own, num_tokens)
    assert torch.equal(found, tokens_of(prefill.pool, SOURCE_IDS, num_tokens))
    assert found.any()
    await until(lambda: prefill.ended)
    assert isinstance(prefill.ended[0][1], Done)
    if destination == "gpu":
        assert all(map(decode.pool.is_on_device, own))
        others = [BlockId(n) for n in range(NUM_BLOCKS) if n not in own]
        assert not blocks_of(decode.pool, others).any()
        assert mirror_bytes(decode.pool) == len(others) * layout.block_bytes  # as it was filled
    if source == "gpu":
        kept = len(SOURCE_IDS) if engine == "shm" else 0
        assert mirror_bytes(prefill.pool) == kept * PAGED.block_bytes
        prefill.pool.retire([BlockId(n) for n in SOURCE_IDS])
        assert mirror_bytes(prefill.pool) == 0
    if not fields:
        assert decode.pool.digests(own, prefill.identity(), num_tokens) == ready.digests


@pytest.mark.parametrize("engine", ["tcp", "cuda_ipc"])
@pytest.mark.parametrize("block_size", [4, 8, 2])
async def test_what_is_on_the_device_already_stays(cluster, engine, block_size):
    """Of a block of which the rest comes, too."""
    layout, num_held = replace(PAGED, block_size=block_size), 3
    prefill = cluster.prefill(**side("gpu", engine))
    decode = cluster.decode(**side("gpu", engine, layout))
    compute(prefill.pool)
    compute(decode.pool)
    ready = prefill.park(block_ids=tuple(SOURCE_IDS))
    num_tokens = len(SOURCE_IDS) * PAGED.block_size
    own = [BlockId(n) for n in OWN_IDS[: layout.num_blocks_for(num_tokens)]]
    before = tokens_of(decode.pool, own, num_tokens)
    await decode.lookup(prefill)
    token = await end_of(decode.buffer(prefill).pull(ready, own, num_held=num_held))
    assert token.error() is None
    assert token.kv_bytes == (len(SOURCE_IDS) - num_held) * PAGED.block_bytes
    found, split = tokens_of(decode.pool, own, num_tokens), num_held * PAGED.block_size
    expected = tokens_of(prefill.pool, SOURCE_IDS, num_tokens)
    assert torch.equal(found[:, :, :, :split], before[:, :, :, :split])
    assert torch.equal(found[:, :, :, split:], expected[:, :, :, split:])
    assert not torch.equal(before, expected)


def until_waiting(steering, num_before):
    deadline, pause = Deadline.after(20.0), threading.Event()
    while steering.waiting() == num_before:
        assert not deadline.has_passed()
        pause.wait(0.001)


@pytest.mark.parametrize(
    ("engine", "source", "destination", "lost"),
    [
        ("tcp", "gpu", "host", "prefill"),
        ("tcp", "host", "gpu", "decode"),
        ("cuda_ipc", "gpu", "gpu", "decode"),
    ],
)
async def test_a_device_that_fails_in_mid_copy_is_lost_once_and_nobody_hangs(
    cluster, steering, engine, source, destination, lost
):
    sides = {
        "prefill": cluster.prefill(**side(source, engine)),
        "decode": cluster.decode(**side(destination, engine)),
    }
    prefill, decode = sides.values()
    compute(prefill.pool)
    ready = prefill.park(block_ids=tuple(SOURCE_IDS))
    await decode.lookup(prefill)
    told, pool = [], sides[lost].pool
    pool.watch_loss(told.append)
    kernels = pool.runtime.create_stream()
    num_waiting = steering.waiting()
    steering.hold(kernels)
    pool.record(kernels)
    _, arrival = pull(decode, prefill, ready, len(SOURCE_IDS))
    await asyncio.to_thread(until_waiting, steering, num_waiting)
    steering.break_device(ILLEGAL_ADDRESS)
    steering.release()
    token = await end_of(arrival)
    assert token.error() is not None
    assert isinstance(token.error(), BackendLost) == (lost == "decode")
    await until(lambda: prefill.ended)
    assert told == [pool.lost]
    assert "cudaErrorIllegalAddress" in pool.lost.message
    own = [BlockId(0)]
    for call in (pool.to_host, pool.read_blocks):
        with pytest.raises(BackendLost):
            list(call(own) or ())
    pool.lose(BackendLost("again"))
    assert len(told) == 1
    pool.watch_loss(told.append)  # whoever asks later hears it, too
    assert told == [pool.lost] * 2


def test_a_device_that_does_not_answer_is_lost_and_its_pool_closes(steering, monkeypatch):
    monkeypatch.setattr(device_copies, "TIMEOUT_S", 0.05)
    with closing(make_pool(PAGED, 2, Incarnation("own"))) as pool:
        kernels, num_freed = pool.runtime.create_stream(), steering.calls("cudaFreeHost")
        steering.hold(kernels)
        pool.record(kernels)
        pool.mark_on_device([BlockId(1)])
        with pytest.raises(BackendLost, match="does not answer"):
            pool.to_host([BlockId(1)])
        assert pool.lost is not None
    assert steering.calls("cudaFreeHost") == num_freed  # a copy may yet come there


@pytest.mark.parametrize("engine", ["tcp", "cuda_ipc"])
async def test_a_copy_that_finds_no_memory_fails_alone(cluster, steering, engine):
    prefill, decode = (make(**side("gpu", engine)) for make in (cluster.prefill, cluster.decode))
    compute(prefill.pool)
    ready = prefill.park(block_ids=tuple(SOURCE_IDS))
    await decode.lookup(prefill)
    steering.fail("cudaStreamWaitEvent", NO_MEMORY)
    token = await end_of(pull(decode, prefill, ready, len(SOURCE_IDS))[1])
    assert token.error() is not None
    assert prefill.pool.lost is None
    assert decode.pool.lost is None
    again = prefill.park(RequestId("again"), block_ids=tuple(SOURCE_IDS))
    await decode.lookup(prefill, RequestId("again"))
    token = await end_of(pull(decode, prefill, again, len(SOURCE_IDS))[1])
    assert token.error() is None


@pytest.mark.parametrize(("where", "is_announced"), [("host", True), ("gpu", False)])
async def test_layers_whose_kernels_may_not_have_run_are_not_announced(
    cluster, where, is_announced
):
    prefill = cluster.prefill(**side(where, "tcp"), stream_layers="on")
    prefill.buffer.layers.ask((R, 0), "reader")
    request = SimpleNamespace(request_id=R, attempt=0, block_ids=[BlockId(3)], num_prefilled=4)
    chunk = SimpleNamespace(request=request, start=0, end=4, is_last=True)
    assert (prefill.buffer.layers.watch(prefill.pool, chunk) is not None) == is_announced
