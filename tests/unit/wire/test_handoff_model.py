"""Every order of events; and every planted mistake is found."""

import pytest

from neuron_di.testing.handoff_model import explore
from neuron_di.testing.handoff_world import Tables, Violation
from neuron_di.testing.launch_model import explore_launch
from neuron_di.wire.handoff import (
    LAUNCH,
    RECEIVER,
    SENDER,
    LaunchAction,
    LaunchEvent,
    LaunchState,
    LaunchStep,
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
    ReceiverStep,
    SenderAction,
    SenderEvent,
    SenderState,
    SenderStep,
)

S, SE, SA = SenderState, SenderEvent, SenderAction
R, RE, RA = ReceiverState, ReceiverEvent, ReceiverAction
L, LE, LA = LaunchState, LaunchEvent, LaunchAction


class Watched(dict):
    """A table that knows which rows were looked up."""

    def __init__(self, table):
        super().__init__(table)
        self.seen = set()

    def get(self, key, default=None):
        self.seen.add(key)
        return super().get(key, default)

    def unseen(self):
        return self.keys() - self.seen


def test_everything_that_can_happen_with_two_faults_is_fine():
    sender, receiver = Watched(SENDER), Watched(RECEIVER)
    found = explore(Tables(sender, receiver), faults_max=2)
    assert found.num_states > 30_000
    assert found.num_transitions > 200_000
    assert found.num_caught_by_digest > 0  # the way in which only digests help is really there
    assert not sender.unseen()
    # A peer that speaks of what this worker never asked for: honest ones do not.
    assert receiver.unseen() == {(R.UNKNOWN, answer) for answer in (RE.NOT_YET, RE.NEVER, RE.READY)}


def test_the_innocent_are_refused_only_by_a_worker_that_forgot():
    """It forgets after thousands of later hand-overs, while the message is still under way."""
    found = explore(faults_max=1)
    assert set(found.blamed) == {"Hold while asked", "Pull while asked", "Done while asked"}
    assert all("prefill forgets it" in path for path in found.blamed.values())
    assert explore(faults_max=0).blamed == {}


def test_without_digests_the_wrong_kv_would_be_delivered():
    with pytest.raises(Violation, match="delivered somebody else's KV"):
        explore(Tables(is_verified=False), faults_max=0)


def test_everything_that_two_workers_can_say_to_the_proxy_is_fine():
    launch = Watched(LAUNCH)
    num_states, num_transitions = explore_launch(launch)
    assert num_states > 200
    assert num_transitions > 500
    assert launch.unseen() == {(L.DECODING, LE.DECODE_DENIED)}  # it has the KV


REMOVED = None
SENDER_MISTAKES = {
    "freed while a Pull is on the way, dropped": (
        (S.PARKED, SE.DROP),
        (S.OVER, (SA.SAY_NEVER, SA.GIVE_UP)),
        "free while they are read",
    ),
    "freed while a Pull is on the way, lease ended": (
        (S.PARKED, SE.LEASE_ENDED),
        (S.OVER, (SA.SAY_NEVER, SA.GIVE_UP)),
        "free while they are read",
    ),
    "freed while a Pull is on the way, reader silent": (
        (S.PARKED, SE.READER_LOST),
        (S.OVER, (SA.GIVE_UP,)),
        "free while they are read",
    ),
    "freed while read, dropped": (
        (S.PULLING, SE.DROP),
        (S.OVER, (SA.SAY_NEVER, SA.GIVE_UP)),
        "free while they are read",
    ),
    "freed while read, reader silent": (
        (S.PULLING, SE.READER_LOST),
        (S.OVER, (SA.GIVE_UP,)),
        "free while they are read",
    ),
    "a silent reader ends the quarantine": (
        (S.RECALLED, SE.READER_LOST),
        (S.OVER, (SA.LET_GO,)),
        "free while they are read",
    ),
    "no quarantine lease": (
        (S.PULLING, SE.LEASE_ENDED),
        (S.RECALLED, (SA.SAY_NEVER, SA.QUARANTINE)),
        "recalled has no deadline",
    ),
    "a parked prompt without lease": (
        (S.PREFILLING, SE.PARK),
        (S.PARKED, (SA.SAY_READY,)),
        "parked has no deadline",
    ),
    "Done forgets to release": ((S.PULLING, SE.DONE), (S.OVER, ()), "blocks are parked while over"),
    "Abort of recalled blocks is ignored": (
        (S.RECALLED, SE.ABORT),
        (S.RECALLED, ()),
        "blocks wait for a lease",
    ),
    "released twice": (
        (S.RECALLED, SE.DONE),
        (S.OVER, (SA.LET_GO, SA.RELEASE)),
        "nothing to release",
    ),
    "never is not said": ((S.OVER, SE.LOOKUP), (S.OVER, ()), "nobody tells decode"),
    "never is not said when the leg fails": (
        (S.PREFILLING, SE.DROP),
        (S.OVER, ()),
        "decode learns of it",
    ),
    "ready is not said": ((S.PREFILLING, SE.PARK), (S.PARKED, (SA.START_LEASE,)), "decode learns"),
    "not yet instead of never": (
        (S.OVER, SE.LOOKUP),
        (S.OVER, (SA.SAY_NOT_YET,)),
        "a lie: say NotYet",
    ),
    "never, and then it comes": (
        (S.ASKED, SE.LOOKUP),
        (S.ASKED, (SA.RENEW_LEASE, SA.SAY_NEVER)),
        "a lie: say Never",
    ),
    "an attempt runs twice": ((S.OVER, SE.EXPECT), (S.PREFILLING, ()), "an attempt runs twice"),
    "a late drop is a bug": ((S.OVER, SE.DROP), REMOVED, "Drop while over is a bug"),
    "an early lookup has no lease": (
        (S.UNKNOWN, SE.LOOKUP),
        (S.ASKED, (SA.NAME_READER, SA.SAY_NOT_YET)),
        "asked has no deadline",
    ),
}
RECEIVER_MISTAKES = {
    "let go while it copies": (
        (R.PULLING, RE.CANCEL),
        (R.OVER, (RA.SEND_ABORT,)),
        "Abort, but the blocks are still read",
    ),
    "forgets a copy that writes": (
        (R.PULLING, RE.NEVER),
        (R.OVER, (RA.FAIL,)),
        "over with copy clean",
    ),
    "draining does not know its end": ((R.DRAINING, RE.ARRIVED), REMOVED, "is a bug of ours"),
    "draining does not say its end": (
        (R.DRAINING, RE.BROKE),
        (R.OVER, ()),
        "blocks wait for a lease",
    ),
    "a Never that is not confirmed": (
        (R.HELD, RE.NEVER),
        (R.OVER, (RA.FAIL,)),
        "blocks wait for a lease",
    ),
    "a cancelled leg keeps quiet": ((R.HELD, RE.CANCEL), (R.OVER, ()), "blocks wait for a lease"),
    "Done is not said": (
        (R.PULLING, RE.ARRIVED),
        (R.OVER, (RA.DELIVER,)),
        "blocks wait for a lease",
    ),
    "delivered though cancelled": (
        (R.DRAINING, RE.ARRIVED),
        (R.OVER, (RA.SEND_DONE, RA.DELIVER)),
        "delivered to a leg that is over",
    ),
    "delivered though broken": (
        (R.PULLING, RE.BROKE),
        (R.OVER, (RA.SEND_ABORT, RA.DELIVER)),
        "delivered what did not arrive",
    ),
    "Done though broken": (
        (R.PULLING, RE.BROKE),
        (R.OVER, (RA.SEND_DONE, RA.FAIL)),
        "Done, but nothing arrived",
    ),
    "failed twice": ((R.DRAINING, RE.NEVER), (R.DRAINING, (RA.FAIL,)), "leg ended twice"),
    "a Never is not passed on": ((R.ASKING, RE.NEVER), (R.OVER, ()), "over with its leg running"),
    "a lost link hangs": ((R.ASKING, RE.LINK_LOST), (R.ASKING, ()), "nobody tells decode"),
    "copied before it is promised": (
        (R.HELD, RE.ADMITTED),
        (R.ASKING, (RA.SEND_PULL, RA.POST_RECEIVE)),
        "asking with copy clean",
    ),
    "a Ready may come at any time": ((R.OVER, RE.READY), (R.HELD, (RA.PROMISE,)), "held with"),
}
LAUNCH_MISTAKES = {
    "decode's token goes first": (
        (L.LAUNCHED, LE.DECODE_TOKEN),
        (L.DECODING, (LA.EMIT,)),
        "wrong order",
    ),
    "decode's token is lost": ((L.STARTED, LE.DECODE_TOKEN), (L.STARTED, ()), "a token is lost"),
    "a complete answer fails": (
        (L.STARTED, LE.DECODE_DENIED),
        (L.OVER, (LA.FAIL,)),
        "failed though nobody did",
    ),
    "a failure is a success": (
        (L.PARKED, LE.DECODE_FAILED),
        (L.OVER, (LA.FINISH,)),
        "finished by what is no end",
    ),
    "a failure is not told": ((L.PARKED, LE.PREFILL_FAILED), (L.OVER, ()), "nobody hears of"),
    "decode's failure is ignored": (
        (L.DECODING, LE.DECODE_FAILED),
        (L.DECODING, ()),
        "the proxy waits for nothing",
    ),
    "prefill's end stops decode": (
        (L.DECODING, LE.PREFILL_FAILED),
        (L.OVER, (LA.FAIL,)),
        "failed though decode goes on",
    ),
    "decode is not heard": (
        (L.PARKED, LE.PREFILL_DENIED),
        (L.OVER, (LA.FAIL,)),
        "accused and not heard",
    ),
    "a denial stops decode": (
        (L.DECODING, LE.PREFILL_DENIED),
        (L.OVER, (LA.FAIL,)),
        "failed though decode goes on",
    ),
    "both wait for each other": ((L.LAUNCHED, LE.OVERDUE), REMOVED, "is refused"),
    "a denial is held back for ever": (
        (L.PARKED, LE.OVERDUE),
        (L.PARKED, (LA.HOLD_BACK,)),
        "held back for ever",
    ),
    "an honest worker is refused": ((L.DECODING, LE.PREFILL_RELEASED), REMOVED, "is refused"),
    "a receipt is thrown away": ((L.PARKED, LE.PREFILL_RELEASED), (L.PARKED, ()), "a receipt"),
}


def with_mistake(table, kind, key, row):
    changed = dict(table)
    assert key in changed
    if row is REMOVED:
        del changed[key]
    else:
        assert changed[key] != kind(*row)
        changed[key] = kind(*row)
    return changed


@pytest.mark.parametrize("name", SENDER_MISTAKES)
def test_a_mistake_of_the_sender_is_found(name):
    key, row, complaint = SENDER_MISTAKES[name]
    with pytest.raises(Violation, match=complaint):
        explore(Tables(sender=with_mistake(SENDER, SenderStep, key, row)), faults_max=1)


@pytest.mark.parametrize("name", RECEIVER_MISTAKES)
def test_a_mistake_of_the_receiver_is_found(name):
    key, row, complaint = RECEIVER_MISTAKES[name]
    with pytest.raises(Violation, match=complaint):
        explore(Tables(receiver=with_mistake(RECEIVER, ReceiverStep, key, row)), faults_max=1)


@pytest.mark.parametrize("name", LAUNCH_MISTAKES)
def test_a_mistake_of_the_proxy_is_found(name):
    key, row, complaint = LAUNCH_MISTAKES[name]
    with pytest.raises(Violation, match=complaint):
        explore_launch(with_mistake(LAUNCH, LaunchStep, key, row))


def test_a_counter_example_says_how_it_comes_about():
    table = with_mistake(
        SENDER, SenderStep, (S.PULLING, SE.DROP), (S.OVER, (SA.SAY_NEVER, SA.GIVE_UP))
    )
    with pytest.raises(Violation) as caught:
        explore(Tables(sender=table), faults_max=0)
    assert caught.value.path[-1] == "Drop"
    assert {"Expect", "Park", "Ask", "Ready arrives", "Admitted", "Pull arrives"} < set(
        caught.value.path
    )
