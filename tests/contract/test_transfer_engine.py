"""What every transfer engine must do, whatever moves its bytes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_pair import ENGINES, LAYOUT, NUM_BLOCKS, PREFILL, HeldList, connected_pair

from neuron_di.clock import Deadline
from neuron_di.errors import KvChanged, PeerError, PeerGone, StaleIncarnation
from neuron_di.kv import KvPool
from neuron_di.transfer import BlockSource, TransferToken
from neuron_di.types import Incarnation

WAIT_S = 30.0


@pytest.fixture(params=ENGINES)
def pair(request):
    with connected_pair(request.param) as pair:
        yield pair


def wait(token: TransferToken) -> TransferToken:
    ended = threading.Event()
    token.on_done(lambda _: ended.set())
    assert ended.wait(WAIT_S)
    assert token.is_done()
    return token


BLOCK_LISTS = st.integers(1, NUM_BLOCKS).flatmap(
    lambda count: st.tuples(
        st.permutations(range(NUM_BLOCKS)).map(lambda ids: ids[:count]),
        st.permutations(range(NUM_BLOCKS)).map(lambda ids: ids[:count]),
    )
)
RUNS = st.tuples(
    st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_BLOCKS - 1), st.integers(1, NUM_BLOCKS)
).map(
    lambda run: (
        list(range(run[0], min(run[0] + run[2], NUM_BLOCKS - max(0, run[1] - run[0])))),
        list(range(run[1], min(run[1] + run[2], NUM_BLOCKS - max(0, run[0] - run[1])))),
    )
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(blocks=BLOCK_LISTS | RUNS)
def test_blocks_arrive_bit_exact_and_no_other_changes(pair, blocks):
    source_ids, block_ids = blocks
    sent, received = pair.prefill_pool.tensor(), pair.decode_pool.tensor()
    received.fill_(-1.0)
    sent_before = sent.clone()
    token = wait(pair.move(list(source_ids), list(block_ids)))
    assert token.error() is None
    assert token.kv_bytes == len(block_ids) * LAYOUT.block_bytes
    assert token.transfer_s >= 0
    assert torch.equal(received[list(block_ids)], sent[list(source_ids)])
    others = [n for n in range(NUM_BLOCKS) if n not in block_ids]
    assert (received[others] == -1.0).all()
    assert torch.equal(sent, sent_before)


def test_bytes_that_are_no_numbers_arrive_as_they_are(pair):
    pair.prefill_pool.tensor()[3] = float("nan")
    assert wait(pair.move([3], [4])).error() is None
    assert pair.decode_pool.tensor()[4].isnan().all()


@pytest.mark.parametrize("source_id", [-1, NUM_BLOCKS, 2**31, 2**32, 2**63 - 1, -(2**63)])
def test_a_block_outside_of_the_peers_pool_is_refused(pair, source_id):
    token = wait(pair.receive(BlockSource([0, source_id], [0, 0]), [0, 1]))
    assert isinstance(token.error(), PeerError)
    assert (pair.decode_pool.tensor() == -1.0).all()


@pytest.mark.parametrize(
    ("source_ids", "generations"),
    [([0], [0]), ([0, 1, 2], [0, 0, 0]), ([0, 1], [0]), ([0, 1], [0, 0, 0]), ([], [])],
)
def test_lists_of_different_lengths_are_refused(pair, source_ids, generations):
    token = wait(pair.receive(BlockSource(source_ids, generations), [0, 1]))
    assert isinstance(token.error(), PeerError)
    assert (pair.decode_pool.tensor() == -1.0).all()


def test_blocks_given_up_before_the_transfer_are_not_taken_for_the_promised(pair):
    source = pair.source([5, 6])
    pair.prefill_pool.retire([6])
    assert isinstance(wait(pair.receive(source, [0, 1])).error(), KvChanged)


@pytest.mark.parametrize("generation", [1, -1, 2**64, -(2**63)])
def test_a_generation_that_never_was_is_refused(pair, generation):
    token = wait(pair.receive(BlockSource([5], [generation]), [0]))
    assert isinstance(token.error(), KvChanged)


def test_a_transfer_that_succeeds_beside_a_writer_holds_what_was_promised():
    """Prefill gives a block up, then writes to it, again and again, while it is read."""
    with connected_pair("shm", num_blocks=64) as pair:
        tensor = pair.prefill_pool.tensor()
        tensor.zero_()
        block_ids = list(range(64))
        is_over = threading.Event()
        computing = threading.Lock()  # a prefill promises its blocks once they are complete

        def write_on():
            value = 0.0
            while not is_over.is_set():
                value += 1.0
                with computing:
                    pair.prefill_pool.retire(block_ids)
                    tensor.fill_(value)

        with ThreadPoolExecutor(1) as writer:
            writing = writer.submit(write_on)
            try:
                for _ in range(300):
                    with computing:
                        source, promised = pair.source(block_ids), float(tensor[0, 0, 0, 0, 0, 0])
                    token = wait(pair.receive(source, block_ids))
                    if token.error() is None:
                        assert (pair.decode_pool.tensor() == promised).all()
                    else:
                        assert isinstance(token.error(), KvChanged)
            finally:
                is_over.set()
            writing.result()


def test_a_transfer_from_nobody_fails(pair):
    token = pair.decode.post_receive(Incarnation("x"), BlockSource([0], [0]), [0])
    assert isinstance(wait(token).error(), PeerGone)


def test_connect_refuses_another_process_than_the_named(pair):
    region = pair.prefill.local_region()
    with pytest.raises(StaleIncarnation):
        pair.decode.connect(Incarnation("x"), region)
    with pytest.raises(StaleIncarnation):
        pair.decode.connect(Incarnation("x"), msgspec.structs.replace(region, incarnation="x"))
    token = pair.decode.post_receive(Incarnation("x"), BlockSource([0], [0]), [0])
    assert isinstance(wait(token).error(), PeerGone)


def test_disconnect_lets_posted_transfers_end_and_refuses_later_ones(pair):
    tokens = [pair.move([n], [n]) for n in range(NUM_BLOCKS)]
    pair.decode.disconnect(PREFILL)
    assert [wait(token).error() for token in tokens] == [None] * NUM_BLOCKS
    assert isinstance(wait(pair.move([0], [0])).error(), PeerGone)
    pair.decode.disconnect(PREFILL)
    pair.decode.connect(PREFILL, pair.prefill.local_region())
    assert wait(pair.move([0], [0])).error() is None


@pytest.mark.parametrize("kind", ENGINES)
def test_close_ends_after_what_was_posted(kind):
    with connected_pair(kind) as pair:
        tokens = [pair.move([n], [NUM_BLOCKS - 1 - n]) for n in range(NUM_BLOCKS)]
        other = KvPool.create(LAYOUT, 1, Incarnation("x"))
        engine = ENGINES[kind](other)
        engine.connect(PREFILL, pair.prefill.local_region())
        late = [engine.post_receive(PREFILL, pair.source([7]), [0]) for _ in range(50)]
        engine.close()
        assert all(token.is_done() and token.error() is None for token in late)
        assert torch.equal(other.tensor()[0], pair.prefill_pool.tensor()[7])
        other.close()
        for token in tokens:
            assert wait(token).error() is None


def test_many_transfers_from_many_threads(pair):
    def move(block_id):
        for _ in range(20):
            assert wait(pair.move([block_id], [NUM_BLOCKS - 1 - block_id])).error() is None

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(move, n) for n in range(NUM_BLOCKS)]:
            future.result(WAIT_S)
    received = pair.decode_pool.tensor()
    assert torch.equal(received.flip(0), pair.prefill_pool.tensor())


def test_a_callback_that_fails_does_not_end_the_engine(pair):
    def fail(_):
        raise ValueError("from a callback")

    source = pair.source([0])
    gate = threading.Event()
    token = pair.receive(BlockSource([0], HeldList(source.generations, gate)), [0])
    token.on_done(fail)
    assert not token.is_done()
    gate.set()
    assert wait(pair.move([1], [1])).error() is None
    assert token.is_done()


def test_polling_never_waits_and_goes_from_undone_to_done_once(pair):
    deadline = Deadline.after(WAIT_S)
    token = pair.move(list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS)))
    polls = []
    while not token.is_done() and not deadline.has_passed():
        polls.append(token.error())
    assert token.is_done()
    assert set(polls) <= {None}
