"""Blocks change owner: what both ends have afterwards, whoever stops at whichever access."""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator

import pytest
from arena_kit import Died, Scene, SteppedWords, Worker, at_access, scene

from neuron_di.errors import KvChanged, LocalProtocolError, RemoteProtocolError
from neuron_di.kv import ownership
from neuron_di.kv.arena import Arena
from neuron_di.types import BlockId

WAIT_S = 30.0
PROMISED, OFFERED = [0, 1, 2], [6, 7, 8]
NUM_ACCESSES = (
    12  # of a taking: each source looked at, the lead, the two others, all looked at, given
)


@pytest.fixture
def both() -> Iterator[Scene]:
    with scene() as made:
        yield made


def test_taken_blocks_are_exchanged_at_both_ends(both: Scene) -> None:
    both.promise(PROMISED)
    assert both.take(both.group(OFFERED)) is None
    both.decode.follow()
    assert both.decode.request == PROMISED
    both.prefill.retire()
    assert both.prefill.request == OFFERED
    both.decode.retire()
    assert both.decode.request == PROMISED
    both.check()


def test_what_decode_computes_on_is_what_prefill_wrote(both: Scene) -> None:
    both.promise(PROMISED)
    both.prefill.pool.tensor()[PROMISED] = 7.0
    assert both.take(both.group(OFFERED)) is None
    assert (both.decode.pool.tensor()[PROMISED] == 7.0).all()
    assert bytes(both.decode.pool.view(BlockId(1))) == bytes(both.prefill.pool.view(BlockId(1)))


def test_blocks_that_prefill_gave_up_cannot_be_taken(both: Scene) -> None:
    both.promise(PROMISED)
    group = both.group(OFFERED)
    both.prefill.retire()
    assert isinstance(both.take(group), KvChanged)
    both.decode.retire()
    assert (both.prefill.request, both.decode.request) == (PROMISED, OFFERED)
    both.check()


def test_blocks_that_decode_gave_up_are_not_given(both: Scene) -> None:
    both.promise(PROMISED)
    group = both.group(OFFERED)
    both.decode.retire()
    assert isinstance(both.take(group), KvChanged)
    both.prefill.retire()
    assert both.prefill.request == PROMISED
    both.check()


def test_a_promise_is_taken_once(both: Scene) -> None:
    both.promise(PROMISED)
    first = both.group(OFFERED)
    second = both.group([9, 10, 11])
    assert both.take(first) is None
    assert isinstance(both.take(second), KvChanged)
    both.prefill.retire()
    assert both.prefill.request == OFFERED
    both.check()


def test_blocks_that_decode_had_already_stay_prefills(both: Scene) -> None:
    both.promise(PROMISED)
    assert both.take(both.group([6, 7], num_held=1)) is None
    both.prefill.retire()
    assert both.prefill.request == [0, 6, 7]
    both.check()


def test_blocks_that_come_back_before_prefill_looked_are_not_its_twice(both: Scene) -> None:
    both.promise(PROMISED)
    assert both.take(both.group(OFFERED)) is None
    both.decode.follow()
    both.decode.retire()
    unheard, both.prefill.request = both.prefill.request, [BlockId(3), BlockId(4)]
    assert both.take(both.group([2, 1])) is None  # of those that it has just taken
    heard = both.prefill.request
    while both.prefill.pool.retire(heard):
        for went, came in both.prefill.pool.exchanges():
            held_by = unheard if went in unheard else heard
            held_by[held_by.index(went)] = came
    both.prefill.request = unheard
    both.prefill.retire()
    assert sorted(heard) == [1, 2]
    assert sorted(both.prefill.request) == OFFERED
    both.check()


@pytest.mark.parametrize("hints", [[9, 0, 2**40], [6, 6, 6]])
def test_a_hint_of_a_later_exchange_does_not_mislead(both: Scene, hints: list[int]) -> None:
    both.promise(PROMISED)
    assert both.take(both.group(OFFERED)) is None
    both.prefill.pool.arena.hints[PROMISED] = hints
    both.prefill.retire()
    assert both.prefill.request == OFFERED
    both.check()


def test_a_block_promised_twice_is_given_once(both: Scene) -> None:
    both.promise([0, 1])
    first = both.group([6, 7])
    both.promise([1, 2])
    second = both.group([8, 9])
    assert both.take(first) is None
    both.decode.follow()
    assert isinstance(both.take(second), KvChanged | RemoteProtocolError)
    assert len(both.decode.owned) == 6


def test_a_block_of_another_worker_cannot_be_given_up(both: Scene) -> None:
    with pytest.raises(LocalProtocolError):
        both.prefill.pool.retire([BlockId(6)])


def test_a_new_worker_of_a_name_has_its_blocks_and_none_of_its_promises(both: Scene) -> None:
    both.promise(PROMISED)
    group = both.group(OFFERED)
    both.prefill.die()
    both.prefill = both.join("prefill")
    assert isinstance(both.take(group), KvChanged)
    both.check()


def test_what_decode_has_just_taken_it_may_give_up_before_its_books_know(both: Scene) -> None:
    both.promise(PROMISED)
    assert both.take(both.group(OFFERED)) is None
    assert both.decode.pool.retire(both.decode.request)  # by its old ids: not yet
    both.decode.retire()
    assert both.decode.request == PROMISED
    both.prefill.retire()
    both.check()


def test_blocks_of_a_dead_prefill_worker_can_be_taken(both: Scene) -> None:
    both.promise(PROMISED)
    group = both.group(OFFERED)
    both.prefill.die()
    assert both.take(group) is None
    both.prefill = both.join("prefill")
    assert both.prefill.owned >= set(OFFERED)
    both.check()


def test_a_worker_that_left_gives_nothing(both: Scene) -> None:
    both.promise(PROMISED)
    group = both.group(OFFERED)
    both.prefill.pool.close()
    assert isinstance(both.take(group), KvChanged)
    assert not bytes(both.decode.pool.view(BlockId(0))).strip(b"\0")
    both.prefill = both.join("prefill")
    both.check()


def test_one_that_leaves_past_the_gate_wipes_nothing_that_was_taken(
    both: Scene, monkeypatch
) -> None:
    monkeypatch.setattr(ownership, "LEAVE_TIMEOUT_S", 0.01)
    both.promise(PROMISED)
    both.prefill.pool.tensor()[[*PROMISED, 3]] = 7.0
    assert both.take(both.group(OFFERED)) is None
    other = os.open(f"/proc/self/fd/{both.fd}", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)  # one that joins, and does not run
    both.prefill.pool.close()
    os.close(other)
    assert (both.decode.pool.tensor()[PROMISED] == 7.0).all()
    assert (both.decode.pool.tensor()[3] == 0.0).all()
    both.prefill = both.join("prefill")
    both.check()


def test_the_engine_never_waits_for_another_process(both: Scene, monkeypatch) -> None:
    monkeypatch.setattr(ownership, "TAKE_TIMEOUT_S", WAIT_S)
    both.promise(PROMISED)
    group, decode, answers = both.group(OFFERED), both.decode, []
    at_gate, gate = threading.Event(), decode.pool.arena.gate

    def announced(**fields):
        at_gate.set()
        return gate(**fields)

    decode.pool.arena.gate = announced
    other = os.open(f"/proc/self/fd/{both.fd}", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)  # one that joins, and does not run
    taker = threading.Thread(target=lambda: answers.append(both.take(group)))
    taker.start()
    assert at_gate.wait(WAIT_S)
    decode.retire()
    assert not answers
    os.close(other)
    taker.join(WAIT_S)
    assert [type(answer) for answer in answers] == [KvChanged]
    assert decode.request == OFFERED
    both.check()


def test_whoever_finds_the_gate_closed_takes_nothing(both: Scene) -> None:
    both.promise(PROMISED)
    group = both.group(OFFERED)
    other = os.open(f"/proc/self/fd/{both.fd}", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert isinstance(both.take(group), KvChanged)
    os.close(other)
    assert both.take(group) is None


def test_blocks_that_were_not_taken_cost_one_look_at_all_offers(both: Scene, monkeypatch) -> None:
    looks, are_given = [], ownership.Ownership._are_given

    def counted(self, given_ids, block_ids):
        looks.append(len(given_ids))
        return are_given(self, given_ids, block_ids)

    both.promise([0, 1, 2, 3, 4])
    assert both.take(both.group([6, 7], num_held=3)) is None
    monkeypatch.setattr(ownership.Ownership, "_are_given", counted)
    both.prefill.retire()
    assert both.prefill.request == [0, 1, 2, 6, 7]
    assert len(looks) == 3  # what the hints say, all offers; then nothing is missing
    both.decode.follow()
    both.check()


# What becomes of both ends once one has died: in any order, with the other dying, too.
def _prefill_looks(both: Scene) -> None:
    both.prefill.retire()


def _prefill_dies(both: Scene) -> None:
    both.prefill.die()
    both.prefill = both.join("prefill")


def _decode_joins(both: Scene) -> None:
    both.decode = both.join("decode")


AFTERMATHS = [
    (_prefill_looks, _decode_joins),
    (_decode_joins, _prefill_looks),
    (_prefill_dies, _decode_joins),
    (_decode_joins, _prefill_dies),
    (_prefill_looks, _prefill_dies, _decode_joins),
]


def _die() -> None:
    raise Died


def _until_it_survives(play: Callable[[Scene, int], bool]) -> int:
    """Play with an event at access 0, 1, … until it comes no more. How many there were."""
    for number in range(1000):
        with scene() as both:
            both.promise(PROMISED)
            came = play(both, number)
            both.check()
        if not came:
            return number
    raise AssertionError("it never ends")


def _dies_in(worker: Worker, number: int, act: Callable[[], object]) -> bool:
    worker.step_by(at_access(number, _die))
    try:
        act()
    except Died:
        worker.die()
        return True
    return False


@pytest.mark.parametrize("aftermath", AFTERMATHS)
def test_decode_may_die_at_any_access_of_its_taking(aftermath) -> None:
    def play(both: Scene, number: int) -> bool:
        group = both.group(OFFERED)
        if not (came := _dies_in(both.decode, number, lambda: both.take(group))):
            both.decode.die()
        for act in aftermath:
            act(both)
        return came

    assert _until_it_survives(play) == NUM_ACCESSES


def test_prefill_may_give_up_at_any_access_of_decodes_taking() -> None:
    def play(both: Scene, number: int) -> bool:
        group, came = both.group(OFFERED), []

        def give_up() -> None:
            came.append(True)
            both.prefill.retire()
            both.prefill.pool.tensor()[both.prefill.request] = 1.0

        both.decode.step_by(at_access(number, give_up))
        error = both.take(group)
        if not came:
            both.prefill.retire()
        both.decode.follow()
        assert (both.decode.request == PROMISED) == (error is None)
        assert (both.prefill.request == PROMISED) == (error is not None)
        return bool(came)

    assert _until_it_survives(play) == NUM_ACCESSES


def test_decode_may_take_at_any_access_of_prefills_giving_up() -> None:
    def play(both: Scene, number: int) -> bool:
        group, came = both.group(OFFERED), []
        both.prefill.step_by(at_access(number, lambda: came.append(both.take(group))))
        both.prefill.retire()
        both.decode.follow()
        if came:
            assert (both.decode.request == PROMISED) == (came == [None])
        return bool(came)

    assert _until_it_survives(play) >= 3


@pytest.mark.parametrize("has_begun", range(NUM_ACCESSES))
def test_prefill_may_die_while_it_ends_what_a_dead_decode_worker_began(has_begun: int) -> None:
    def play(both: Scene, number: int) -> bool:
        group = both.group(OFFERED)
        has_died = _dies_in(both.decode, has_begun, lambda: both.take(group))
        assert has_died
        if came := _dies_in(both.prefill, number, both.prefill.retire):
            both.prefill = both.join("prefill")
        both.decode = both.join("decode")
        return came

    assert _until_it_survives(play) >= 3


@pytest.mark.parametrize("has_begun", range(NUM_ACCESSES))
def test_one_that_joins_may_die_at_any_access(has_begun: int, monkeypatch) -> None:
    def play(both: Scene, number: int) -> bool:
        group = both.group(OFFERED)
        assert _dies_in(both.decode, has_begun, lambda: both.take(group))
        on_access = at_access(number, _die)
        opened = Arena.open.__func__

        def open_stepped(cls, *args):
            arena = opened(cls, *args)
            arena.words = SteppedWords(arena.raw_words, on_access)
            return arena

        with monkeypatch.context() as patch:
            patch.setattr(Arena, "open", classmethod(open_stepped))
            try:
                both.decode = both.join("decode")
                came = False
            except Died:
                came = True
        if came:
            both.decode = both.join("decode")
        both.prefill.retire()
        return came

    assert _until_it_survives(play) > 20
