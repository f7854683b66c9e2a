"""A decode worker's process dies: what that costs the device of the prefill worker."""

import threading
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from neuron_di.errors import PeerError
from neuron_di.kv import whole_block_runs
from neuron_di.transfer import Receive
from neuron_di.types import Incarnation

from . import nrt_end
from .engine_kinds import KINDS
from .numbered_blocks import NumberedBlocks
from .peer_process import peer_process
from .transfer_pair import DECODE, LAYOUT, NUM_BLOCKS, PREFILL, WAIT_S, fill, send_of

OTHER = Incarnation("bd" * 16)
NEVER = "function=sendrecv.send status=5 sticky"  # what is posted goes nowhere

pytestmark = pytest.mark.skipif(nrt_end.WHY_NOT is not None, reason=str(nrt_end.WHY_NOT))


@pytest.fixture(params=["nrt", "nrt by torch"])
def kind(request):
    """Of both ends."""
    return KINDS[request.param]


@contextmanager
def prefill_of(kind):
    """In this process: its pool and engine."""
    with closing(kind.make_pool(LAYOUT, NUM_BLOCKS, PREFILL)) as pool:
        fill(NumberedBlocks(pool))
        with closing(kind.make(pool)) as engine:
            yield pool, engine


@contextmanager
def reader_of(kind, engine, incarnation=DECODE):
    """A decode worker in a process of its own, linked."""
    with peer_process(kind.name, LAYOUT, NUM_BLOCKS, incarnation) as reader:
        engine.accept(incarnation, reader.region, LAYOUT)
        reader.connect(engine.local_region(incarnation))
        yield reader


def receive_of(pool, count, tag):
    ids = list(range(count))
    source = NumberedBlocks(pool).promise(ids)
    runs = whole_block_runs(LAYOUT, ids, ids)
    return Receive(tag=tag, runs=runs, memory=pool.memory(), source=source, block_ids=ids)


def ended(token):
    event = threading.Event()
    token.on_done(lambda _: event.set())
    assert event.wait(WAIT_S)
    return token.error()


def test_a_reader_that_dies_with_nothing_posted_costs_nothing(kind):
    with prefill_of(kind) as (pool, engine):
        for number, incarnation in enumerate((DECODE, OTHER)):
            with reader_of(kind, engine, incarnation) as reader:
                receive = receive_of(pool, 4, number)
                reader.receive(receive)
                assert ended(engine.post_send(incarnation, send_of(receive))) is None
                unasked = engine.post_send(incarnation, send_of(replace(receive, tag=99)))
                reader.kill()
                assert isinstance(ended(unasked), PeerError)
            engine.disconnect(incarnation)
        assert pool.lost is None


def test_a_reader_that_dies_in_mid_transfer_takes_the_device_along(kind):
    with prefill_of(kind) as (pool, engine):
        lost = threading.Event()
        pool.watch_loss(lambda _: lost.set())
        with reader_of(kind, engine) as reader:
            receive = receive_of(pool, NUM_BLOCKS, 1)
            reader.receive(receive)
            pool.place.fault(NEVER)
            before = pool.place.num_calls("nrt_async_sendrecv_send_tensor")
            send = engine.post_send(DECODE, send_of(receive))
            while pool.place.num_calls("nrt_async_sendrecv_send_tensor") == before:
                assert not send.is_done()
            reader.kill()
            assert isinstance(ended(send), PeerError)
        assert lost.wait(WAIT_S)
        assert "new process" in pool.lost.message
