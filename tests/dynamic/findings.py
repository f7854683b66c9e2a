"""What a run shows: each event beside the attempts that were made around it, and every violation.

When an attempt began is not in a receipt. The first began when its request was sent and had waited
for its turn, a further one after the proxy logged that the one before it had failed. It may
have begun a little later, never earlier: `begun_s` is that bound.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from chaos.process import TestedProcess

from .events import Event
from .load import Asked

NEW_SHARE_S = 2.0  # from ready until a worker carries its share
SHARE_MIN = 0.5  # of an equal share: the two seconds begin before a proxy can know
TURNS_MIN = 2  # of each worker in that time, to tell a share from chance
CRASHED_S = 1.0  # from its end until a worker gets no new attempt
FROZEN_S = 3.0

_FAILED = re.compile(r"request=(\S+) attempt=(\d+)")


class Attempt(NamedTuple):
    """One attempt at one request. `begun_s` is a Unix time."""

    begun_s: float
    prefill: str
    decode: str
    code: str | None
    blamed: str | None

    @property
    def workers(self) -> tuple[str, str]:
        return self.prefill, self.decode


class Row(NamedTuple):
    """One event of the report. Texts are for people, `flaw` is empty where all is well."""

    event: Event
    measured: str
    flaw: str


@dataclass(slots=True)
class Findings:
    """Everything that a run came to. It is good when nothing is in `flaws`."""

    num_requests: int = 0
    num_equal: int = 0
    num_failed: int = 0
    num_wrong: int = 0
    num_retried: int = 0
    num_continued: int = 0
    rows: list[Row] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)


def find(
    asked: Sequence[Asked], events: Sequence[Event], proxies: Iterable[TestedProcess]
) -> Findings:
    """Look at every answer and every event. What was left behind is to be added."""
    found = Findings(num_requests=len(asked))
    for each in asked:
        verdict = each.verdict
        found.num_equal += verdict.is_equal
        found.num_failed += not verdict.is_completed
        found.num_wrong += bool(verdict.words)
        if each.receipt is not None:
            found.num_retried += len(each.receipt["attempts"]) > 1
            found.num_continued += each.receipt["continued"] > 0
        if not verdict.is_equal:
            name = each.receipt["request_id"] if each.receipt else "a request"
            words = verdict.words or f"{each.stream.end} {verdict.error_code}"
            found.flaws.append(f"{name} sent at {each.sent_s:.3f}: {words}")
        elif each.receipt is None:
            found.flaws.append("an answer without a receipt")
    if not asked:
        found.flaws.append("no request was answered")
    attempts = attempts_of(asked, proxies)
    found.rows = [look_at(event, attempts) for event in events]
    found.flaws += [row.flaw for row in found.rows if row.flaw]
    return found


def attempts_of(asked: Sequence[Asked], proxies: Iterable[TestedProcess]) -> list[Attempt]:
    """All attempts at all requests, by the receipts and the proxies' logs."""
    failed_s: dict[tuple[str, int], float] = {}
    for proxy in proxies:
        for line in proxy.events:
            if line.event == "attempt_failed" and (said := _FAILED.search(line.fields)):
                failed_s[said[1], int(said[2])] = line.unix_s
    attempts = []
    for each in asked:
        if each.receipt is None:
            continue
        begun_s = each.sent_s + each.receipt["queued_s"]
        for attempt in each.receipt["attempts"]:
            before = (each.receipt["request_id"], attempt["attempt"] - 1)
            begun_s = failed_s.get(before, begun_s)
            workers = attempt["prefill_worker"], attempt["decode_worker"]
            attempts.append(Attempt(begun_s, *workers, attempt["code"], attempt["blamed"]))
    return sorted(attempts)


def look_at(event: Event, attempts: Sequence[Attempt]) -> Row:
    """One event beside what was begun around it."""
    if not event.over_s:  # why is a violation of its own
        return Row(event, "it did not come to its end", "")
    match event.kind:
        case "join":
            took = f"ready after {event.over_s - event.begun_s:.1f} s, "
            return _share(event, event.over_s, attempts, took)
        case "role":
            took = f"serves after {event.over_s - event.begun_s:.1f} s, "
            return _share(event, event.over_s, attempts, took)
        case "drain":
            took = f"gone after {event.over_s - event.begun_s:.1f} s, "
            return _end(event, event.over_s, attempts, took)
        case "kill":
            return _end(event, event.begun_s + CRASHED_S, attempts, "")
        case "freeze":
            return _freeze(event, attempts)
        case "etcd":
            lasted = f"for {event.over_s - event.begun_s:.1f} s, "
            agreed = "not all proxies agree after it"
            if event.settled_s:
                agreed = f"all proxies agree {event.settled_s - event.over_s:.1f} s after it"
            return Row(event, lasted + agreed, "")


def _share(event: Event, ready_s: float, attempts: Sequence[Attempt], took: str) -> Row:
    """What it was given in its first two seconds, beside an equal share of its role's attempts."""
    window = [a for a in attempts if ready_s <= a.begun_s < ready_s + NEW_SHARE_S]
    of_role = [a.prefill if event.role == "prefill" else a.decode for a in window]
    num, equal = of_role.count(event.worker), len(of_role) / max(1, len(set(of_role)))
    first = next(
        (a.begun_s for a in attempts if a.begun_s >= ready_s and event.worker in a.workers), None
    )
    came = "never used" if first is None else f"first used {1000 * (first - ready_s):.0f} ms later"
    measured = f"{took}{came}, {num} of {len(of_role)} attempts in 2 s (equal: {equal:.1f})"
    # Where the load itself stood still, on a busy machine, there was little to share.
    is_judged = len(of_role) >= TURNS_MIN * len({event.worker, *of_role})
    if first is None or (is_judged and num < max(1, int(SHARE_MIN * equal))):
        return Row(event, measured, f"{event.worker} had no share after {event.kind}: {measured}")
    return Row(event, measured, "")


def _end(event: Event, until_s: float, attempts: Sequence[Attempt], took: str) -> Row:
    """When it was last given something, and what it failed."""
    last_s, num_late, num_failed = _given(event, until_s, float("inf"), attempts)
    measured = f"{took}last attempt {last_s}, {num_failed} failed with it"
    flaw = f"{event.worker} got {num_late} attempts too late after {event.kind}"
    return Row(event, measured, flaw if num_late else "")


def _freeze(event: Event, attempts: Sequence[Attempt]) -> Row:
    last_s, num_late, num_failed = _given(event, event.begun_s + FROZEN_S, event.over_s, attempts)
    back = [a for a in attempts if a.begun_s >= event.over_s and event.worker in a.workers]
    again = f"{1000 * (back[0].begun_s - event.over_s):.0f} ms after its end" if back else "never"
    measured = (
        f"for {event.over_s - event.begun_s:.1f} s, last attempt {last_s}, "
        f"{num_failed} failed with it, used again {again}"
    )
    flaws = []
    if num_late:
        flaws.append(f"{event.worker} got {num_late} attempts while it was known to be frozen")
    if not back:
        flaws.append(f"{event.worker} was never used again")
    return Row(event, measured, "; ".join(flaws))


def _given(
    event: Event, from_s: float, to_s: float, attempts: Sequence[Attempt]
) -> tuple[str, int, int]:
    """The last attempt before `to_s`, how many began in the forbidden time, and how many failed."""
    mine = [a for a in attempts if event.worker in a.workers and event.begun_s <= a.begun_s < to_s]
    num_late = sum(a.begun_s >= from_s for a in mine)
    num_failed = sum(
        a.blamed == event.worker
        for a in attempts
        if a.code is not None and a.begun_s < min(to_s, from_s)
    )
    last_s = f"after {1000 * (mine[-1].begun_s - event.begun_s):.0f} ms" if mine else "before it"
    return last_s, num_late, num_failed
