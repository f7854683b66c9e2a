"""What `neuron-di conformance` does with its flags."""

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import aiohttp
from rich.console import Console

from neuron_di.errors import ConfigError, PeerError
from neuron_di.proxy_call import check_address, check_key
from neuron_di.testing.conformance.case import Case
from neuron_di.testing.conformance.chat_cases import CHAT_CASES
from neuron_di.testing.conformance.compare import Rules
from neuron_di.testing.conformance.completion_cases import COMPLETION_CASES
from neuron_di.testing.conformance.exchange import Endpoint
from neuron_di.testing.conformance.random_cases import SEED_MAX, random_cases
from neuron_di.testing.conformance.refusal_cases import HEADER_CASES, REFUSAL_CASES
from neuron_di.testing.conformance.report import report_document, report_lines
from neuron_di.testing.conformance.run import Result, learn, run_cases

INTERRUPTED = 130

CASES: tuple[Case, ...] = (*COMPLETION_CASES, *CHAT_CASES, *HEADER_CASES, *REFUSAL_CASES)


def run_conformance(flags: argparse.Namespace) -> int:
    """Run what the flags say. Returns the exit code."""
    cases = choose(flags.case) if flags.random is None else _drawn(flags)
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    if flags.list:
        for case in cases:
            console.print(f"{case.name:<28}{case.why}")
        return 0
    if flags.url_a is None or flags.url_b is None:
        raise ConfigError("two URLs are needed, as in: conformance http://a:8000 http://b:8000")
    if not cases:
        raise ConfigError(f"no case is called {' or '.join(flags.case)}: see --list")
    _check(flags)
    try:
        lines, code = asyncio.run(_run(flags, cases))
    except PeerError as error:
        raise ConfigError(error.message) from None  # nothing was tried: exit code 2
    for line in lines:
        console.print(line)
    return code


def choose(patterns: list[str]) -> list[Case]:
    """The cases whose names match one of the patterns; all of them without any."""
    return [
        case
        for case in CASES
        if not patterns or any(fnmatchcase(case.name, pattern) for pattern in patterns)
    ]


def _drawn(flags: argparse.Namespace) -> list[Case]:
    if flags.case:
        raise ConfigError("--case chooses from the list, --random draws others: one of them")
    if flags.random < 1:
        raise ConfigError(f"--random must be a whole number, at least 1, not {flags.random}")
    if not 0 <= flags.seed <= SEED_MAX:
        raise ConfigError(f"--seed must be between 0 and {SEED_MAX}, not {flags.seed}")
    return list(random_cases(flags.seed, flags.random))


async def _run(flags: argparse.Namespace, cases: list[Case]) -> tuple[list[str], int]:
    rules = Rules(
        text=flags.text, logprob_tolerance=flags.logprob_tolerance, is_strict=flags.strict
    )
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        endpoints = (
            Endpoint("A", flags.url_a, session, model=flags.model, key=_key(flags.key_env_a)),
            Endpoint("B", flags.url_b, session, model=flags.model_b or flags.model,
                     key=_key(flags.key_env_b)),
        )  # fmt: skip
        chars = flags.long_prompt_chars
        probes = [await learn(each, long_prompt_chars=chars) for each in endpoints]
        if flags.text != "shape":
            probes[1] = probes[0]  # one model: both are asked the same
        results: list[Result] = []
        try:
            with show_progress(len(cases)) as tell:

                def ended(result: Result) -> None:
                    results.append(result)
                    tell(result)

                results = await run_cases(
                    cases, endpoints, probes, rules, at_once=flags.at_once, tell=ended
                )
        except asyncio.CancelledError:  # Ctrl-C: a long run's findings are worth reading
            sys.stderr.write(f"interrupted after {len(results)} of {len(cases)} cases\n")
    if flags.json:
        lines = [json.dumps(report_document(results, endpoints, rules), indent=2)]
    else:
        lines = list(report_lines(results, endpoints, rules))
    if not all(result.outcome in ("same", "refused") for result in results):
        return lines, 1
    return lines, 0 if len(results) == len(cases) else INTERRUPTED


def _check(flags: argparse.Namespace) -> None:
    check_address(flags.url_a, "URL_A")
    check_address(flags.url_b, "URL_B")
    for name, value in (
        ("--at-once", flags.at_once),
        ("--long-prompt-chars", flags.long_prompt_chars),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be a whole number, at least 1, not {value}")
    tolerance = flags.logprob_tolerance
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ConfigError(f"--logprob-tolerance must be a number, at least 0, not {tolerance:g}")


@contextmanager
def show_progress(num_cases: int) -> Iterator[Callable[[Result], None]]:
    """Says on a terminal, on standard error, how far the run is; elsewhere nothing."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    num_done = 0
    with console.status(f"0 of {num_cases} cases") as status:

        def tell(result: Result) -> None:
            nonlocal num_done
            num_done += 1
            case = result.case.name
            status.update(f"{num_done} of {num_cases} cases; {case}: {result.outcome}")

        yield tell


def _key(name: str | None) -> str | None:
    """A key from the environment: on a command line, others could read it."""
    if name is None:
        return None
    if name not in os.environ:
        raise ConfigError(f"the environment has no {name}, which should hold an API key")
    check_key(os.environ[name])
    return os.environ[name]
