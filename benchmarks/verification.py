"""What verified KV costs: `python -m benchmarks.verification`.

Every hand-over is digested by the prefill worker and compared by the decode worker. Both report
how long that took, and the proxy how long the client waited for the first token: all three from
the same requests. See benchmarks/README.md. Exit code 1 when it costs more than promised.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.interference_client import Client, random_prompt
from benchmarks.order_statistics import Spread
from benchmarks.provenance import command_line, commit_description, machine_description
from benchmarks.result_files import table_lines, write_results
from benchmarks.verification_plot import plot_verification
from neuron_di.config import EngineOptions, LogOptions, ServeOptions
from neuron_di.models import ModelSpec
from neuron_di.serve import Fleet
from neuron_di.testing import write_random_checkpoint

MODULE = "benchmarks.verification"
PROMISED_SHARE = 0.02  # of TTFT, both workers' work together
NEW_TOKENS = 4
COLUMNS = ("model", "prompt", "KV", "TTFT", "digest", "verify", "µs/MB", "% of TTFT")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Seconds, and bytes of its prompt's KV, which change their owner and stay."""

    kv_bytes: int
    ttft_s: float
    digest_s: float
    verify_s: float

    def share(self) -> float:
        return (self.digest_s + self.verify_s) / self.ttft_s

    def us_per_mb(self) -> float:
        return (self.digest_s + self.verify_s) * 1e6 / (self.kv_bytes / 1e6)


@dataclass(frozen=True, slots=True)
class Series:
    """All requests of one model and prompt length."""

    model: str
    prompt_tokens: int
    samples: list[Sample]

    def row(self, *, with_ranges: bool) -> tuple[str, ...]:
        """Medians, with the least and the most in brackets if wanted."""
        samples = self.samples

        def words(values: list[float], digits: int = 1) -> str:
            spread = Spread.of(values)
            text = f"{spread.median:,.{digits}f}"
            if with_ranges:
                text += f" ({spread.least:,.{digits}f} to {spread.most:,.{digits}f})"
            return text

        return (
            self.model,
            f"{self.prompt_tokens:,}",
            f"{samples[0].kv_bytes / 1e6:,.1f} MB",
            words([sample.ttft_s * 1e3 for sample in samples]) + " ms",
            words([sample.digest_s * 1e3 for sample in samples], 2) + " ms",
            words([sample.verify_s * 1e3 for sample in samples], 2) + " ms",
            words([sample.us_per_mb() for sample in samples], 0),
            words([sample.share() * 100 for sample in samples], 2),
        )

    def median_share(self) -> float:
        return Spread.of(sample.share() for sample in self.samples).median


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    console = Console(highlight=False)
    command = command_line(MODULE, options, parser.parse_args([]))
    console.print(f"[dim]{machine_description()}\n{command}[/dim]", soft_wrap=True)
    series: list[Series] = []
    with tempfile.TemporaryDirectory(prefix="bench-verification-") as folder:
        for size in options.models:
            model = Path(folder) / size
            write_random_checkpoint(model, "llama", size=size)
            series += asyncio.run(measure(model, size, options))
    print_table(console, series)
    console.print(verdict(series))
    write(series, command, options.results)
    return 0 if is_kept(series) else 1


async def measure(model: Path, size: str, options: argparse.Namespace) -> list[Series]:
    """Rounds of one request per prompt length, so that noise meets all lengths."""
    spec, source = ModelSpec.from_folder(model), random.Random(0)
    layout = spec.kv_layout(block_size=EngineOptions().block_size, dtype="float32")
    series = [Series(size, num_tokens, []) for num_tokens in options.prompt_tokens]
    serve = ServeOptions(
        model=str(model),
        port=0,
        pin=True,
        engine=EngineOptions(threads=1),
        log=LogOptions(log_level="warning"),
    )
    async with Fleet(serve) as fleet, aiohttp.ClientSession() as session:
        client = Client(session, fleet.url, fleet.model_name)
        for number in range(options.rounds + 1):
            for each in series:
                prompt = random_prompt(source, spec.num_vocab, each.prompt_tokens)
                receipt = await client.receipt_of(prompt, NEW_TOKENS)
                if number:  # the first round warms up
                    num_blocks = layout.num_blocks_for(each.prompt_tokens)
                    each.samples.append(sample_of(receipt, num_blocks * layout.block_bytes))
    return series


def sample_of(receipt: dict, kv_bytes: int) -> Sample:
    return Sample(
        kv_bytes=kv_bytes,
        ttft_s=receipt["ttft_s"],
        digest_s=receipt["prefill"]["verify_s"],
        verify_s=receipt["decode"]["verify_s"],
    )


def is_kept(series: list[Series]) -> bool:
    return all(each.median_share() <= PROMISED_SHARE for each in series)


def verdict(series: list[Series]) -> str:
    worst = max(series, key=Series.median_share)
    return (
        f"Digest and verification together cost at most {worst.median_share():.2%} of TTFT "
        f"(median; {worst.model}, {worst.prompt_tokens:,} tokens), which is "
        f"{'within' if is_kept(series) else 'NOT within'} the {PROMISED_SHARE:.0%} promised."
    )


def print_table(console: Console, series: list[Series]) -> None:
    table = Table(title="Verified KV: what it costs", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "model" else "right")
    for each in series:
        table.add_row(*each.row(with_ranges=False))
    console.print(table)


def write(series: list[Series], command: str, folder: Path) -> None:
    lines = [
        "# Verified KV: what it costs",
        "",
        f"Made by `{command}` on {machine_description()}, at commit {commit_description()}.",
        "",
        f"1P1D, a core for each worker, {len(series[0].samples)} requests per row: median (range).",
        "",
        "Blocks change owner, no byte moves.",
        "",
        *table_lines(COLUMNS, [each.row(with_ranges=True) for each in series]),
        "",
        "*digest*: by the prefill worker; *verify*: by the decode worker; then both together.",
        "",
        verdict(series),
        "",
        "![Share of TTFT by size of the KV](verification.png)",
    ]
    write_results(folder, "verification", [asdict(each) for each in series], lines)
    shares = {
        f"{each.model}, {each.prompt_tokens:,} tokens": [100 * s.share() for s in each.samples]
        for each in series
    }
    plot_verification(shares, 100 * PROMISED_SHARE, folder / "verification.png")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["25m", "125m"], choices=["25m", "125m"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 512, 2000])
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
