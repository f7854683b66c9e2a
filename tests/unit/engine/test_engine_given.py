"""Requests that go on from given tokens, and blocks that outlive their request."""

import pytest
from engine_kit import BLOCK_SIZE, NUM_BLOCKS, indices, key, token_ids

from neuron_di.core import BlockCount
from neuron_di.engine import Ended
from neuron_di.errors import (
    RemoteProtocolError,
)


def test_given_tokens_are_not_said_again(make_rig):
    """Their KV is computed in chunks of its own, and indices go on behind them."""
    whole, rig = make_rig("both"), make_rig("both", chunk=4)
    whole.engine.submit(whole.request("a", max_tokens=12))
    expected = token_ids(whole.turn_until_idle())
    rig.engine.submit(rig.request("a", max_tokens=12, given=expected[:5]))
    events = rig.turn_until_idle()
    assert indices(events) == list(range(5, 12))
    assert token_ids(events) == expected[5:]
    assert rig.engine.num_steps == 3 + 2 + 6  # prompt, replay, decode
    assert (events[-1].num_prompt, events[-1].num_generated) == (11, 12)
    assert min(events[-1].timing.prefill_s, events[-1].timing.decode_s) > 0


def test_a_continued_request_that_ends_with_its_next_token_was_in_prefill_all_the_time(make_rig):
    rig = make_rig("prefill")
    rig.engine.submit(rig.request("a", max_tokens=4, given=[5, 6, 7]))
    emitted, ended = rig.turn_until_idle()
    assert emitted.token.index == 3
    assert ended.timing.prefill_s > 0
    assert ended.timing.decode_s == 0


def test_prefill_parks_the_kv_of_given_tokens_too(make_rig):
    rig = make_rig("prefill", chunk=100)
    request = rig.request("a", max_tokens=9, given=[5, 6, 7])
    rig.engine.submit(request)
    emitted, parked = rig.turn(times=2)
    assert emitted.token.index == 3
    assert parked.request.num_computed == 14
    assert parked.request.generated[:3] == [5, 6, 7]
    assert len(parked.request.block_ids) == -(-14 // BLOCK_SIZE)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_given_tokens_that_are_a_whole_answer_end_at_once(make_rig, role):
    rig = make_rig(role)
    make = rig.received if role == "decode" else rig.request
    fields = {"given": [5, 6, 7]} if role != "decode" else {}
    given = (5, 6, 7) if role == "decode" else ()
    rig.engine.submit(make("length", *given, max_tokens=3, **fields))
    rig.engine.submit(make("stop", *given, max_tokens=9, stop_token_ids=(7,), **fields))
    length, stop = rig.turn()
    assert (length.reason, length.num_generated) == ("length", 3)
    assert (stop.reason, stop.stop, stop.num_prompt) == ("stop", 7, 11)
    assert rig.engine.num_steps == 0
    assert rig.scheduler.is_idle()
    rig.engine.submit(make("length", *given, max_tokens=3, **fields))  # its key is free
    assert isinstance(rig.turn()[0], Ended)


@pytest.mark.parametrize("token_id", [-1, 1 << 31, 1 << 70])
def test_a_given_token_that_is_none_breaks_its_own_request_only(make_rig, token_id):
    rig = make_rig("both")
    rig.engine.submit(rig.request("a", given=[5, token_id]))
    rig.engine.submit(rig.request("b"))
    broken, *others = rig.turn_until_idle()
    assert broken.key == key("a")
    assert isinstance(broken.error, RemoteProtocolError)
    assert {event.key for event in others} == {key("b")}


class Reader:
    """A CompletionToken for somebody who reads parked blocks."""

    is_ended = False

    def is_done(self):
        return self.is_ended

    def error(self):
        return None


def test_blocks_that_a_peer_reads_are_marked_at_once_and_free_when_it_ends(make_rig):
    rig = make_rig("prefill", chunk=100, batch_size=1)
    request = rig.request("a")
    rig.engine.submit(request)
    rig.turn()
    held, reader = list(request.block_ids), Reader()
    assert rig.engine.blocks.parked == len(held)
    rig.engine.cancel(key("a"), "error", held_by=reader)
    rig.engine.submit(rig.request("b"))
    rig.turn()
    assert rig.backend.pool.generations(held) == [1] * len(held)
    assert rig.engine.blocks.quarantined == len(held)
    assert not rig.scheduler.is_idle()
    other = rig.engine._live[key("b")].request
    assert not set(held) & set(other.block_ids)
    rig.engine.release(key("b"))
    reader.is_ended = True
    assert rig.turn() == []
    assert rig.engine.blocks == BlockCount(total=NUM_BLOCKS, free=NUM_BLOCKS)
    assert rig.backend.pool.generations(held) == [1] * len(held)
