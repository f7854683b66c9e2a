"""A long prompt arrives while streams decode: `python -m benchmarks.interference`.

1P1D beside combined, every worker on a core of its own. See benchmarks/README.md. Exit code 1
when 1P1D does not keep its promise.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console

from benchmarks.interference_client import Arrival, Client, Stream, random_prompt, streaming
from benchmarks.interference_placement import Placement, placed
from benchmarks.interference_plot import plot_interference
from benchmarks.interference_report import (
    InterferenceReport,
    Observation,
    RoundSummary,
    print_report,
    write_report,
)
from benchmarks.provenance import command_line, machine_description
from neuron_di.config import ByteSize, EngineOptions, LogOptions, ServeOptions
from neuron_di.models import ModelSpec
from neuron_di.serve import Fleet
from neuron_di.testing import write_random_checkpoint

MODULE = "benchmarks.interference"
STREAM_PROMPT_TOKENS = 128
ARRIVAL_NEW_TOKENS = 16
KV_MEMORY = ByteSize(1 << 30)  # room for every stream to reach the end of the context
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to serve. `workers` are in the order in which the fleet hands out cores."""

    name: str
    combined: bool
    workers: list[str]


SETUPS = (
    Setup("1P1D", combined=False, workers=["prefill-0", "decode-0"]),
    Setup("combined", combined=True, workers=["combined-0"]),
)


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    console = Console(highlight=False)
    report = InterferenceReport(
        command=command_line(MODULE, options, parser.parse_args([])),
        machine=machine_description(),
        scene=(
            f"{options.streams} streams decode ({options.model} model), "
            f"prompts of {options.prompt_tokens} tokens arrive"
        ),
        placements={setup.name: str(placement_of(setup)) for setup in SETUPS},
        rounds={setup.name: [] for setup in SETUPS},
    )
    console.print(f"[dim]{report.machine}\n{report.command}[/dim]", soft_wrap=True)
    for name, placement in report.placements.items():
        console.print(f"{name}: {placement}", soft_wrap=True)
    last: dict[str, Observation] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-interference-") as folder,
        console.status("writing the checkpoint") as status,
    ):
        model = Path(folder) / options.model
        write_random_checkpoint(model, "llama", size=options.model)
        for number in range(1, options.rounds + 1):
            for setup in SETUPS:
                status.update(f"round {number}: {setup.name}")
                last[setup.name] = asyncio.run(observe(setup, model, options))
                report.rounds[setup.name].append(RoundSummary.of(last[setup.name]))
    print_report(console, report)
    write_report(report, options.results)
    plot_interference(last, report.scene, options.results / "interference.png")
    console.print(f"written: interference.md, .json, .png in {options.results}")
    return 0 if report.verdict()[0] else 1


async def observe(setup: Setup, model: Path, options: argparse.Namespace) -> Observation:
    """Start the fleet, let the streams run, send the prompts one after another."""
    spec = ModelSpec.from_folder(model)
    source = random.Random(0)
    serve = ServeOptions(
        model=str(model),
        combined=setup.combined,
        pin=True,
        port=0,
        engine=EngineOptions(threads=1, kv_memory=KV_MEMORY),
        log=LogOptions(log_level="warning"),
    )
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        Fleet(serve) as fleet,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
    ):
        with placed(placement_of(setup), fleet.pids()):
            client = Client(session, fleet.url, fleet.model_name)
            prompts = [
                random_prompt(source, spec.num_vocab, options.prompt_tokens)
                for _ in range(options.prompts + 1)
            ]
            await client.send_prompt(prompts.pop(), ARRIVAL_NEW_TOKENS)  # warms everything up
            stream_prompts = [
                random_prompt(source, spec.num_vocab, STREAM_PROMPT_TOKENS)
                for _ in range(options.streams)
            ]
            max_tokens = spec.context_tokens - STREAM_PROMPT_TOKENS
            async with streaming(client, stream_prompts, max_tokens) as streams:
                await asyncio.sleep(SETTLE_S)
                start_s = time.perf_counter()
                arrivals = []
                for prompt in prompts:
                    await asyncio.sleep(options.spacing_s)
                    arrivals.append(await client.send_prompt(prompt, ARRIVAL_NEW_TOKENS))
                await asyncio.sleep(options.spacing_s)
            return observation_of(streams, arrivals, start_s)


def observation_of(streams: list[Stream], arrivals: list[Arrival], start_s: float) -> Observation:
    """The same with times that count from `start_s`; gaps that began earlier are left out."""
    gaps = [
        (end_s - start_s, duration_s)
        for stream in streams
        for end_s, duration_s in stream.gaps()
        if end_s - duration_s >= start_s
    ]
    return Observation(gaps, [arrival.since(start_s) for arrival in arrivals])


def placement_of(setup: Setup) -> Placement:
    return Placement.of(setup.workers, sorted(os.sched_getaffinity(0)))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--model", choices=["25m", "125m"], default="25m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=5, help="that arrive in one round")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--spacing-s", type=float, default=1.0, help="seconds between prompts")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
