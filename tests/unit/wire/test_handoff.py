"""The tables as such: whole, reachable, and right about who is to blame."""

import itertools

import pytest

from neuron_di.errors import LocalProtocolError, RemoteProtocolError
from neuron_di.wire.handoff import (
    LAUNCH,
    RECEIVER,
    SENDER,
    LaunchAction,
    LaunchEvent,
    LaunchState,
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
    SenderAction,
    SenderEvent,
    SenderState,
    launch_step,
    receiver_step,
    sender_step,
)

S, SE, SA = SenderState, SenderEvent, SenderAction
R, RE, RA = ReceiverState, ReceiverEvent, ReceiverAction
L, LE, LA = LaunchState, LaunchEvent, LaunchAction

TABLES = {
    "sender": (SENDER, sender_step, S, SE, SA, S.UNKNOWN),
    "receiver": (RECEIVER, receiver_step, R, RE, RA, R.UNKNOWN),
    "launch": (LAUNCH, launch_step, L, LE, LA, L.LAUNCHED),
}
FROM_PEER = {
    *(SE.LOOKUP, SE.HOLD, SE.PULL, SE.DONE, SE.ABORT),
    *(RE.NOT_YET, RE.NEVER, RE.READY),
    *(set(LE) - {LE.OVERDUE}),
}
EVERY_CASE = [
    (name, state, event)
    for name, (_, _, states, events, _, _) in TABLES.items()
    for state, event in itertools.product(states, events)
]


def walk(step, state, *events):
    """(the last state, all actions on the way)."""
    done = []
    for event in events:
        state, actions = step(state, event)
        done.extend(actions)
    return state, done


@pytest.mark.parametrize("name", TABLES)
def test_every_state_can_be_reached_and_left_for_over(name):
    table, _, states, _, _, start = TABLES[name]
    arrows = {(before, step.state) for (before, _), step in table.items()}
    reached = {start}
    while more := {after for before, after in arrows if before in reached} - reached:
        reached |= more
    assert reached == set(states)
    ending = {next(state for state in states if state.value == "over")}
    while more := {before for before, after in arrows if after in ending} - ending:
        ending |= more
    assert ending == set(states)


@pytest.mark.parametrize("name", TABLES)
def test_every_event_and_every_action_is_used(name):
    table, _, _, events, actions, _ = TABLES[name]
    assert {event for _, event in table} == set(events)
    assert {action for step in table.values() for action in step.actions} == set(actions)
    for step in table.values():
        assert len(set(step.actions)) == len(step.actions)


@pytest.mark.parametrize(("name", "state", "event"), EVERY_CASE)
def test_a_row_is_taken_and_the_rest_is_refused_with_the_right_blame(name, state, event):
    table, step, *_ = TABLES[name]
    if (state, event) in table:
        assert step(state, event) == table[state, event]
        return
    kind = RemoteProtocolError if event in FROM_PEER else LocalProtocolError
    with pytest.raises(kind) as caught:
        step(state, event)
    assert type(caught.value) is kind
    assert caught.value.fault == ("peer" if event in FROM_PEER else "us")
    assert event.value in caught.value.message
    assert state.value in caught.value.message


def test_no_answer_of_a_prefill_worker_is_ever_forbidden():
    for state, event in itertools.product(R, (RE.NOT_YET, RE.NEVER, RE.READY)):
        assert (state, event) in RECEIVER


def test_a_leg_may_end_in_every_state():
    assert all((state, SE.DROP) in SENDER for state in S)
    assert all((state, RE.CANCEL) in RECEIVER for state in R)


def test_over_is_for_ever():
    for table, over in ((SENDER, S.OVER), (RECEIVER, R.OVER), (LAUNCH, L.OVER)):
        assert {step.state for (state, _), step in table.items() if state is over} <= {over}


@pytest.mark.parametrize("name", TABLES)
def test_no_state_goes_back(name):
    """The enums list the states in the order of a life."""
    table, _, states, *_ = TABLES[name]
    order = list(states)
    for (state, _), step in table.items():
        assert order.index(step.state) >= order.index(state)
        assert step.state.value != "over" or state.value != "unknown", "never began, yet over"


def test_what_keeps_parked_kv_alive():
    for event in (SE.LOOKUP, SE.HOLD):
        for state in (S.PARKED, S.PULLING):
            assert SA.RENEW_LEASE in sender_step(state, event).actions
    assert SA.RENEW_LEASE in sender_step(S.ASKED, SE.LOOKUP).actions
    assert sender_step(S.PARKED, SE.PULL).actions == (SA.RENEW_LEASE, SA.POST_SEND)
    assert RA.SEND_HOLD in receiver_step(R.ASKING, RE.READY).actions
    for state in (R.HELD, R.PULLING):
        assert receiver_step(state, RE.TICK) == (state, (RA.SEND_HOLD,))


def test_not_yet_never_and_unknown_are_told_apart():
    assert SA.SAY_NOT_YET in sender_step(S.UNKNOWN, SE.LOOKUP).actions
    assert SA.SAY_NOT_YET in sender_step(S.PREFILLING, SE.LOOKUP).actions
    assert sender_step(S.OVER, SE.LOOKUP).actions == (SA.SAY_NEVER,)
    assert receiver_step(R.ASKING, RE.NOT_YET).state is R.ASKING
    assert receiver_step(R.ASKING, RE.NEVER).state is R.OVER


# The windows of a parallel launch, as far as tables can state them. W5 and W6 are about token
# ids, W9 about incarnations: they are tested where those are.


@pytest.mark.parametrize("before", [(SE.LOOKUP,), (SE.EXPECT,), (SE.LOOKUP, SE.EXPECT)])
def test_w1_prefill_fails_and_decode_is_told_instead_of_waiting(before):
    state, _ = walk(sender_step, S.UNKNOWN, *before)
    state, actions = sender_step(state, SE.DROP)
    assert (state, actions) == (S.OVER, (SA.SAY_NEVER,))
    assert sender_step(S.OVER, SE.LOOKUP).actions == (SA.SAY_NEVER,)  # if it was lost
    assert receiver_step(R.ASKING, RE.NEVER) == (R.OVER, (RA.FAIL,))


def test_w2_decode_fails_and_what_was_parked_is_given_up():
    parked, _ = walk(sender_step, S.UNKNOWN, SE.EXPECT, SE.LOOKUP, SE.PARK)
    assert receiver_step(R.HELD, RE.CANCEL).actions == (RA.SEND_ABORT,)
    assert sender_step(parked, SE.ABORT) == (S.OVER, (SA.GIVE_UP,))
    # Nobody says so: the lease ends it, and then the quarantine.
    state, actions = walk(sender_step, parked, SE.LEASE_ENDED, SE.LEASE_ENDED)
    assert state is S.OVER
    assert [a for a in actions if a in (SA.QUARANTINE, SA.LET_GO)] == [SA.QUARANTINE, SA.LET_GO]


def test_w3_client_leaves_between_prefills_end_and_decodes_lookup():
    state, actions = walk(sender_step, S.UNKNOWN, SE.EXPECT, SE.PARK, SE.DROP)
    assert state is S.RECALLED  # without a reader, its blocks are free
    assert SA.QUARANTINE in actions
    assert sender_step(state, SE.LOOKUP).actions == (SA.SAY_NEVER,)
    assert receiver_step(R.ASKING, RE.NEVER) == (R.OVER, (RA.FAIL,))


def test_w4_lookup_before_the_request_is_not_yet_under_a_lease_and_then_never():
    state, actions = sender_step(S.UNKNOWN, SE.LOOKUP)
    assert state is S.ASKED
    assert {SA.SAY_NOT_YET, SA.START_LEASE} <= set(actions)
    state, actions = sender_step(state, SE.LEASE_ENDED)
    assert (state, actions) == (S.OVER, (SA.SAY_NEVER,))
    assert sender_step(state, SE.EXPECT) == (S.OVER, (SA.REFUSE,))  # nobody would pull it


def test_w5_prefill_dies_after_its_token_and_the_attempt_fails_once():
    state, actions = walk(launch_step, L.LAUNCHED, LE.PREFILL_TOKEN, LE.PREFILL_FAILED)
    assert (state, actions) == (L.OVER, [LA.EMIT, LA.FAIL])


@pytest.mark.parametrize("early", [LE.DECODE_TOKEN, LE.DECODE_FINISHED, LE.DECODE_DENIED])
def test_w6_decode_never_speaks_before_prefill(early):
    for state in (L.LAUNCHED, L.STARTED):
        assert launch_step(state, early) == (state, (LA.HOLD_BACK,))


def test_decode_is_heard_before_prefill_accuses_it_but_not_for_ever():
    for state in (L.LAUNCHED, L.STARTED, L.PARKED):
        assert launch_step(state, LE.PREFILL_DENIED) == (state, (LA.HOLD_BACK,))
        assert launch_step(state, LE.DECODE_FAILED) == (L.OVER, (LA.FAIL,))
        assert launch_step(state, LE.OVERDUE) == (L.OVER, (LA.FAIL,))
    assert launch_step(L.DECODING, LE.PREFILL_DENIED) == (L.DECODING, ())


def test_w7_an_attempt_is_used_once():
    for state in set(S) - {S.UNKNOWN, S.ASKED}:
        assert sender_step(state, SE.EXPECT) == (state, (SA.REFUSE,))
    for state in set(R) - {R.UNKNOWN}:
        with pytest.raises(LocalProtocolError):
            receiver_step(state, RE.ASK)


def test_w8_decode_dies_before_done_and_the_blocks_wait_out_a_quarantine():
    pulling, _ = walk(sender_step, S.UNKNOWN, SE.EXPECT, SE.LOOKUP, SE.PARK, SE.PULL)
    for event in (SE.READER_LOST, SE.LEASE_ENDED, SE.DROP):
        state, actions = sender_step(pulling, event)
        assert state is S.RECALLED
        assert SA.QUARANTINE in actions
        assert SA.GIVE_UP not in actions
        assert sender_step(state, SE.READER_LOST).state is S.RECALLED  # silent is not gone
        assert sender_step(state, SE.LEASE_ENDED) == (S.OVER, (SA.LET_GO,))


def test_w9_prefill_is_another_process_and_decode_fails_without_freeing_what_is_written():
    assert receiver_step(R.ASKING, RE.LINK_LOST) == (R.OVER, (RA.FAIL,))
    assert receiver_step(R.HELD, RE.LINK_LOST) == (R.OVER, (RA.FAIL,))
    assert receiver_step(R.PULLING, RE.LINK_LOST) == (R.DRAINING, (RA.FAIL,))
    for end in (RE.ARRIVED, RE.BROKE):
        assert receiver_step(R.DRAINING, end).state is R.OVER


def test_nothing_says_that_it_let_go_while_it_still_reads():
    for (state, event), step in RECEIVER.items():
        if RA.SEND_ABORT in step.actions:
            is_copying = state in (R.PULLING, R.DRAINING)
            assert not is_copying or event in (RE.ARRIVED, RE.BROKE)
