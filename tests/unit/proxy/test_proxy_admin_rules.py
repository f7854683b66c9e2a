"""Who may leave, and what is said where one may not."""

import pytest
from scripted_worker import make_record

from neuron_di_proxy.admin_rules import (
    LastWorker,
    WorkerNotFound,
    check_may_change,
    check_may_leave,
    find_worker,
    usable_others,
)
from neuron_di_proxy.workers import process_of

P, D, B = "prefill", "decode", "both"


def named(worker_id, role, **fields):
    return make_record(worker_id, role, **({"model": "m"} | fields))


@pytest.mark.parametrize(
    ("role", "others", "missing"),
    [
        (D, [P, D], ""),
        (D, [P, B], ""),
        (D, [P], "no other decode worker would be left for model m"),
        (P, [D, D], "no other prefill worker would be left for model m"),
        (B, [B], ""),
        (B, [P, D], ""),
        (B, [P], "no other decode worker would be left for model m"),
        (B, [], "no other prefill and no other decode worker would be left for model m"),
    ],
)
def test_the_last_worker_of_a_role_stays(role, others, missing):
    records = [named(f"w{n}", other) for n, other in enumerate(others)]
    if not missing:
        check_may_leave(named("w", role), records)
        return
    with pytest.raises(LastWorker, match=missing):
        check_may_leave(named("w", role), records)


@pytest.mark.parametrize(
    ("role", "to", "others", "missing"),
    [
        (D, P, [P, D], ""),
        (D, P, [P], "no other decode worker would be left"),
        (D, B, [P], "no other decode worker would be left"),  # while it changes nobody decodes
        (D, P, [D], ""),
        (B, D, [B], ""),
        (P, D, [P, B], ""),
    ],
)
def test_a_change_leaves_a_model_served(role, to, others, missing):
    records = [named(f"w{n}", other) for n, other in enumerate(others)]
    record = named("w", role)
    if not missing:
        check_may_change(record, to, records)
        return
    with pytest.raises(LastWorker, match=missing):
        check_may_change(record, to, records)


@pytest.mark.parametrize(
    ("leaves", "others", "may"),
    [
        ((D, "a"), [(P, "a"), (D, "b")], False),  # a decode worker is left, and no pair
        ((D, "a"), [(P, "a"), (D, "b"), (P, "b")], True),
        ((D, "a"), [(P, "a"), (D, "b"), (B, "b")], True),
        ((P, "a"), [(D, "a"), (P, "b")], False),
        ((B, "a"), [(P, "a"), (D, "b")], False),
        ((D, "a"), [(P, "b"), (D, "b")], True),
        ((D, "a"), [(P, "b"), (D, "c")], True),  # nobody works together now: it is no loss
    ],
)
def test_those_that_are_left_can_work_together(leaves, others, may):
    records = [named(f"w{n}", role, transfer=[domain]) for n, (role, domain) in enumerate(others)]
    role, domain = leaves
    for check in (check_may_leave, lambda record, left: check_may_change(record, B, left)):
        record = named("w", role, transfer=[domain])
        if may:
            check(record, records)
            continue
        with pytest.raises(LastWorker, match="no prefill and decode worker that fit would be left"):
            check(record, records)


def test_afterwards_both_halves_must_be_there():
    with pytest.raises(LastWorker, match="no prefill worker would be there for model m afterwards"):
        check_may_change(named("w", D), D, [named("w0", D)])


def test_others_are_those_that_can_take_its_work():
    record = named("w", D)
    good = named("good", D)
    others = [
        record,
        good,
        named("model", D, model="other"),
        named("weights", D, model_digest="other"),
        named("draining", D, state="draining"),
        named("ill", D),
        leaving := named("leaving", D),
    ]
    found = usable_others(
        others, record, {process_of(leaving)}, lambda each: each.worker_id != "ill"
    )
    assert found == [good]


def test_a_worker_is_found_by_its_name():
    old, new = named("a", P, incarnation="old"), named("a", D, incarnation="new")
    b = named("b", D)

    def find(worker_id, is_usable=lambda _: True):
        return find_worker([old, new, b], worker_id, is_usable)

    assert find("b") == b
    assert find("a", lambda record: record.incarnation == "new") == new
    with pytest.raises(WorkerNotFound, match=r"more than one worker is called a: http://.*, http"):
        find("a")
    with pytest.raises(WorkerNotFound, match="no worker is called x; there are: a, a, b"):
        find("x")
    with pytest.raises(WorkerNotFound, match="there are: none"):
        find_worker([], "x", lambda _: True)
