"""What every transfer engine must do, whatever moves its bytes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_di.clock import Deadline
from neuron_di.errors import (
    KvChanged,
    KvMissing,
    NeuronDiError,
    PeerError,
    PeerGone,
    RemoteProtocolError,
)
from neuron_di.kv import KvPool
from neuron_di.transfer import Send
from neuron_di.types import Incarnation

from .numbered_blocks import bytes_of
from .random_lists import check_block_lists, check_landings
from .transfer_pair import (
    DECODE,
    LAYOUT,
    NUM_BLOCKS,
    PREFILL,
    UNTOUCHED,
    WAIT_S,
    connected_pair,
    one_end,
)

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
    source_ids, block_ids = map(list, blocks)
    pair.received[:] = UNTOUCHED
    sent_before = pair.sent[:]
    receive = pair.receive_of(source_ids, block_ids)
    outcome = pair.transfer(receive)
    assert outcome.error() is None
    token = outcome.token
    if pair.kind.hands_over:
        assert token.kv_bytes == 0
        assert token.adopted_ids == receive.source.block_ids
        assert pair.received.ids_of(block_ids) == token.adopted_ids
    else:
        assert token.kv_bytes == len(block_ids) * LAYOUT.block_bytes
        assert token.adopted_ids is None
    assert token.transfer_s >= 0
    assert (pair.received[block_ids] == sent_before[source_ids]).all()
    others = [n for n in range(NUM_BLOCKS) if n not in block_ids]
    assert (pair.received[others] == UNTOUCHED).all()
    assert (pair.sent == sent_before).all()


def test_many_random_block_lists(kind):
    is_on_device = not kind.lands and not kind.hands_over  # to compare is to read all of it
    check_block_lists(kind.name, num_lists=200 if is_on_device else 1000, seed=1)


def test_byte_runs_of_any_alignment_land_in_registered_memory_or_are_refused(kind):
    check_landings(kind.name, num_lists=200, seed=2)


def test_blocks_given_up_before_the_transfer_are_not_taken_for_the_promised(pair):
    if not pair.prefill.is_one_sided:
        pytest.skip("two-sided: prefill itself sends, and sends no block that it gave up")
    receive = pair.receive_of([5, 6], [0, 1])
    pair.sent.give_up([6])
    assert isinstance(pair.transfer(receive).error(), KvChanged)


@pytest.mark.parametrize("generation", ["next", -1, 2**56, 2**64, -(2**63)])
def test_a_generation_that_never_was_is_refused(pair, generation):
    if not pair.prefill.is_one_sided:
        pytest.skip("two-sided: prefill itself sends, and sends no block that it gave up")
    promised = pair.sent.promise([5])
    if generation == "next":
        generation = promised.generations[0] + 1
    outcome = pair.transfer(pair.receive_of(replace(promised, generations=[generation]), [0]))
    assert isinstance(outcome.error(), KvChanged)
    if pair.kind.hands_over:
        assert (pair.received == UNTOUCHED).all()


def test_a_receive_that_succeeds_beside_a_writer_holds_what_was_promised(kind):
    """Prefill gives a block up, then writes to it, again and again, while it is read."""
    block_ids = list(range(64))
    with connected_pair(kind.name, num_blocks=64) as pair:
        if not pair.prefill.is_one_sided:
            pytest.skip("two-sided: prefill keeps its blocks until they are sent")
        pair.sent[:] = 0
        is_over = threading.Event()
        computing = threading.Lock()  # a prefill promises its blocks once they are complete

        def write_on():
            value = 0
            while not is_over.is_set():
                value = (value + 1) % 256
                with computing:
                    pair.sent.give_up(block_ids)
                    pair.sent[:] = value
                is_over.wait(1e-4)  # or it would take the lock again before anybody else can

        with ThreadPoolExecutor(1) as writer:
            writing = writer.submit(write_on)
            try:
                for _ in range(200):
                    with computing:
                        receive, promised = pair.receive_of(block_ids, block_ids), pair.sent[0, 0]
                    outcome = pair.transfer(receive)
                    error = outcome.error()
                    if error is None:
                        assert (pair.received[block_ids] == promised).all()
                    else:
                        assert isinstance(error, KvChanged)
            finally:
                is_over.set()
            writing.result()


def test_what_is_given_up_after_the_bytes_came_spoils_nothing(pair):
    """Found out or not: what is final is what was promised."""
    promised = pair.sent[:2]
    receive = pair.receive_of([0, 1], [2, 3])
    token = pair.decode.post_receive(PREFILL, receive)
    pair.send(receive)
    came = threading.Event()
    token.on_done(lambda _: came.set())
    assert came.wait(WAIT_S)
    assert token.error() is None
    pair.sent.give_up([0, 1])
    pair.sent[:2] = 0
    error = pair.outcome(receive, token).error()
    assert error is None or isinstance(error, KvChanged)
    if error is None:
        assert not pair.kind.hands_over
        assert (pair.received[2:4] == promised).all()
    elif pair.kind.hands_over:
        assert (pair.received == UNTOUCHED).all()


def test_what_is_given_up_after_it_was_final_is_kept(pair):
    promised = pair.sent[:2]
    assert pair.move([0, 1], [2, 3]).error() is None
    pair.sent.give_up([0, 1])
    pair.sent[:2] = 0
    assert (pair.received[2:4] == promised).all()


def test_each_of_many_posted_receives_gets_its_own_bytes(pair):
    outcomes = [pair.move([n], [NUM_BLOCKS - 1 - n]) for n in range(NUM_BLOCKS)]
    for n, outcome in enumerate(outcomes):
        assert outcome.error() is None
        assert (pair.received[NUM_BLOCKS - 1 - n] == pair.sent[n]).all()


@pytest.mark.parametrize("is_send_first", [True, False])
def test_sends_and_receives_find_each_other_whichever_is_posted_first(pair, is_send_first):
    receives = [pair.receive_of([n], [n]) for n in range(4)]
    if is_send_first:
        sends = [pair.send(receive) for receive in receives]
        outcomes = [pair.post(receive) for receive in receives]
    else:
        outcomes = [pair.post(receive) for receive in receives]
        sends = [pair.send(receive) for receive in receives]
    for n, outcome in enumerate(outcomes):
        assert outcome.error() is None
        assert (pair.received[n] == pair.sent[n]).all()
    for send in sends:
        ended = threading.Event()
        send.on_done(lambda _, ended=ended: ended.set())
        assert ended.wait(WAIT_S)
        assert send.error() is None


def test_nothing_is_written_after_the_end(pair):
    block_ids = list(range(8))
    assert pair.move(block_ids, block_ids).error() is None
    pair.received[:8] = UNTOUCHED
    for n in range(8, NUM_BLOCKS):  # whatever was on its way comes before these
        assert pair.move([n], [n]).error() is None
    assert (pair.received[:8] == UNTOUCHED).all()


def test_a_cancelled_receive_ends_and_is_not_written_to_later(pair):
    """One-sided: it ends by itself. Two-sided: its send may never come, or come too late."""
    receive = pair.receive_of([0], [0])
    outcome = pair.post(receive)
    pair.decode.cancel(PREFILL, receive.tag)
    error = outcome.error()
    if pair.decode.is_one_sided:
        assert error is None
        assert (pair.received[0] == pair.sent[0]).all()
        return
    assert isinstance(error, KvMissing)
    pair.send(receive)
    for n in range(1, 8):
        assert pair.move([n], [n]).error() is None
    assert (pair.received[0] == UNTOUCHED).all()


def test_cancelling_what_is_not_posted_does_nothing(pair):
    pair.decode.cancel(PREFILL, 2**64 - 1)
    pair.decode.cancel(Incarnation("x"), 0)
    outcome = pair.move([0], [0])
    assert outcome.error() is None
    pair.decode.cancel(PREFILL, 0)
    assert pair.move([1], [1]).error() is None


def test_a_transfer_from_nobody_fails(pair):
    receive = pair.receive_of([0], [0])
    token = pair.decode.post_receive(Incarnation("x"), receive)
    assert isinstance(pair.outcome(receive, token).error(), PeerGone)
    assert (pair.received == UNTOUCHED).all()


def test_connect_refuses_another_process_than_the_named(kind, pair):
    """A worker that was started anew offers what looks like its predecessor's."""
    end = one_end(kind, Incarnation("ab" * 16), LAYOUT, NUM_BLOCKS, pair.arena_fd)
    with end as (_, other):
        other.accept(DECODE, pair.decode.local_region(PREFILL), LAYOUT)
        with pytest.raises(PeerError):
            pair.decode.connect(Incarnation("x"), other.local_region(DECODE), LAYOUT)
    receive = pair.receive_of([0], [0])
    token = pair.decode.post_receive(Incarnation("x"), receive)
    assert isinstance(pair.outcome(receive, token).error(), PeerGone)
    assert pair.move([0], [0]).error() is None


def test_disconnect_ends_what_is_posted_and_refuses_later_receives(pair):
    outcomes = [pair.move([n], [n]) for n in range(NUM_BLOCKS)]
    pair.decode.disconnect(PREFILL)
    for n, outcome in enumerate(outcomes):
        error = outcome.error()
        assert error is None or isinstance(error, NeuronDiError)
        if error is None:
            assert (pair.received[n] == pair.sent[n]).all()
    assert isinstance(pair.post(pair.receive_of([0], [0])).error(), PeerGone)
    pair.decode.disconnect(PREFILL)
    pair.decode.disconnect(Incarnation("x"))


def test_a_peer_can_be_connected_again(pair):
    for n in range(3):
        pair.decode.disconnect(PREFILL)
        pair.prefill.disconnect(DECODE)
        pair.connect()
        outcome = pair.move([n], [n])
        assert outcome.error() is None
        assert (pair.received[n] == pair.sent[n]).all()


def test_a_receive_without_a_send_ends_when_its_peer_is_disconnected(pair):
    outcome = pair.post(pair.receive_of([0], [0]))
    pair.decode.disconnect(PREFILL)
    error = outcome.error()
    if not pair.decode.is_one_sided:
        assert isinstance(error, PeerError)
        assert (pair.received == UNTOUCHED).all()


def test_close_ends_after_what_was_posted_and_posts_no_more(kind):
    with connected_pair(kind.name) as pair:
        outcomes = [pair.move([n], [NUM_BLOCKS - 1 - n]) for n in range(NUM_BLOCKS)]
        late = pair.receive_of([0], [0])
        pair.decode.close()
        assert all(outcome.has_ended(0.0) for outcome in outcomes)
        for n, outcome in enumerate(outcomes):
            if outcome.error() is None:
                assert (pair.received[NUM_BLOCKS - 1 - n] == pair.sent[n]).all()
        pair.received[:] = UNTOUCHED
        assert isinstance(pair.post(late).error(), NeuronDiError)
        pair.decode.close()
        assert (pair.received == UNTOUCHED).all()


def test_many_transfers_from_many_threads(pair):
    def move(block_id):
        for _ in range(20):
            assert pair.move([block_id], [NUM_BLOCKS - 1 - block_id]).error() is None
        return pair.received[NUM_BLOCKS - 1 - block_id]

    with ThreadPoolExecutor(8) as pool:
        for n, future in enumerate([pool.submit(move, n) for n in range(NUM_BLOCKS)]):
            assert (future.result(WAIT_S) == pair.sent[n]).all()


def test_a_callback_that_fails_does_not_end_the_engine(pair):
    def fail(_):
        raise ValueError("from a callback")

    for n in range(4):
        receive = pair.receive_of([n], [n])
        token = pair.decode.post_receive(PREFILL, receive)
        try:
            token.on_done(fail)
        except ValueError:  # it was done already
            assert token.is_done()
        pair.send(receive)
    outcome = pair.move([4], [4])
    assert outcome.error() is None
    assert (pair.received[4] == pair.sent[4]).all()


def test_polling_never_waits_and_goes_from_undone_to_done_once(pair):
    deadline = Deadline.after(WAIT_S)
    receive = pair.receive_of(range(NUM_BLOCKS), range(NUM_BLOCKS))
    token = pair.decode.post_receive(PREFILL, receive)
    pair.send(receive)
    polls = []
    while not token.is_done() and not deadline.has_passed():
        polls.append(token.error())
    assert token.is_done()
    assert set(polls) <= {None}
    calls = []
    token.on_done(calls.append)
    assert calls == [token]


def test_a_send_to_nobody_ends(pair):
    receive = pair.receive_of([0], [0])
    token = pair.prefill.post_send(Incarnation("x"), Send(tag=0, runs=receive.runs))
    ended = threading.Event()
    token.on_done(lambda _: ended.set())
    assert ended.wait(WAIT_S)


def test_memory_registered_late_can_be_received_into(pair):
    """The landing memory is allocated when the first peer needs it."""
    with closing(KvPool.create(LAYOUT, 2, Incarnation("cd" * 16))) as pool:
        receive = pair.landing_of(pool.memory(), pair.receive_of([7], [1]).runs)
        landed = bytes_of(pool.memory())
        before = landed.copy()
        assert isinstance(pair.post(receive).error(), NeuronDiError)
        assert (landed == before).all()
        pair.decode.register(pool.memory())
        receive = pair.landing_of(pool.memory(), pair.receive_of([7], [1]).runs)
        outcome = pair.transfer(receive)
        if pair.kind.lands:
            assert outcome.error() is None
            assert (landed[LAYOUT.block_bytes :] == pair.sent[7]).all()
            landed[LAYOUT.block_bytes :] = before[LAYOUT.block_bytes :]
        else:
            assert isinstance(outcome.error(), RemoteProtocolError)
        pair.decode.close()  # before that memory goes
        assert (landed == before).all()
