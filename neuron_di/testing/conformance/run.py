"""Runs cases against two endpoints, and finds what differs.

Of each case there are up to four answers: A's and B's, whole and as a stream. Each must keep the
rules by itself, a stream must add up to the whole answer, and A's must equal B's.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from neuron_di.errors import PeerError
from neuron_di.testing.conformance.answer_rules import check_answer, check_refusal, names
from neuron_di.testing.conformance.case import PATHS, PROMPT, Case, Mode, Probe
from neuron_di.testing.conformance.compare import Comparison, Rules
from neuron_di.testing.conformance.exchange import Ask, Endpoint, Heard, Json, Side
from neuron_di.testing.conformance.finding import Difference, Fault, shorten
from neuron_di.testing.conformance.joined import join, read_events
from neuron_di.testing.conformance.stream_rules import check_stream

Outcome = Literal["same", "differs", "broken", "refused"]
REFUSING = (400, 404, 422, 501)  # statuses by which a field may be said to be not supported
CONTEXT_TOKENS_MAX = 10_000_000  # a case sends a prompt that is longer than the context
# What reading a document raises where its members have other types than those of any answer.
ODD = (TypeError, AttributeError, LookupError, ValueError, OverflowError, RecursionError)


@dataclass(slots=True, kw_only=True)
class Result:
    """What a case found. Endpoints are "A" and "B", answers "A whole", "B stream" and so on.

    `refused` has, by endpoint, the error that names a field which that one does not support; `ids`
    those of the answers, but where the client chose the request's.
    """

    case: Case
    faults: list[tuple[str, Fault]] = field(default_factory=list)
    differences: list[tuple[str, str, Difference]] = field(default_factory=list)
    refused: dict[Side, str] = field(default_factory=dict)
    are_all_there: bool = False  # both endpoints' answers, in each mode: all was compared
    ids: list[tuple[str, str]] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        """broken: an answer keeps a rule not; differs: two answers do; refused: by one or both."""
        if self.faults:
            return "broken"
        if self.differences:
            return "differs"
        return "refused" if self.refused else "same"


async def learn(endpoint: Endpoint, *, long_prompt_chars: int) -> Probe:
    """Ask what the cases build on. Raises PeerError where nothing can be learnt."""
    entry = await endpoint.find_model()
    fields: Json = {"model": endpoint.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    whole = await _completion(endpoint, {**fields, "return_token_ids": True}, fields)
    first = await _completion(endpoint, {**fields, "max_tokens": 1})
    if not first["text"].strip():
        raise PeerError(f"{endpoint.url} begins {PROMPT!r} with no text to be tried with")
    return Probe(
        token_0=first["text"],
        text=whole["text"],
        token_ids=_token_ids(whole.get("token_ids")),
        context_tokens=_context_tokens(entry.get("max_model_len")),
        long_prompt_chars=long_prompt_chars,
    )


def _token_ids(told: Any) -> tuple[int, ...]:
    is_list = isinstance(told, list) and all(type(each) is int for each in told)
    return tuple(told) if is_list else ()


def _context_tokens(told: Any) -> int | None:
    return told if type(told) is int and 0 < told <= CONTEXT_TOKENS_MAX else None


async def _completion(endpoint: Endpoint, *bodies: Json) -> Json:
    """The choice of the first one that is completed. Raises PeerError where none is."""
    said = ""
    for body in bodies:
        heard = await endpoint.send(Ask(path=PATHS["completions"], body=body))
        said = heard.in_words()
        with suppress(TypeError, LookupError):
            choice: Json = heard.document()["choices"][0]
            if isinstance(choice["text"], str):
                return choice
    raise PeerError(f"{endpoint.url} does not complete a text ({said}): nothing can be tried")


async def run_cases(
    cases: Iterable[Case],
    endpoints: Sequence[Endpoint],
    probes: Sequence[Probe],
    rules: Rules,
    *,
    at_once: int = 4,
    tell: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Run all cases, in their order; `tell` hears of each as it ends.

    `probes`, one for each endpoint, are the same one where both have the same model.
    """
    assert at_once >= 1, "no case would ever begin"
    places = asyncio.Semaphore(at_once)
    known: dict[tuple[str, str], str] = {}

    async def one(case: Case) -> Result:
        async with places:
            result = await run_case(case, endpoints, probes, rules)
        _check_ids(result, known)
        tell(result)
        return result

    return list(await asyncio.gather(*(one(case) for case in cases)))


def _note_id(result: Result, label: str, answer_id: Any) -> None:
    if isinstance(answer_id, str) and "X-Request-Id" not in result.case.headers:
        result.ids.append((label, answer_id))


def _check_ids(result: Result, known: dict[tuple[str, str], str]) -> None:
    """No two answers of an endpoint have the same id. `known` says where each was first seen."""
    for label, answer_id in result.ids:
        here = f"{label} of {result.case.name}"
        first = known.setdefault((label[0], answer_id), here)
        if first != here:
            result.faults.append((label, Fault("$.id", f"is that of {first}, too")))


async def run_case(
    case: Case, endpoints: Sequence[Endpoint], probes: Sequence[Probe], rules: Rules
) -> Result:
    """Send one case to both endpoints, in each of its modes."""
    result = Result(case=case)
    answers: dict[tuple[Side, Mode], Json] = {}
    for mode in case.modes:
        asks = [
            case.ask(probe, endpoint.model, mode)
            for endpoint, probe in zip(endpoints, probes, strict=True)
        ]
        heard = await asyncio.gather(
            *(_hear(each, ask) for each, ask in zip(endpoints, asks, strict=True))
        )
        for endpoint, ask, answer in zip(endpoints, asks, heard, strict=True):
            label = f"{endpoint.side} {mode}"
            if isinstance(answer, PeerError):
                result.faults.append((label, Fault("response", f"did not come: {answer.message}")))
                continue
            body = ask.body if isinstance(ask.body, dict) else {}
            try:
                document = _look(case, mode, body, answer, result, endpoint.side)
            except ODD as error:
                fault = Fault("response", f"has members that no answer has: {shorten(error)}")
                result.faults.append((label, fault))
                continue
            if document is not None:
                answers[endpoint.side, mode] = document
                _note_id(result, label, document.get("id"))
    result.are_all_there = len(answers) == len(case.modes) * len(endpoints)
    try:
        _compare(case, answers, rules, result)
    except ODD as error:
        odd = Difference("$, which cannot be compared", error, error)
        result.differences.append(("A", "B", odd))
    return result


async def _hear(endpoint: Endpoint, ask: Ask) -> Heard | PeerError:
    try:
        return await endpoint.send(ask)
    except PeerError as error:
        return error


def _look(
    case: Case, mode: Mode, body: Json, heard: Heard, result: Result, side: Side
) -> Json | None:
    """Judge one response by itself. Returns what to compare: an answer, or an error."""
    label = f"{side} {mode}"

    def found(faults: Iterable[Fault]) -> None:
        result.faults.extend((label, fault) for fault in faults)

    found(_header_faults(case, heard))
    found(Fault("$", f"has {shorten(key)} twice in one object") for key in heard.doubled_keys())
    if case.must_refuse is not None:
        found(check_refusal(heard, case.must_refuse.statuses, case.must_refuse.param))
        return _error_document(heard)
    if heard.status != 200:
        error = heard.error()
        fields = [name for name in body if name != "model"]
        if heard.status in REFUSING and error and any(names(error, name) for name in fields):
            found(check_refusal(heard, REFUSING, None))
            result.refused[side] = str(error.get("message"))
            return None
        words = "" if error is None else f": {error.get('message')}"
        found([Fault("status", f"is {heard.status}{words}")])
        return None
    if mode == "whole":
        if heard.content_type != "application/json":
            found([Fault("header content-type", f"is {heard.content_type!r}")])
        document = heard.document()
    else:
        chunks, faults = read_events(heard.body)
        found([*faults, *check_stream(body, heard, chunks)])
        document = join(chunks) if chunks else None
    found(check_answer(body, document))
    if not isinstance(document, dict) or not document.get("choices"):
        return None
    for check in case.checks:
        found(check(body, document))
    return document


def _header_faults(case: Case, heard: Heard) -> Iterator[Fault]:
    wanted = case.headers.get("X-Request-Id")
    if wanted is not None and heard.headers.get("x-request-id") != wanted:
        yield Fault("header x-request-id", "is not what the client sent")


def _error_document(heard: Heard) -> Json | None:
    error = heard.error()
    if error is None:
        return None
    known = {key: error.get(key) for key in ("type", "param", "code")}
    return {"status": heard.status, "error": known}


def _compare(
    case: Case, answers: dict[tuple[Side, Mode], Json], rules: Rules, result: Result
) -> None:
    with_text = rules.compares_text(is_sampled=case.is_sampled)
    if case.must_refuse is not None:
        if rules.is_strict:
            _differ(answers, rules, result, with_text=True)
        return
    if rules.is_strict and len(result.refused) == 1:
        refusing = next(iter(result.refused))
        result.faults.append((refusing, Fault("status", "refuses what the other one does")))
    _differ(answers, rules, result, with_text=with_text)
    if not rules.compares_text(is_sampled=False):
        return
    for side in ("A", "B"):
        whole, stream = answers.get((side, "whole")), answers.get((side, "stream"))
        if whole is not None and stream is not None:
            comparison = Comparison(rules=rules, of_one_endpoint=True)
            for difference in comparison.differences(whole, stream):
                result.differences.append((f"{side} whole", f"{side} stream", difference))


def _differ(
    answers: dict[tuple[Side, Mode], Json], rules: Rules, result: Result, *, with_text: bool
) -> None:
    """A's answers against B's."""
    comparison = Comparison(rules=rules, with_text=with_text)
    for mode in result.case.modes:
        left, right = answers.get(("A", mode)), answers.get(("B", mode))
        if left is not None and right is not None:
            # Two endpoints may call the same model differently.
            left, right = (
                {k: v for k, v in each.items() if k != "model"} for each in (left, right)
            )
            for difference in comparison.differences(left, right):
                result.differences.append((f"A {mode}", f"B {mode}", difference))
