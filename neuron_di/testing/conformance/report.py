"""What was found, for people, 80 columns wide, and for programs."""

from collections import Counter
from collections.abc import Iterator, Sequence

from neuron_di.testing.conformance.compare import Rules
from neuron_di.testing.conformance.exchange import Endpoint, Json
from neuron_di.testing.conformance.finding import shorten
from neuron_di.testing.conformance.run import Outcome, Result

COLUMNS = 80
SHOWN_MAX = 6  # findings of one case that are written out
_NAME_COLUMNS = 29
_OUTCOMES: tuple[Outcome, ...] = ("same", "refused", "differs", "broken")
_TEXT_WORDS = {
    "exact": "greedy and seeded answers must be equal",
    "greedy": "greedy answers must be equal, seeded ones alike",
    "shape": "answers must be alike, not equal",
}


def report_lines(
    results: Sequence[Result], endpoints: Sequence[Endpoint], rules: Rules
) -> Iterator[str]:
    """A line for each case, then what was found, then the sum."""
    for endpoint in endpoints:
        yield f"{endpoint.side}  {endpoint.url}  {endpoint.model}"
    strict = ", strictly" if rules.is_strict else ""
    yield f"{_TEXT_WORDS[rules.text]}{strict}; logprobs within {rules.logprob_tolerance:g}"
    yield ""
    yield f"{'case':<{_NAME_COLUMNS}}{'A':<8}{'B':<8}{'A = B':<7}why"
    for result in results:
        states = [_state(result, side) for side in ("A", "B")]
        why = result.case.why[: COLUMNS - _NAME_COLUMNS - 23]
        yield (
            f"{result.case.name:<{_NAME_COLUMNS}}{states[0]:<8}{states[1]:<8}"
            f"{_equality(result):<7}{why}"
        )
    for result in results:
        yield from _details(result)
    yield ""
    yield summary(results)


def summary(results: Sequence[Result]) -> str:
    """How many cases came out how."""
    counted = Counter(result.outcome for result in results)
    parts = [f"{counted[outcome]} {outcome}" for outcome in _OUTCOMES if counted[outcome]]
    return f"{len(results)} cases: {', '.join(parts)}"


def report_document(results: Sequence[Result], endpoints: Sequence[Endpoint], rules: Rules) -> Json:
    """The same for programs."""
    return {
        "endpoints": {each.side: {"url": each.url, "model": each.model} for each in endpoints},
        "rules": {
            "text": rules.text,
            "logprob_tolerance": rules.logprob_tolerance,
            "strict": rules.is_strict,
        },
        "summary": dict(Counter(result.outcome for result in results)),
        "cases": [
            {
                "name": result.case.name,
                "why": result.case.why,
                "outcome": result.outcome,
                "refused": dict(result.refused),
                "faults": [
                    {"answer": label, "where": fault.where, "what": fault.what}
                    for label, fault in result.faults
                ],
                "differences": [
                    {
                        "path": found.path,
                        left: shorten(found.left),
                        right: shorten(found.right),
                    }
                    for left, right, found in result.differences
                ],
            }
            for result in results
        ],
    }


def _state(result: Result, side: str) -> str:
    if side in result.refused:
        return "refused"
    return "fault" if any(label[0] == side for label, _ in result.faults) else "ok"


def _equality(result: Result) -> str:
    if any(left[0] != right[0] for left, right, _ in result.differences):
        return "no"
    if result.differences:
        return "stream"  # within one endpoint, its stream is not its whole answer
    return "yes" if result.are_all_there else "-"


def _details(result: Result) -> Iterator[str]:
    if result.outcome == "same":
        return
    yield ""
    yield f"{result.case.name}: {result.outcome}"
    for side, message in result.refused.items():
        yield _cut(f"  {side} says: {shorten(message)}")
    for label, fault in result.faults[:SHOWN_MAX]:
        yield _cut(f"  {label}: {fault.where} {fault.what}")
    for left, right, found in result.differences[:SHOWN_MAX]:
        yield _cut(f"  {found.path}")
        yield _cut(f"    {left:<9} {shorten(found.left)}")
        yield _cut(f"    {right:<9} {shorten(found.right)}")
    for many, words in ((result.faults, "faults"), (result.differences, "differences")):
        if len(many) > SHOWN_MAX:
            yield f"  … {len(many) - SHOWN_MAX} {words} more"


def _cut(line: str) -> str:
    """To the width, and without what could move a terminal's cursor: endpoints said it."""
    line = "".join(char if char.isprintable() else " " for char in line)
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…"
