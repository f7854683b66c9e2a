"""Why a worker has no partner, in words that name the one it would have."""

import pytest
from scripted_worker import make_record

from neuron_di_proxy.partners import shared_names, shown_digest, why_alone
from neuron_di_proxy.workers import process_of

P0, D0 = make_record("p0", "prefill", 4000), make_record("d0", "decode", 4001)
LONG = "12ab34cd56ef7890"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout_digest": LONG}, "KV layout 12ab34cd… differs from p0's"),
        ({"model_digest": LONG}, "weights 12ab34cd… differ from p0's"),
        ({"model": "large"}, "no prefill worker has model 'large'"),
        ({"model_digest": LONG, "layout_digest": LONG}, "weights 12ab34cd… differ from p0's"),
    ],
)
def test_a_worker_without_a_partner_is_told_from_the_nearest(changes, words):
    odd = make_record("d1", "decode", 4002, **changes)
    assert why_alone([P0, D0, odd]) == {process_of(odd): words}


@pytest.mark.parametrize(
    ("one", "other", "mend"),
    [
        (["shm@there"], ["shm@here"], "--transfer shm,tcp"),
        (["shm@there", "tcp@there"], [], "--transfer shm,tcp"),
        (["tcp@there"], ["shm@here", "tcp@here"], "a --host that others reach"),
    ],
)
def test_workers_whose_engines_do_not_meet_are_told_what_would(one, other, mend):
    odd = make_record("d1", "decode", 4002, transfer=one)
    reasons = why_alone([make_record("p1", "prefill", 4003, transfer=other), odd])
    has, others = ", ".join(one), ", ".join(other) or "nothing"
    words = f"{has} can move its KV, {others} that of p1: {mend} at both would do"
    assert reasons[process_of(odd)] == words


def test_the_partner_that_is_nearest_is_named():
    far = make_record("p1", "prefill", 4003, model_digest="x", layout_digest="y")
    odd = make_record("d1", "decode", 4002, layout_digest=LONG)
    reasons = why_alone([far, P0, D0, odd])
    assert reasons[process_of(odd)] == "KV layout 12ab34cd… differs from p0's"
    assert reasons[process_of(far)] == "weights x differ from d0's"


def test_who_has_a_partner_or_needs_none_is_not_named():
    both = make_record("b0", "both", 4004, model="large")
    assert why_alone([P0, D0, both]) == {}


def test_nobody_of_the_other_role_is_ready():
    starting = make_record("d1", "decode", 4002, state="starting")
    assert why_alone([P0, starting]) == {process_of(P0): "no decode worker is ready"}
    assert why_alone([]) == {}


def test_a_name_that_several_have_is_said_with_their_places():
    other = make_record("d0", "decode", 4009, incarnation="another")
    assert shared_names([P0, D0]) == []
    assert shared_names([P0, D0, other]) == [
        "2 workers have the name d0: at 127.0.0.1:4001, 127.0.0.1:4009"
    ]


def test_digests_are_shortened_where_that_helps():
    assert (shown_digest(LONG), shown_digest("layout")) == ("12ab34cd…", "layout")
