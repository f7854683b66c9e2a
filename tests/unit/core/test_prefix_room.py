"""Which kept KV gives way, and to whom."""

import pytest
from core_kit import make_request
from prefix_kit import Worker, ids, make_combined, make_prefill


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_what_was_not_used_for_longest_goes_first():
    worker = Worker(num_blocks=12)  # three pieces besides a prompt of one
    for piece in "abcd":
        worker.ask(ids(piece))
    assert [worker.found(piece) for piece in "abcd"] == ["a", "b", "c", "d"]
    worker.ask(ids("a"))
    worker.ask(ids("e"))
    assert [worker.found(piece) for piece in "abcde"] == ["a", "", "c", "d", "e"]
    worker.ask(ids("c", 0))  # it finds nothing, and is about the piece all the same
    worker.ask(ids("f"))
    assert [worker.found(piece) for piece in "acdef"] == ["a", "c", "", "e", "f"]


def test_a_piece_that_is_found_is_used_though_nobody_started(worker):
    """The scheduler asks before every chunk, and others may have been kept since the start."""
    worker.ask(ids("a"))
    request = worker.start(make_request("a", prompt_ids=ids("a")))
    worker.ask(ids("b"))
    assert worker.cache.next_of(request) is not None
    worker.pool.allocate(worker.pool.num_unused + 1)
    assert (worker.found("a"), worker.found("b")) == ("a", "")


def test_who_starts_takes_the_blocks_of_what_it_cannot_use():
    """Its own beginning is the oldest, and stays."""
    worker = Worker(num_blocks=8)
    worker.ask(ids("a"))
    worker.ask(ids("b"))
    assert worker.pool.num_unused == 4
    assert worker.ask(ids("a", 9)) == 8
    assert (worker.found("a"), worker.found("b")) == ("a", "")


def test_pieces_of_the_request_itself_stay_where_there_is_no_room():
    """Its beginning is of use to more prompts than its end."""
    worker = Worker(num_blocks=13)  # nine for the prompt
    worker.ask(ids("h"))
    assert worker.ask(ids("abcd")) == 0
    assert worker.found("abcd") == "ab"
    assert worker.found("h") == ""
    assert worker.ask(ids("abcd")) == 16


def test_no_more_goes_than_a_piece_needs():
    worker = Worker(num_blocks=12)
    for piece in "abcd":
        worker.ask(ids(piece))
    assert worker.pool.num_unused == 4
    worker.pool.allocate(4)
    worker.pool.allocate(1)  # of which one piece has two
    assert "".join(worker.found(piece) for piece in "abcd") == "bcd"
    worker.pool.allocate(1)
    assert "".join(worker.found(piece) for piece in "abcd") == "bcd"
    worker.pool.allocate(3)
    assert "".join(worker.found(piece) for piece in "abcd") == "d"
    assert (worker.pool.num_free, worker.pool.num_kept) == (3, 2)


@pytest.mark.parametrize("num_blocks", [3, 4])
def test_a_pool_that_has_no_room_keeps_nothing(num_blocks):
    worker = Worker(num_blocks)
    for _ in range(2):
        assert worker.ask(ids("a")) == 0
        assert worker.pool.num_kept == 0
    assert worker.pool.num_free == num_blocks


def test_a_pool_of_no_piece_is_good_for_shorter_prompts():
    worker = Worker(num_blocks=3, block_size=4, chunk_tokens=16)
    assert worker.ask([1] * 12) == worker.ask([1] * 12) == 0


def test_all_blocks_can_be_taken_at_any_time(worker):
    worker.ask(ids("abc"))
    assert worker.pool.num_kept == 6
    taken = worker.pool.allocate(32)
    assert sorted(taken) == list(range(32))
    assert list(worker.cache.owned()) == []
    worker.pool.free(taken)
    assert worker.ask(ids("abc")) == 0
    assert worker.ask(ids("abc")) == 24


@pytest.mark.parametrize("make", [make_prefill, make_combined])
def test_a_scheduler_starts_a_request_in_the_blocks_of_what_it_cannot_use(make):
    worker = Worker(num_blocks=8)
    worker.ask(ids("a"))
    worker.ask(ids("b"))
    scheduler = make(worker)
    request = make_request("a", prompt_ids=ids("a", 9), max_tokens=1)
    scheduler.add(request)
    assert scheduler.schedule().reused
    assert (worker.found("a"), worker.found("b")) == ("a", "")
    scheduler.check_integrity()
