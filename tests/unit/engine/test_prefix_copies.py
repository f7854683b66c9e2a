"""Prompts that begin alike are answered as if nothing had been kept, and compute less."""

import pytest
from engine_kit import NUM_BLOCKS, indices, key, of, token_ids

from neuron_di.core import BlockCount
from neuron_di.engine import Broken, Emitted, Ended, PrefillParked
from neuron_di.errors import BackendLost, Preempted, WorkerFailed
from neuron_di.request import PromptWish

CHUNK = 8  # and a piece, of two blocks
PROMPT = range(100, 119)  # two pieces, and three ids
LOST = BackendLost("rank 1 was ended by signal 9")
roles = pytest.mark.parametrize("role", ["prefill", "both"])


@pytest.fixture
def make_keeping(make_rig):
    return lambda role, **options: make_rig(role, keeps_prefixes=True, chunk=CHUNK, **options)


def forget_all_but_kept(rig):
    """What requests left in their blocks must be of no use to the next that gets these."""
    kept = [] if rig.prefixes is None else [block for ids in rig.prefixes.owned() for block in ids]
    others = [block for block in range(NUM_BLOCKS) if block not in kept]
    rig.backend.pool.tensor()[others] = float("nan")


def run(rig, request):
    """All events of a request that runs alone; where it is parked, it is released."""
    forget_all_but_kept(rig)
    before = len(rig.events)
    rig.engine.submit(request)
    for _ in range(200):
        if any(isinstance(event, PrefillParked) for event in rig.turn()):
            rig.engine.release(request.key)
        if rig.scheduler.is_idle() and rig.events[before:]:
            break
    assert rig.scheduler.is_idle()
    assert rig.blocks.num_free == rig.blocks.num_blocks
    return rig.events[before:]


def num_kept(rig):
    return len(list(rig.prefixes.owned()))


@roles
def test_the_beginning_is_copied_the_rest_computed_and_the_answer_the_same(
    make_rig, make_keeping, role
):
    plain, rig = make_rig(role, chunk=CHUNK), make_keeping(role)
    for name in "ab":
        expected = token_ids(run(plain, plain.request(name, PROMPT, logprobs=3)))
        request = rig.request(name, PROMPT, logprobs=3)
        assert token_ids(run(rig, request)) == expected
        assert request.num_cached == (16 if name == "b" else 0)
    assert of(rig.events, "b")[0].token == of(plain.events, "b")[0].token  # logprobs bit for bit
    assert rig.backend.computed == [("a", 0, 8), ("a", 8, 16), ("a", 16, 19), ("b", 16, 19)]
    assert len(rig.backend.copies) == 4


def test_what_was_found_is_told_at_the_end(make_keeping):
    rig = make_keeping("both")
    for name, num_cached in (("a", 0), ("b", 16)):
        ended = run(rig, rig.request(name, PROMPT))[-1]
        assert (ended.num_prompt, ended.num_cached) == (19, num_cached)
    ended = run(rig, rig.request("c", range(100, 116)))[-1]  # the last piece is computed
    assert (ended.num_prompt, ended.num_cached) == (16, 8)
    request = rig.request("d", PROMPT)
    request.cache_scope = "another tenant"
    assert run(rig, request)[-1].num_cached == 0


def test_on_a_prefill_worker_it_is_told_when_it_parks_or_ends(make_keeping):
    rig = make_keeping("prefill")
    run(rig, rig.request("a", PROMPT))
    parked = run(rig, rig.request("b", PROMPT))[-1]
    assert parked.request.num_cached == 16
    ended = run(rig, rig.request("c", PROMPT, max_tokens=1))[-1]
    assert (type(ended), ended.num_cached) == (Ended, 16)


def test_parked_kv_is_the_requests_own_and_bit_for_bit_what_is_computed(make_rig, make_keeping):
    plain, rig = make_rig("prefill", chunk=CHUNK), make_keeping("prefill")
    run(rig, rig.request("first", PROMPT))
    found = {}
    for name, worker in (("plain", plain), ("copied", rig)):
        forget_all_but_kept(worker)
        request = worker.request(name, PROMPT)
        worker.engine.submit(request)
        worker.turn(times=4)
        assert worker.scheduler.num_transferring == 1
        blocks = worker.backend.pool.tensor()[request.block_ids].clone()
        found[name] = blocks[:, :, :, :, : 19 % 4].reshape(-1), blocks[:-1].reshape(-1)
        kept = [] if worker.prefixes is None else worker.prefixes.owned()
        assert not set(request.block_ids) & {block for piece in kept for block in piece}
    for plainly, copied in zip(*found.values(), strict=True):
        assert plainly.equal(copied)
    assert rig.engine.blocks == BlockCount(
        total=NUM_BLOCKS, free=NUM_BLOCKS - 9, parked=5, cached=4
    )
    rig.engine.cancel(key("copied"), "error")
    rig.turn()
    assert num_kept(rig) == 2


@roles
def test_the_layers_of_a_copied_piece_are_told_when_all_are_there(make_keeping, role):
    rig = make_keeping(role)
    run(rig, rig.request("a", PROMPT))
    told, watched = [], []

    def watch(chunk):
        watched.append((chunk.start, chunk.end))

        def after_layer(layer, blocks):
            if chunk.reused:
                pool = rig.backend.pool.tensor()
                assert pool[list(blocks)].equal(pool[list(chunk.reused)])
            told.append((chunk.start, layer, list(blocks)))

        return after_layer

    rig.engine.watch_layers = watch
    forget_all_but_kept(rig)
    request = rig.request("b", PROMPT)
    rig.engine.submit(request)
    rig.turn()
    own = list(request.block_ids)
    rig.turn(times=2)
    assert watched[:3] == [(0, 8), (8, 16), (16, 19)]
    num_layers = rig.backend.layout.num_layers
    spans = [(0, own[:2]), (8, own[2:4]), (16, own[4:5])]
    assert told == [(start, n, blocks) for start, blocks in spans for n in range(num_layers)]


def test_nobody_who_watches_is_no_trouble(make_keeping):
    rig = make_keeping("both")
    rig.engine.watch_layers = lambda _: None
    for name in "ab":
        assert isinstance(run(rig, rig.request(name, PROMPT))[-1], Ended)


# Copies that fail


@roles
@pytest.mark.parametrize("num_before", [0, 1])
def test_a_piece_that_cannot_be_kept_fails_its_request_alone(make_keeping, role, num_before):
    rig = make_keeping(role)
    rig.backend.copy_failures = [MemoryError("out of luck"), *[None] * num_before]
    (broken,) = run(rig, rig.request("a", PROMPT))
    assert (broken.key, type(broken.error)) == (key("a"), WorkerFailed)
    assert "out of luck" not in str(broken)
    assert num_kept(rig) == rig.engine.blocks.cached == 0
    for name, num_found in (("b", 0), ("c", 16)):
        request = rig.request(name, PROMPT)
        assert isinstance(run(rig, request)[0], Emitted)
        assert request.num_cached == num_found


@roles
def test_a_piece_that_cannot_be_copied_from_fails_its_request_and_goes(make_keeping, role):
    rig = make_keeping(role)
    run(rig, rig.request("other", range(200, 209)))
    first = token_ids(run(rig, rig.request("a", PROMPT)))
    rig.backend.copy_failures = [MemoryError("out of luck")]
    (broken,) = run(rig, rig.request("b", PROMPT))
    assert isinstance(broken.error, WorkerFailed)
    assert num_kept(rig) == 1, "the other prompt's"
    again = rig.request("b", PROMPT, attempt=1)
    assert token_ids(run(rig, again)) == first
    assert again.num_cached == 0


@roles
def test_kv_that_is_spoilt_fails_one_request_and_is_not_found_again(make_keeping, role):
    rig = make_keeping(role)
    first = token_ids(run(rig, rig.request("a", PROMPT)))
    for block_ids in rig.prefixes.owned():
        rig.backend.pool.tensor()[block_ids] = float("nan")
    (broken,) = run(rig, rig.request("b", PROMPT))
    assert isinstance(broken.error, WorkerFailed)
    again = rig.request("b", PROMPT, attempt=1)
    assert token_ids(run(rig, again)) == first
    assert again.num_cached == 0


def test_those_who_decode_meanwhile_go_on(make_keeping):
    rig = make_keeping("both")
    rig.engine.submit(rig.request("a", PROMPT, max_tokens=12))
    rig.turn(times=5)
    rig.backend.copy_failures = [MemoryError("out of luck")]
    rig.engine.submit(rig.request("b", range(200, 219)))
    events = rig.turn_until_idle()
    assert [type(event) for event in of(events, "b")] == [Broken]
    assert indices(of(rig.events, "a")) == list(range(12))


@pytest.mark.parametrize("is_reused", [False, True], ids=["kept", "reused"])
def test_a_device_that_is_lost_at_a_copy_ends_the_engine(make_keeping, is_reused):
    rig = make_keeping("both")
    if is_reused:
        run(rig, rig.request("first", PROMPT))
    failures = []
    rig.engine._on_failure = lambda: failures.append(True)
    rig.engine.submit(rig.request("decodes", range(50, 55), max_tokens=20))
    rig.engine.turn(block=False)
    rig.backend.copy_failures = [LOST]
    rig.engine.submit(rig.request("a", PROMPT))
    rig.engine.turn(block=False)
    assert rig.engine.has_failed
    assert failures == [True]
    broken = [event for event in rig.events if isinstance(event, Broken)]
    assert {event.key for event in broken} == {key("decodes"), key("a")}
    assert {type(event.error) for event in broken} == {WorkerFailed}


def test_a_prompt_that_is_cancelled_between_its_pieces_leaves_them(make_keeping):
    rig = make_keeping("both")
    rig.engine.submit(rig.request("a", PROMPT))
    rig.turn()
    rig.engine.cancel(key("a"))
    rig.turn()
    assert rig.scheduler.is_idle()
    assert num_kept(rig) == 1
    assert run(rig, rig.request("b", PROMPT))[-1].num_cached == 8


# What is asked for, and what is known


def test_prompt_logprobs_ask_for_everything_computed(make_rig, make_keeping):
    plain, rig = make_rig("both", chunk=CHUNK), make_keeping("both")
    run(rig, rig.request("first", PROMPT))
    rig.backend.computed.clear()
    reports = []
    for worker in (plain, rig):
        request = worker.request("a", PROMPT)
        request.prompt_wish = PromptWish("text", 2)
        reports.append(run(worker, request)[0].token)
        assert request.num_cached == 0
    assert reports[0] == reports[1]
    assert len(reports[1].prompt.logprobs) == 19
    assert rig.backend.computed == [("a", 0, 8), ("a", 8, 16), ("a", 16, 19)]
    request = rig.request("b", PROMPT)
    request.prompt_wish = PromptWish("text")  # which asks for no logits
    token = run(rig, request)[0].token
    assert token.prompt.token_ids == list(PROMPT)
    assert request.num_cached == 16


@pytest.mark.parametrize("num_prompt", [16, 19])
def test_a_continued_attempt_finds_its_prompt_and_says_the_same(make_rig, make_keeping, num_prompt):
    plain, rig = make_rig("both", chunk=CHUNK), make_keeping("both")
    prompt = PROMPT[:num_prompt]
    expected = token_ids(run(plain, plain.request("a", prompt, max_tokens=30)))
    run(rig, rig.request("a", prompt, max_tokens=30))
    rig.backend.computed.clear()
    again = rig.request("a", prompt, attempt=1, given=expected[:21], max_tokens=30)
    events = run(rig, again)
    assert token_ids(events) == expected[21:]
    assert indices(events) == list(range(21, 30))
    assert events[-1].num_cached == 16
    assert min(start for _, start, _ in rig.backend.computed) == 16
    assert num_kept(rig) == 2  # nothing of what was given


def test_many_in_little_memory_are_answered_as_each_alone(make_rig, make_keeping):
    """Kept blocks go to whoever needs them, and requests that give way come again."""
    prompts = {f"r{n}": [*PROMPT[: 8 * (n % 3)], *range(40 + n, 46 + n)] for n in range(9)}
    alone = make_rig("both", chunk=CHUNK)
    expected = {
        name: token_ids(run(alone, alone.request(name, ids, max_tokens=20)))
        for name, ids in prompts.items()
    }
    rig = make_keeping("both", reserve=4, num_blocks=18)
    given = {name: [] for name in prompts}
    to_submit, ended, num_preempted = list(prompts), [], 0
    for attempt in range(900):
        if to_submit and rig.scheduler.num_waiting < 6:
            name = to_submit.pop(0)
            fields = {"given": given[name], "max_tokens": 20, "age_order": int(name[1:])}
            rig.engine.submit(rig.request(name, prompts[name], attempt, **fields))
        for event in rig.turn():
            name = event.key[0]
            if isinstance(event, Emitted):
                assert event.token.index == len(given[name])
                given[name].append(event.token.token_id)
            elif isinstance(event, Ended):
                ended.append(event)
            else:
                assert isinstance(event.error, Preempted)
                to_submit.append(name)
                num_preempted += 1
        if len(ended) == len(prompts):
            break
    assert given == expected
    assert num_preempted > 0
    assert any(event.num_cached for event in ended)
    assert rig.blocks.num_free == 18
