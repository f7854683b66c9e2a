"""A slot that another request had: nothing of that request is taken for the next one's."""

import threading
from contextlib import closing

import pytest
from test_neuron_pool import LAYOUT, make_device, make_pool

from neuron_di.errors import BackendLost, WorkerFailed
from neuron_di.kv import KvIdentity
from neuron_di.types import BlockId, Incarnation, RequestId, WorkerId
from neuron_di_bindings.nrt import NrtRequestError, NrtStatus

SLOT = BlockId(1)


def identity(request):
    return KvIdentity(
        worker_id=WorkerId("prefill-0"),
        incarnation=Incarnation("ab" * 16),
        request_id=RequestId(request),
        attempt=0,
        layout_digest=LAYOUT.digest(),
    )


@pytest.fixture
def pool():
    with closing(make_pool(make_device(2, ("HDS", "HSD")))) as pool:
        yield pool


def test_what_came_late_for_a_cancelled_request_is_not_the_next_ones(pool):
    pool.retire([SLOT])  # the request is over, but its receive could not be called off
    pool.mark_on_device([SLOT])
    assert pool.fill_replicas([SLOT], 9) is None
    pool.begin_fill([SLOT])  # the next one's KV comes by way of the mirror
    assert not pool.is_on_device(SLOT)
    before = bytes(pool.view(SLOT))
    pool.digests([SLOT], identity("next"), 9)
    assert bytes(pool.view(SLOT)) == before


def test_a_block_is_copied_and_digested_by_one_at_a_time(pool, monkeypatch):
    """Whoever digests for a cancelled request must not change what the next one's digest reads."""
    is_first_inside, may_go_on, order = threading.Event(), threading.Event(), []
    to_host = pool._copies.to_host

    def slow_to_host(*arguments):
        name = threading.current_thread().name
        order.append(f"{name} begins")
        if name == "cancelled":
            is_first_inside.set()
            assert may_go_on.wait(30)
        to_host(*arguments)
        order.append(f"{name} ends")

    monkeypatch.setattr(pool._copies, "to_host", slow_to_host)
    pool.mark_on_device([SLOT])
    threads = [
        threading.Thread(target=pool.digests, args=([SLOT], identity(name), 16), name=name)
        for name in ("cancelled", "next")
    ]
    threads[0].start()
    assert is_first_inside.wait(30)
    assert pool._copying(SLOT).locked()
    threads[1].start()
    may_go_on.set()
    for thread in threads:
        thread.join(30)
    assert order == ["cancelled begins", "cancelled ends", "next begins", "next ends"]


@pytest.mark.parametrize(
    ("raised", "expected", "is_lost"),
    [
        (BackendLost("the device does not answer"), BackendLost, True),
        (
            NrtRequestError("nrt_tensor_read", NrtStatus.INVALID, NrtStatus.INVALID.name),
            WorkerFailed,
            False,
        ),
    ],
)
def test_whatever_reads_a_slot_says_how_it_failed(pool, monkeypatch, raised, expected, is_lost):
    def fail(*_):
        raise raised

    seen = []
    pool.watch_loss(seen.append)
    monkeypatch.setattr(pool._copies, "to_host", fail)
    with pytest.raises(WorkerFailed) as failure:
        pool.to_host(SLOT, 3)
    assert type(failure.value) is expected
    assert (pool.lost is not None) == is_lost == bool(seen)


def test_what_came_by_the_mirror_is_on_the_device_when_the_fill_ends(pool, monkeypatch):
    written = []
    monkeypatch.setattr(pool._copies, "to_device", lambda *copied: written.append(copied[:2]))
    pool.begin_fill([SLOT])
    pool.end_fill([SLOT], 9)
    pool.end_fill([SLOT], 9)  # it is there
    assert written == [(SLOT, 9)]
    assert pool.is_on_device(SLOT)
