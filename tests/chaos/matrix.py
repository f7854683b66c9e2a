"""The whole matrix on real processes: python -m tests.chaos.matrix --repeats 3

Each case runs on one pair of six workers, with the limits that users get. The report
goes to standard output and, with --output, to a file.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.provenance import command_line, machine_description
from neuron_di.clock import now_s
from neuron_di.testing import write_random_checkpoint

from .case import Requests, run_case
from .cluster import Cluster
from .fault import PHASES, Fault, Phase
from .faults import FAULTS
from .report import CaseReport, table
from .settings import DEFAULTS, QUICK


async def run_matrix(
    cases: list[tuple[Fault, Phase]], *, is_quick: bool, transfer: str
) -> list[CaseReport]:
    """Run all cases on one cluster, in this order."""
    reports: list[CaseReport] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_checkpoint(folder / "model", "llama")
        settings = replace(QUICK if is_quick else DEFAULTS, transfer=transfer)
        async with Cluster(
            folder / "model", folder / "sync", settings, prefill=3, decode=3
        ) as cluster:
            requests = await Requests.learn(cluster)
            for number, (fault, phase) in enumerate(cases):
                start_s = now_s()
                report = await run_case(cluster, fault, phase, requests, number)
                reports.append(report)
                words = "; ".join(report.failures) or "as it should be"
                took_s = now_s() - start_s
                sys.stderr.write(f"{fault.name} {phase} {took_s:.1f} s: {words}\n")
    return reports


def _cases(names: list[str], phases: list[str], repeats: int) -> list[tuple[Fault, Phase]]:
    return [
        (FAULTS[name], phase)
        for _ in range(repeats)
        for phase in PHASES
        for name in names
        if phase in phases and phase in FAULTS[name].outcomes
    ]


def main() -> int:
    """0 when every run is as it should be."""
    parser = _parser()
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases = _cases(arguments.faults, arguments.phases, arguments.repeats)
    if not cases:
        parser.error("these --faults at these --phases are no case: nothing would be tried")
    start_s = now_s()
    reports = asyncio.run(run_matrix(cases, is_quick=arguments.quick, transfer=arguments.transfer))
    command = command_line("tests.chaos.matrix", arguments, parser.parse_args([]))
    lines = [
        "# Faults on real processes",
        "",
        f"`{command}` took {now_s() - start_s:.0f} s on {machine_description()}.",
        "",
        "```",
        *table(reports),
        "```",
        "",
        *(f"- {name}: {FAULTS[name].title}" for name in arguments.faults),
    ]
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    return 0 if all(report.is_good for report in reports) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.matrix", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--faults", nargs="+", default=sorted(FAULTS), choices=sorted(FAULTS))
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES)
    parser.add_argument("--quick", action="store_true", help="with the shorter limits of the tests")
    parser.add_argument("--transfer", default="auto", help="what may move KV, as for a worker")
    parser.add_argument("--output", type=Path, help="write the report to this file too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
