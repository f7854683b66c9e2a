"""Two endpoints compared by the differential suite, as its tests do it."""

from collections.abc import Sequence

from openai_kit import Client

from neuron_di.testing.conformance import (
    Case,
    Endpoint,
    Probe,
    Result,
    Rules,
    choose,
    run_cases,
)

EXACT = Rules(logprob_tolerance=0.0, is_strict=True)
LONG_PROMPT_CHARS = 4_000  # as much as the model's context holds


async def compare(
    urls: Sequence[str],
    client: Client,
    probe: Probe,
    patterns: list[str],
    rules: Rules = EXACT,
    *,
    cases: Sequence[Case] = (),
) -> list[Result]:
    """Those of `cases`, else those of the list whose names match a pattern."""
    endpoints = [
        Endpoint(side, url, client.session, model=client.model)
        for side, url in zip(("A", "B"), urls, strict=True)
    ]
    return await run_cases(cases or choose(patterns), endpoints, [probe, probe], rules)


def findings(results: Sequence[Result]) -> list[str]:
    """All that was found, a line each."""
    lines: list[str] = []
    for result in results:
        lines += [
            f"{result.case.name}: {label} {' '.join(fault)}" for label, fault in result.faults
        ]
        lines += [
            f"{result.case.name}: {left}/{right} {found.path} {found.left!r} {found.right!r}"
            for left, right, found in result.differences
        ]
    return lines
