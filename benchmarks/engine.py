"""Engines side by side: `python -m benchmarks.engine`. See benchmarks/README.md."""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.contender_process import Contender, loaded
from benchmarks.contenders.command_loop import Settings
from benchmarks.engine_plot import plot_engines
from benchmarks.engine_profile import profile_engine
from benchmarks.engine_report import EngineReport, print_model, write_report
from benchmarks.engine_rounds import (
    BATCH_MAX,
    LONG_PROMPT_TOKENS,
    PROMPT_TOKENS,
    Outcome,
    measure,
)
from benchmarks.line_process import ProcessFailed
from benchmarks.provenance import choose_cores, command_line, machine_description
from neuron_di.models import ModelSpec
from neuron_di.testing import write_random_checkpoint

MODULE = "benchmarks.engine"
OURS = Contender("neuron-di", "benchmarks.contenders.ours")
HUGGING_FACE = Contender("Hugging Face", "benchmarks.contenders.hugging_face")
KV_BYTES = 256 << 20  # room for BATCH_MAX contexts of the larger model


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # contenders are ended then, too
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
        models = {size: Path(folder) / size for size in options.models}
        for size, model in models.items():
            with console.status(f"writing the {size} checkpoint"):
                write_random_checkpoint(model, "llama", size=size)
        if options.profile:
            os.sched_setaffinity(0, choose_cores(options.threads, os.sched_getaffinity(0)))
            for size, model in models.items():
                for dtype in options.dtype:
                    profile_engine(console, f"{size} {dtype}", settings_of(model, dtype, options))
            return 0
        return compare(console, options, models, parser.parse_args([]))


def compare(
    console: Console,
    options: argparse.Namespace,
    models: dict[str, Path],
    defaults: argparse.Namespace,
) -> int:
    report = EngineReport(
        command=command_line(MODULE, options, defaults),
        machine=machine_description(),
        ours=OURS.name,
        num_rounds=options.rounds,
        new_tokens=options.new_tokens,
        threads=options.threads,
        outcomes={},
    )
    console.print(f"[dim]{report.machine}\n{report.command}[/dim]", soft_wrap=True)
    for size, model in models.items():
        for dtype in options.dtype:
            title = f"{size} {dtype}"
            try:
                report.outcomes[title] = compare_on(console, title, model, dtype, options)
            except ProcessFailed as failure:
                console.print(str(failure), markup=False)
                return 1
            print_model(console, report, title)
    write_report(report, options.results)
    plot_engines(report, options.results / "engine.png")
    console.print(f"written: engine.md, engine.json, engine.png in {options.results}")
    return 0


def compare_on(
    console: Console, title: str, model: Path, dtype: str, options: argparse.Namespace
) -> Outcome:
    """All contenders on one model, loaded for this and ended after it."""
    cores = choose_cores(options.threads, os.sched_getaffinity(0))
    with (
        console.status(f"{title}: loading") as status,
        loaded(contenders(options), settings_of(model, dtype, options)) as running,
    ):
        for process in running:
            process.pin(cores)
        return measure(
            running,
            num_vocab=ModelSpec.from_folder(model).num_vocab,
            num_rounds=options.rounds,
            new_tokens=options.new_tokens,
            on_turn=lambda turn: status.update(f"{title}: {turn}"),
        )


def contenders(options: argparse.Namespace) -> list[Contender]:
    chosen = [OURS, HUGGING_FACE]
    if options.vllm_python is not None:
        module, python = "benchmarks.contenders.vllm_cpu", str(options.vllm_python)
        chosen += [
            Contender("vLLM eager", module, python),
            Contender("vLLM compiled", module, python, compiled=True),
        ]
    return chosen


def settings_of(model: Path, dtype: str, options: argparse.Namespace) -> Settings:
    return Settings(
        model=str(model),
        dtype=dtype,
        threads=options.threads,
        batch_max=BATCH_MAX,
        context_tokens=LONG_PROMPT_TOKENS + 304,
        step_tokens=BATCH_MAX * PROMPT_TOKENS,
        kv_bytes=KV_BYTES,
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=["25m", "125m"], default=["25m", "125m"])
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--new-tokens", type=int, default=65, help="of the longer generation; decode is n - 1 steps"
    )
    parser.add_argument("--threads", type=int, default=1, help="and cores, for each contender")
    named = os.environ.get("VLLM_PYTHON")
    parser.add_argument(
        "--vllm-python",
        type=Path,
        default=Path(named) if named else None,
        help="a Python that has vllm-cpu; default: the variable VLLM_PYTHON, else without vLLM",
    )
    parser.add_argument(
        "--profile", action="store_true", help="instead, print where our engine's time goes"
    )
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
