"""step(): the order of its parts, its events, and where every block is afterwards."""

import pytest
from engine_kit import BLOCK_SIZE, NUM_BLOCKS, indices, key, of, token_ids

from neuron_di.engine import Broken, Emitted, Ended, PrefillParked
from neuron_di.errors import (
    BackendLost,
    CapacityError,
    KvChanged,
    LocalProtocolError,
    TooLarge,
    WorkerFailed,
)
from neuron_di.request import RequestStatus

# Events


def test_one_request_from_prompt_to_end(make_rig):
    rig = make_rig("both", chunk=4)
    rig.engine.submit(rig.request("a", max_tokens=5))
    assert rig.turn(times=2) == []  # two of three chunks
    events = rig.turn_until_idle()
    assert indices(events) == [0, 1, 2, 3, 4]
    ended = events[-1]
    assert isinstance(ended, Ended)
    assert (ended.reason, ended.num_prompt, ended.num_generated) == ("length", 11, 5)
    assert ended.timing.prefill_s > 0
    assert ended.timing.decode_s > 0
    assert rig.engine.num_steps == 3 + 4


def test_events_of_many_requests_are_contiguous_and_end_once(make_rig):
    rig = make_rig("both")
    for n in range(6):
        rig.engine.submit(rig.request(f"r{n}", range(50, 55 + 3 * n), max_tokens=n + 1))
    events = rig.turn_until_idle()
    for n in range(6):
        mine = of(events, f"r{n}")
        assert indices(mine) == list(range(n + 1))
        assert [type(event) for event in mine] == [Emitted] * (n + 1) + [Ended]


def test_a_request_alone_and_in_company_gets_the_same_tokens(make_rig):
    alone, together = make_rig("both"), make_rig("both")
    for n in range(4):
        prompt = range(60 + n, 75 + 2 * n)
        alone.engine.submit(alone.request(f"r{n}", prompt, max_tokens=6))
        alone.turn_until_idle()
        together.engine.submit(together.request(f"r{n}", prompt, max_tokens=6))
    together.turn_until_idle()
    for n in range(4):
        assert token_ids(of(alone.events, f"r{n}")) == token_ids(of(together.events, f"r{n}"))


def test_the_first_token_may_be_the_last(make_rig):
    rig = make_rig("prefill")
    rig.engine.submit(rig.request("a", max_tokens=1))
    emitted, ended = rig.turn_until_idle()
    assert emitted.token.index == 0
    assert ended.reason == "length"
    assert rig.blocks.num_free == NUM_BLOCKS


def test_prefill_parks_with_its_blocks_and_release_frees_them(make_rig):
    rig = make_rig("prefill", chunk=100)
    request = rig.request("a")
    rig.engine.submit(request)
    emitted, parked = rig.turn()
    assert isinstance(emitted, Emitted)
    assert isinstance(parked, PrefillParked)
    assert parked.request.num_computed == 11
    block_ids = list(request.block_ids)
    assert len(block_ids) == -(-11 // BLOCK_SIZE)
    assert rig.backend.pool.generations(block_ids) == [0] * len(block_ids)
    rig.engine.release(key("a"))
    rig.engine.cancel(key("a"))
    assert rig.turn() == []
    assert request.status is RequestStatus.FINISHED
    assert rig.backend.pool.generations(block_ids) == [1] * len(block_ids)
    assert rig.scheduler.is_idle()


def test_what_decode_continues_is_what_one_engine_says(make_rig):
    """Prefill's blocks, copied to other places of another pool, give the same tokens."""
    whole, prefill, decode = make_rig("both"), make_rig("prefill"), make_rig("decode")
    whole.engine.submit(whole.request("a", range(90, 120), max_tokens=12))
    expected = token_ids(whole.turn_until_idle())
    source = prefill.request("a", range(90, 120), max_tokens=12)
    prefill.engine.submit(source)
    prefill.turn(times=10)
    decode.engine.submit(decode.received("other", prompt_ids=range(7), max_tokens=20))
    decode.turn()
    decode.engine.submit(
        decode.received("a", source.generated[0], prompt_ids=range(90, 120), max_tokens=12)
    )
    decode.turn()
    block_ids, token = decode.transfers["a"]
    assert block_ids[: len(source.block_ids)] != source.block_ids
    source_tensor = prefill.backend.pool.tensor()[source.block_ids]
    decode.backend.pool.tensor()[block_ids[: len(source.block_ids)]] = source_tensor
    token.complete()
    decode.turn(times=20)
    assert [source.generated[0], *token_ids(of(decode.events, "a"))] == expected
    assert indices(of(decode.events, "a")) == list(range(1, 12))


# Prefill beside transfers


def test_the_next_prefill_starts_while_the_last_is_transferred(make_rig):
    rig = make_rig("prefill", chunk=100, batch_size=3)
    for name in "abcd":
        rig.engine.submit(rig.request(name))
    for num_parked, name in enumerate("abc", start=1):
        assert [event.key for event in rig.turn()] == [key(name)] * 2
        assert rig.scheduler.num_transferring == num_parked
    assert rig.turn() == []  # the batch is full of parked prompts
    rig.engine.release(key("b"))
    assert [event.key for event in rig.turn()] == [key("d")] * 2


# Decode beside transfers


def test_decode_goes_on_while_a_transfer_is_pending_and_it_joins_the_next_step(make_rig):
    rig = make_rig("decode")
    rig.engine.submit(rig.received("a", max_tokens=20))
    rig.turn()
    assert list(rig.transfers) == ["a"]
    rig.complete("a")
    rig.engine.submit(rig.received("b", max_tokens=20))
    for index in range(1, 6):
        assert indices(rig.turn()) == [index]  # of "a" alone: b's KV is not here
    assert rig.engine.num_steps == 5
    rig.complete("b")
    events = rig.turn()
    assert indices(of(events, "a")) == [6]
    assert indices(of(events, "b")) == [1]


def test_without_a_free_slot_no_transfer_is_started(make_rig):
    rig = make_rig("decode", batch_size=1)
    rig.engine.submit(rig.received("a", max_tokens=3))
    rig.engine.submit(rig.received("b", max_tokens=3))
    rig.turn()
    rig.complete("a")
    rig.turn()
    assert rig.transfers == {}
    assert rig.scheduler.num_waiting == 1
    rig.turn(times=2)
    assert list(rig.transfers) == ["b"]


def test_a_failed_transfer_breaks_its_request_and_its_slot_is_taken_at_once(make_rig):
    rig = make_rig("decode", batch_size=1)
    rig.engine.submit(rig.received("a"))
    rig.engine.submit(rig.received("b"))
    rig.turn()
    error = KvChanged("changed")
    rig.complete("a", error)
    assert rig.turn() == [Broken(key("a"), error)]
    assert list(rig.transfers) == ["b"]  # in the same turn: nothing else would wake the engine


@pytest.mark.parametrize("error", [None, KvChanged("changed")])
def test_cancelled_during_its_transfer_blocks_are_kept_until_it_is_done(make_rig, error):
    rig = make_rig("decode", batch_size=1)
    rig.engine.submit(rig.received("a", max_tokens=20))
    rig.turn()
    held = set(rig.transfers["a"][0])
    num_held = len(held)
    rig.engine.cancel(key("a"))
    rig.engine.submit(rig.received("b", max_tokens=20))
    assert rig.turn() == []
    assert rig.blocks.num_free == NUM_BLOCKS - 2 * num_held
    assert not held & set(rig.transfers["b"][0])
    rig.complete("a", error)
    assert rig.turn() == []
    assert rig.blocks.num_free == NUM_BLOCKS - num_held


# Cancelling


@pytest.mark.parametrize("num_turns", range(6))
@pytest.mark.parametrize("role", ["both", "prefill"])
def test_cancelled_after_any_step_there_is_no_further_event_and_no_block_lost(
    make_rig, role, num_turns
):
    rig = make_rig(role, chunk=4)
    request = rig.request("a", max_tokens=8)
    rig.engine.submit(request)
    rig.turn(times=num_turns)
    block_ids = list(request.block_ids)
    rig.engine.cancel(key("a"))
    rig.engine.cancel(key("a"))
    if role == "prefill":
        rig.engine.release(key("a"))
    assert rig.turn(times=3) == []
    assert rig.scheduler.is_idle()
    assert rig.blocks.num_free == NUM_BLOCKS
    assert set(rig.backend.pool.generations(block_ids)) <= {1}


def test_cancelled_before_it_starts_it_computes_nothing(make_rig):
    rig = make_rig("both")
    rig.engine.submit(rig.request("a"))
    rig.engine.cancel(key("a"))
    rig.engine.cancel(key("never heard of"))
    assert rig.turn(times=2) == []
    assert rig.engine.num_steps == 0


def test_attempts_of_one_request_are_told_apart(make_rig):
    rig = make_rig("both")
    rig.engine.submit(rig.request("a", attempt=0))
    rig.engine.submit(rig.request("a", attempt=1))
    rig.engine.cancel(key("a", 0))
    events = rig.turn_until_idle()
    assert {event.key for event in events} == {key("a", 1)}


def test_a_key_may_be_used_again_once_it_is_over(make_rig):
    rig = make_rig("both")
    for _ in range(2):
        rig.engine.submit(rig.request("a"))
        assert isinstance(rig.turn_until_idle()[-1], Ended)


# Refusals and failures


def test_refused_requests_end_with_their_reason(make_rig):
    rig = make_rig("both")
    rig.engine.submit(rig.request("huge", range(NUM_BLOCKS * BLOCK_SIZE)))
    rig.engine.submit(rig.request("a"))
    rig.engine.submit(rig.request("a"))
    for n in range(8):
        rig.engine.submit(rig.request(f"r{n}"))
    events = rig.turn_until_idle()
    broken = {event.key[0]: type(event.error) for event in events if isinstance(event, Broken)}
    assert broken == {"huge": TooLarge, "a": LocalProtocolError, "r7": CapacityError}
    assert len([event for event in events if isinstance(event, Ended)]) == 8


def decoding(make_rig, names, **fields):
    """A rig in whose next turn these are decoded together."""
    rig = make_rig("decode")
    for name in names:
        rig.engine.submit(rig.received(name, **fields))
    rig.turn()
    for name in names:
        rig.complete(name)
    rig.turn()
    rig.backend.batches.clear()
    return rig


def test_a_request_that_fails_the_step_of_others_ends_alone(make_rig):
    undisturbed = decoding(make_rig, "abc", max_tokens=10)
    undisturbed.turn_until_idle()
    rig = decoding(make_rig, "abc", max_tokens=10)
    rig.backend.culprits = {"b"}
    events = rig.turn()
    assert rig.backend.batches == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    (broken,) = [event for event in events if isinstance(event, Broken)]
    assert broken.key == key("b")
    assert isinstance(broken.error, WorkerFailed)
    assert "out of luck" not in str(broken)
    rig.turn_until_idle()
    for name in "ac":
        assert said(of(rig.events, name)) == said(of(undisturbed.events, name))
        assert isinstance(of(rig.events, name)[-1], Ended)


def said(events):
    return [event.token for event in events if isinstance(event, Emitted)]


def test_a_step_that_fails_once_costs_nobody_anything(make_rig):
    rig = decoding(make_rig, "ab", max_tokens=10)
    rig.backend.failures.append(RuntimeError("out of luck"))
    events = rig.turn()
    assert [type(event) for event in events] == [Emitted, Emitted]
    assert rig.backend.batches == [["a", "b"], ["a"], ["b"]]


def test_where_every_step_fails_everybody_is_told(make_rig):
    rig = decoding(make_rig, "ab", max_tokens=10)
    rig.engine.submit(rig.received("c", max_tokens=3))
    rig.turn()
    rig.backend.culprits = {"a", "b"}
    assert [event.key for event in rig.turn()] == [key("a"), key("b")]
    rig.complete("c")
    assert isinstance(rig.turn_until_idle()[-1], Ended)


def test_a_lost_backend_is_not_tried_again(make_rig):
    rig = decoding(make_rig, "ab", max_tokens=10)
    rig.backend.failures.append(BackendLost("gone"))
    assert [type(event.error) for event in rig.turn()] == [WorkerFailed, WorkerFailed]
    assert len(rig.backend.batches) == 1
    assert rig.engine.has_failed


def test_where_nothing_can_be_drawn_the_host_chooses(make_rig, monkeypatch):
    undisturbed = decoding(make_rig, "ab", max_tokens=5)
    undisturbed.turn_until_idle()
    rig = decoding(make_rig, "ab", max_tokens=5)
    drawn = []

    def draw(logits_BV, requests):
        drawn.append(len(requests))
        raise RuntimeError("out of luck")

    monkeypatch.setattr(rig.backend, "draw", draw)
    rig.turn_until_idle()
    for name in "ab":
        assert said(of(rig.events, name)) == said(of(undisturbed.events, name))
    assert drawn


def test_a_failing_chunk_breaks_its_own_request_only(make_rig):
    rig = make_rig("both", chunk=4)
    rig.engine.submit(rig.request("a", max_tokens=3))
    rig.turn(times=3)
    rig.engine.submit(rig.request("b"))
    rig.turn()
    rig.backend.failures.append(RuntimeError("out of luck"))
    (broken,) = rig.turn()
    assert broken.key == key("b")
    events = rig.turn_until_idle()
    assert isinstance(of(events, "a")[-1], Ended)


def test_logits_that_are_no_numbers_break_their_own_request_only(make_rig):
    rig = make_rig("both", chunk=100)
    for name in "abc":
        rig.engine.submit(rig.request(name, max_tokens=4))
    rig.turn(times=3)
    rig.backend.spoilt_rows.append(1)
    events = rig.turn_until_idle()
    (broken,) = [event for event in events if isinstance(event, Broken)]
    assert broken.key == key("b")
    for name in "ac":
        assert indices(of(rig.events, name)) == [0, 1, 2, 3]
