"""Which KV is found and which is not, and what is kept."""

import pytest
from core_kit import make_request
from prefix_kit import CHUNK, Worker, ids, make_combined, make_prefill

from neuron_di.core import PrefillChunk
from neuron_di.errors import LocalProtocolError
from neuron_di.request import PromptWish


@pytest.fixture
def worker() -> Worker:
    return Worker()


# What is found


def test_a_prompt_that_begins_alike_is_computed_from_there_on(worker):
    assert worker.ask(ids("abc")) == 0
    assert worker.spans == [(0, 8, False), (8, 16, False), (16, 24, False), (24, 25, False)]
    assert worker.ask(ids("abd", 5)) == 16
    assert worker.spans == [(0, 8, True), (8, 16, True), (16, 24, False), (24, 29, False)]
    assert worker.ask(ids("abc")) == worker.ask(ids("abd")) == 24


def test_what_is_found_is_what_was_kept_for_these_positions(worker):
    worker.ask(ids("ab"))
    kept = [tuple(targets) for _, targets in worker.copies if targets]
    again = worker.start(make_request("b", prompt_ids=ids("ab")))
    assert [worker.step(again).reused for _ in range(3)] == [*kept, ()]
    assert not {block for piece in kept for block in piece} & set(again.block_ids)


@pytest.mark.parametrize(
    ("prompt_ids", "num_found"),
    [
        (ids("hab"), 0),  # at other positions
        (ids("cb"), 0),  # other ids before the same piece
        (ids("acb"), 8),
        ([*ids("a", 0), 99], 8),
        ([*ids("a", 0)[:-1], 50, 99], 0),  # another last id
        ([50, *ids("a", 0)[1:], 99], 0),  # another first id
        (ids("a", 0)[:-1], 0),  # less than a piece
        (ids("", 5), 0),
        (ids("ab", 0) + [50] * 7, 16),
    ],
)
def test_a_piece_is_found_behind_the_same_ids_only(worker, prompt_ids, num_found):
    worker.ask(ids("ab"))
    assert worker.ask(prompt_ids) == num_found


def test_ids_are_not_joined_across_their_borders():
    """As bytes or text, other ids could look the same."""
    worker = Worker(block_size=2, chunk_tokens=2)
    worker.ask([1, 23, 9])
    for other in ([12, 3, 9], [23, 1, 9], [1 + (23 << 32), 0, 9], [257, 23, 9], [1, 23 << 8, 9]):
        assert worker.ask(other) == 0
    assert worker.ask([1, 23, 9]) == 2


def test_another_scope_finds_nothing(worker):
    """Nor can a scope be chosen so that it is taken for another's first ids."""
    worker.ask(ids("ab"), scope="one")
    for scope in ("", "two", "on", "one\0", "ONE"):
        assert worker.ask(ids("ab"), scope=scope) == 0
    assert worker.ask(ids("ab"), scope="one") == 16


@pytest.mark.parametrize("first_length", [8, 9, 15])
@pytest.mark.parametrize(
    ("length", "num_found"), [(7, 0), (8, 0), (9, 8), (15, 8), (16, 8), (17, 8)]
)
def test_the_last_position_is_computed_in_any_case(worker, first_length, length, num_found):
    """Its logits are the next token's. So a prompt of whole pieces computes its last piece."""
    worker.ask(ids("ab", 0)[:first_length])
    assert worker.ask(ids("ab", 9)[:length]) == num_found
    assert not worker.spans[-1][-1]


def test_a_prompt_of_whole_pieces_is_kept_to_its_end(worker):
    worker.ask(ids("ab", 0))
    assert worker.ask(ids("ab", 0)) == 8
    assert worker.ask(ids("ab", 1)) == 16


def test_given_tokens_are_computed_as_they_were_and_the_prompt_is_found(worker):
    """Here the last piece of a prompt may be found, as tokens follow that are computed."""
    worker.ask(ids("ab", 0))
    assert worker.ask(ids("ab", 0), num_given=20) == 16
    assert worker.spans[:3] == [(0, 8, True), (8, 16, True), (16, 24, False)]
    assert worker.spans[3:] == [(24, 32, False), (32, 36, False)]


def test_given_tokens_are_never_kept():
    """A replay's KV is what decode steps make: other bits than a prompt's."""
    worker = Worker(num_blocks=64)
    request = make_request("a", prompt_ids=ids("", 4), num_given=60)
    assert worker.run(request) == 0
    assert worker.ask(ids("a", 0), num_given=24) == 0
    assert worker.pool.num_kept == 2
    given = request.token_ids(0, 64)
    assert worker.ask(given) == 0
    assert worker.ask(ids("a", 0) + [7] * 24) == 8


def test_a_prompt_whose_logits_are_all_asked_for_finds_nothing_and_is_kept(worker):
    for num_found in (0, 0):
        request = make_request("a", prompt_ids=ids("ab"))
        request.prompt_wish = PromptWish("", 0)
        assert worker.run(request) == num_found
    assert worker.ask(ids("ab")) == 16
    request = make_request("a", prompt_ids=ids("ab"))
    request.prompt_wish = PromptWish("text and ids only")
    assert worker.run(request) == 16


def test_kv_that_is_computed_already_is_not_looked_for(worker):
    """A piece that came to be kept in the midst of it, and a start within a piece."""
    worker.ask(ids("ab"))
    request = make_request("a", prompt_ids=ids("ab"))
    request.num_computed = 4
    assert worker.cache.next_of(request) is None
    request.num_computed = 8
    assert worker.cache.next_of(request).start == 8
    request.num_computed = 16
    assert worker.cache.next_of(request) is None


@pytest.mark.parametrize(
    ("block_size", "chunk_tokens", "piece_tokens"),
    [(4, 6, 12), (6, 4, 12), (4, 1, 4), (1, 5, 5), (3, 7, 21), (16, 8, 16), (2, 1, 2)],
)
def test_a_piece_ends_where_a_block_and_a_chunk_end(block_size, chunk_tokens, piece_tokens):
    worker = Worker(200, block_size, chunk_tokens)
    prompt = list(range(2 * piece_tokens + 1))
    assert worker.ask(prompt) == 0
    chunks = [(start, start + chunk_tokens) for start in range(0, len(prompt), chunk_tokens)]
    assert [span[:2] for span in worker.spans][:-1] == chunks[:-1]
    sizes = [len(targets) * block_size for _, targets in worker.copies if targets]
    assert sizes == [piece_tokens] * 2
    assert [index for index, (_, targets) in enumerate(worker.copies) if targets] == [
        number * piece_tokens // chunk_tokens - 1 for number in (1, 2)
    ]
    assert worker.ask(prompt[:-1]) == piece_tokens
    assert worker.ask(prompt[:piece_tokens]) == 0
    assert worker.ask(prompt) == 2 * piece_tokens


def test_behind_a_hole_pieces_are_found_again(worker):
    """Which the computed piece fills."""
    worker.ask(ids("abc"))
    worker.pool.free(worker.pool.allocate(worker.pool.num_unused + 1))
    assert worker.found("abc") == "bc"
    assert worker.ask(ids("abc")) == 16
    assert worker.spans == [(0, 8, False), (8, 16, True), (16, 24, True), (24, 25, False)]
    assert worker.ask(ids("abc")) == 24


# What is kept


def test_copies_are_of_the_requests_own_blocks(worker):
    request = worker.start(make_request("a", prompt_ids=ids("abc")))
    own = list(request.block_ids)
    seen: list[int] = []
    for number in range(3):
        worker.step(request)
        sources, targets = worker.copies[-1]
        assert sources == own[2 * number : 2 * number + 2]
        assert len(targets) == 2
        assert not set(targets) & {*own, *seen}
        seen += targets
    worker.step(request)
    assert worker.copies[-1] == ([], [])
    assert request.block_ids == own
    assert (worker.pool.num_kept, worker.pool.num_free) == (6, 32 - 7)


def test_what_is_told_is_a_list_of_the_callers_own(worker):
    request = worker.start(make_request("a", prompt_ids=ids("a")))
    worker.step(request)
    for listed in worker.copies[-1]:
        listed.clear()
    worker.check()


def test_what_is_kept_already_is_not_kept_again(worker):
    """Also where it was computed, as for a prompt whose last piece it is."""
    worker.ask(ids("ab"))
    kept = worker.pool.num_kept
    for prompt_ids in (ids("ab"), ids("ab", 0)):
        worker.ask(prompt_ids)
        assert [targets for _, targets in worker.copies if targets] == []
    assert worker.pool.num_kept == kept


def test_a_piece_whose_copy_failed_is_forgotten(worker):
    request = worker.start(make_request("a", prompt_ids=ids("ab")))
    worker.step(request)
    chunk = PrefillChunk.next_of(request, CHUNK)
    assert worker.cache.keep(chunk)[1]
    worker.cache.forget_piece(chunk)
    assert worker.found("ab") == "a"
    assert worker.pool.num_kept == 2
    worker.end(request)
    assert worker.ask(ids("ab")) == 8
    assert worker.ask(ids("ab")) == 16


# Its books


def test_check_integrity_finds_a_piece_that_lacks_a_block(worker):
    worker.ask(ids("a"))
    (piece,) = worker.cache.owned()
    worker.pool.let_go([piece.pop()])
    worker.pool.check_integrity([], worker.cache.owned())
    with pytest.raises(LocalProtocolError, match="lacks"):
        worker.cache.check_integrity()


@pytest.mark.parametrize("make", [make_prefill, make_combined])
def test_a_scheduler_counts_what_is_kept_and_checks_it(worker, make):
    scheduler = make(worker)
    worker.ask(ids("ab"))
    count = scheduler.count_blocks()
    assert (count.total, count.free, count.cached) == (32, 28, 4)
    assert scheduler.is_idle()
    scheduler.check_integrity()
    piece = next(iter(worker.cache.owned()))
    lost = piece.pop()
    with pytest.raises(LocalProtocolError):
        scheduler.check_integrity()
    worker.pool.let_go([lost])
    with pytest.raises(LocalProtocolError, match="lacks"):
        scheduler.check_integrity()


@pytest.mark.parametrize("make", [make_prefill, make_combined])
def test_a_scheduler_plans_what_is_found_and_then_the_rest(worker, make):
    worker.ask(ids("ab"))
    scheduler = make(worker)
    request = make_request("a", prompt_ids=ids("abc"))
    scheduler.add(request)
    spans = []
    while request.num_computed < request.num_prefilled:
        chunk = scheduler.schedule()
        assert scheduler.schedule() == chunk
        scheduler.check_integrity()
        spans.append((chunk.start, chunk.end, len(chunk.reused), chunk.is_last))
        chunk.mark_computed()
    assert spans == [(0, 8, 2, False), (8, 16, 2, False), (16, 24, 0, False), (24, 25, 0, True)]
    assert request.num_cached == 16
