"""The judge of these runs lets nothing pass: each violation that is planted is named."""

from typing import Any

import pytest
from chaos.client import Stream
from chaos.judge import Verdict
from chaos.process import LogLine

from . import load
from .events import Event
from .findings import Attempt, attempts_of, find, look_at
from .load import Asked, Load, Wanted
from .report import table

GOOD = Verdict(
    is_completed=True,
    is_equal=True,
    is_wrong=False,
    is_misnumbered=False,
    is_stuck=False,
    has_left=False,
    num_continued=0,
    error_code="",
    words="",
)
FAILED = {"is_completed": False, "is_equal": False, "error_code": "peer_gone"}
WRONG = {"is_equal": False, "is_wrong": True, "words": "tokens differ"}


class Log:
    """What a proxy logged."""

    def __init__(self, *lines: LogLine) -> None:
        self.events = lines


def receipt(*attempts: tuple[str, str], queued_s: float = 0.0) -> dict[str, Any]:
    return {
        "request_id": "r",
        "queued_s": queued_s,
        "continued": 0,
        "attempts": [
            {
                "attempt": number,
                "prefill_worker": prefill,
                "decode_worker": decode,
                "code": None if number == len(attempts) - 1 else "peer_gone",
                "blamed": None if number == len(attempts) - 1 else decode,
            }
            for number, (prefill, decode) in enumerate(attempts)
        ],
    }


def asked(sent_s: float, document: dict[str, Any] | None, **verdict: Any) -> Asked:
    fields = {name: getattr(GOOD, name) for name in Verdict.__dataclass_fields__} | verdict
    return Asked("", sent_s, Stream(end="done"), Verdict(**fields), document)


def attempt(begun_s: float, prefill: str = "p0", decode: str = "d0", **fields: Any) -> Attempt:
    return Attempt(begun_s, prefill, decode, fields.get("code"), fields.get("blamed"))


def test_a_good_run_has_no_flaw():
    found = find([asked(1.0, receipt(("p0", "d0")))], [], [])
    assert (found.num_requests, found.num_equal, found.flaws) == (1, 1, [])
    assert table("title", found, 0.0)[-1] == "no violation"


def test_nothing_asked_proves_nothing():
    assert find([], [], []).flaws == ["no request was answered"]


@pytest.mark.parametrize(
    ("document", "verdict", "words"),
    [
        (receipt(("p0", "d0")), FAILED, "r sent at 1.000: done peer_gone"),
        (None, FAILED, "a request sent at 1.000: done peer_gone"),
        (receipt(("p0", "d0")), WRONG, "r sent at 1.000: tokens differ"),
        (None, {}, "an answer without a receipt"),
    ],
)
def test_a_failed_or_wrong_answer(document, verdict, words):
    found = find([asked(1.0, document, **verdict)], [], [])
    assert found.flaws == [words]
    assert table("title", found, 0.0)[-1] == f"VIOLATION {words}"


def test_a_further_attempt_began_when_the_one_before_had_failed():
    log = Log(LogLine(3.5, "warning", "attempt_failed", "request=r attempt=0 first_index=0"))
    document = receipt(("p0", "d0"), ("p1", "d1"), queued_s=0.5)
    first, second = attempts_of([asked(1.0, document)], [log])
    assert (first.begun_s, first.workers, first.blamed) == (1.5, ("p0", "d0"), "d0")
    assert (second.begun_s, second.workers, second.code) == (3.5, ("p1", "d1"), None)


@pytest.mark.parametrize(
    ("late_s", "flaw"),
    [(10.9, ""), (11.1, "d0 got 1 attempts too late after kill")],
)
def test_who_was_killed_gets_nothing_after_a_second(late_s, flaw):
    event = Event("kill", "d0", "decode", 10.0, 10.0)
    failed = attempt(9.9, code="peer_gone", blamed="d0")
    row = look_at(event, [failed, attempt(late_s, "p0", "d0"), attempt(20.0, "p0", "d1")])
    assert row.flaw == flaw
    assert "1 failed with it" in row.measured


def test_who_was_drained_gets_nothing_after_its_end():
    event = Event("drain", "d0", "decode", 10.0, 12.0)
    assert look_at(event, [attempt(11.9)]).flaw == ""
    assert look_at(event, [attempt(12.1)]).flaw == "d0 got 1 attempts too late after drain"


@pytest.mark.parametrize("kind", ["join", "role", "drain", "etcd"])
def test_of_what_did_not_come_to_its_end_nothing_else_is_said(kind):
    row = look_at(Event(kind, "d0", "decode", 10.0), [attempt(11.0), attempt(12.0)])
    assert (row.measured, row.flaw) == ("it did not come to its end", "")


def test_the_same_violation_is_one_line():
    found = find([asked(1.0, None)] * 3, [], [])
    assert table("title", found, 0.0)[-1] == "VIOLATION an answer without a receipt, 3 times"


@pytest.mark.parametrize(
    ("times", "flaw"),
    [
        ([12.9, 16.0], ""),
        ([13.1, 16.0], "d0 got 1 attempts while it was known to be frozen"),
        ([12.0], "d0 was never used again"),
    ],
)
def test_who_is_frozen_gets_nothing_after_three_seconds_and_something_afterwards(times, flaw):
    event = Event("freeze", "d0", "decode", 10.0, 15.0)
    assert look_at(event, [attempt(each) for each in times]).flaw == flaw


@pytest.mark.parametrize(("num_new", "is_good"), [(0, False), (2, False), (3, True), (6, True)])
def test_a_new_worker_has_its_share_within_two_seconds(num_new, is_good):
    """Of 18 attempts at three workers an equal share is six."""
    names = ["d9"] * num_new + ["d0", "d1"] * 9
    attempts = [attempt(10.0 + number / 10, "p0", name) for number, name in enumerate(names[:18])]
    row = look_at(Event("join", "d9", "decode", 8.0, 10.0), attempts)
    assert bool(row.flaw) is not is_good
    role = look_at(Event("role", "d9", "decode", 8.0, 10.0), attempts)
    assert bool(role.flaw) is not is_good


@pytest.mark.parametrize(("later", "is_good"), [("d9", True), ("d0", False)])
def test_a_new_worker_is_used_though_the_load_stood_still_at_first(later, is_good):
    """One attempt in two seconds tells no share; that it comes to be used has to show."""
    attempts = [attempt(11.9, "p0", "d0"), attempt(13.0, "p0", later)]
    row = look_at(Event("join", "d9", "decode", 8.0, 10.0), attempts)
    assert bool(row.flaw) is not is_good


async def test_a_receipt_that_does_not_come_in_time_counts_as_none(monkeypatch):
    async def answered(_url: str, _body: dict[str, Any]) -> Stream:
        return Stream(end="done", answer_id="cmpl-r")

    class Late:
        async def get(self, _url: str) -> Any:
            raise TimeoutError

    monkeypatch.setattr(load, "ask", answered)
    running = Load(Late(), Wanted({("hello", 1): Stream()}), rate_per_s=1.0, urls=["http://x"])
    await running._ask("http://x", "hello", 1)
    assert [each.receipt for each in running.asked] == [None]
