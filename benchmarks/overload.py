"""What is left of the throughput when too much is asked for: `python -m benchmarks.overload`.

Requests arrive at 1 to 3 times the rate that the server can answer. See benchmarks/README.md.
Exit code 1 when goodput at the highest load is below 80 % of its peak, an answer is lost, or the
highest load was not as high as meant.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
from rich.console import Console

from benchmarks.order_statistics import percentile
from benchmarks.overload_plot import plot_overload
from benchmarks.printed_table import print_table
from benchmarks.provenance import command_line, commit_description, machine_description
from benchmarks.result_files import table_lines, write_results
from neuron_di.config import EngineOptions, LimitOptions, LogOptions, ServeOptions
from neuron_di.serve import Fleet
from neuron_di.testing import write_random_checkpoint

MODULE = "benchmarks.overload"
PROMISED_SHARE = 0.8
MEANT_SHARE_MIN = 0.9  # of a load as meant: arrivals are random, and capacity is an estimate
PROMPT_TOKENS = 32
FIRST_TOKEN_S_MAX = 2.0  # an answer that begins later is no good to anybody
ANSWER_S_MAX = 60.0  # then it is lost


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. `status` 0: it was lost, that is cut off, refused otherwise or too late."""

    status: int
    first_token_s: float
    done_s: float

    @property
    def is_good(self) -> bool:
        return self.status == 200 and self.first_token_s <= FIRST_TOKEN_S_MAX


@dataclass(frozen=True, slots=True)
class Load:
    """What came of one rate. Rates are per second."""

    times: float
    offered: float
    until_s: float  # from the first request to the end of the last
    goodput: float
    answered: float
    refused: int
    late: int
    lost: int
    first_token_p50_s: float | None  # None: there was none
    first_token_p99_s: float | None
    refusal_p99_s: float | None

    @classmethod
    def of(cls, times: float, outcomes: list[Outcome], sent_s: float, until_s: float) -> "Load":
        """Of requests sent over `sent_s` seconds, the last of which ended after `until_s`."""
        answered = [each for each in outcomes if each.status == 200]
        refused = [each for each in outcomes if each.status in (429, 503)]
        firsts = [each.first_token_s for each in answered]
        statuses = Counter(each.status for each in outcomes)
        num_good = sum(each.is_good for each in outcomes)
        return cls(
            times=times,
            offered=len(outcomes) / sent_s,
            until_s=until_s,
            goodput=num_good / until_s,
            answered=len(answered) / until_s,
            refused=len(refused),
            late=len(answered) - num_good,
            lost=statuses[0],
            first_token_p50_s=percentile(firsts, 50) if firsts else None,
            first_token_p99_s=percentile(firsts, 99) if firsts else None,
            refusal_p99_s=percentile([each.done_s for each in refused], 99) if refused else None,
        )


@dataclass(slots=True)
class Client:
    """Streamed requests, greedy, of a fixed length."""

    session: aiohttp.ClientSession
    url: str
    model: str
    max_tokens: int

    async def ask(self, prompt: list[int]) -> Outcome:
        """One request to its end, whatever that is."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        start_s = time.perf_counter()
        first_s, status, last = float("nan"), 0, b""
        try:
            async with (
                asyncio.timeout(ANSWER_S_MAX),
                self.session.post(f"{self.url}/v1/completions", json=body) as response,
            ):
                async for line in response.content:
                    if last == b"":
                        first_s = time.perf_counter() - start_s
                    last = line.strip() or last
                status = response.status
        except (aiohttp.ClientError, TimeoutError):
            status = 0
        if status == 200 and last != b"data: [DONE]":
            status = 0
        known = status if status in (200, 429, 503) else 0
        return Outcome(known, first_s, time.perf_counter() - start_s)


async def saturate(client: Client, streams: int, duration_s: float) -> float:
    """Answers per second when a fixed number of clients ask without a pause."""
    rng, num_done = random.Random(0), 0
    end_s = time.perf_counter() + duration_s

    async def one() -> None:
        nonlocal num_done
        while time.perf_counter() < end_s:
            outcome = await client.ask(prompt_of(rng))
            num_done += outcome.status == 200

    start_s = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(streams)))
    return num_done / (time.perf_counter() - start_s)


async def offer(client: Client, times: float, rate: float, duration_s: float) -> Load:
    """Send at `rate`, at random moments, whether or not anything is answered."""
    rng = random.Random(times)
    tasks = []
    start_s = time.perf_counter()
    at_s = start_s
    while at_s < start_s + duration_s:
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
        tasks.append(asyncio.create_task(client.ask(prompt_of(rng))))
        at_s += rng.expovariate(rate)
    sent_s = time.perf_counter() - start_s
    outcomes = await asyncio.gather(*tasks)
    return Load.of(times, outcomes, sent_s, time.perf_counter() - start_s)


async def measure(model: Path, options: argparse.Namespace) -> list[Load]:
    """All loads on one fleet, the lightest first, and the lightest again at the end."""
    serve = ServeOptions(
        model=str(model),
        port=0,
        engine=EngineOptions(threads=1, decode_batch=options.slots),
        limits=LimitOptions(queue_max=options.queue),
        log=LogOptions(log_level="warning"),
    )
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        Fleet(serve) as fleet,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
    ):
        client = Client(session, fleet.url, fleet.model_name, options.max_tokens)
        streams = options.slots + options.queue  # the next request waits when a slot gets free
        await saturate(client, streams, 2.0)  # warms everything up
        capacity = await saturate(client, streams, options.seconds)
        rate = capacity or 1.0  # nothing was answered: what comes of the loads will say it
        return [
            await offer(client, times, times * rate, options.seconds)
            for times in [*options.times, options.times[0]]
        ]


def peak_of(loads: Sequence[Load]) -> float:
    """The best goodput: what the server can answer, as measured."""
    return max(load.goodput for load in loads)


def verdict(loads: list[Load]) -> tuple[bool, str]:
    """Whether the promise holds, in words."""
    peak, lost = peak_of(loads), sum(load.lost for load in loads)
    if not peak:
        return False, f"At no load was any answer good; {lost} answers were lost."
    most = max(loads, key=lambda load: load.offered)
    meant = max(load.times for load in loads)
    factor, share = most.offered / peak, most.goodput / peak
    is_enough = factor >= MEANT_SHARE_MIN * meant
    less = "" if is_enough else f" The load was to be {meant:g} times it: this shows too little."
    again = loads[-1].goodput / loads[0].goodput if loads[0].goodput else 0.0
    return share >= PROMISED_SHARE and lost == 0 and is_enough, (
        f"At {factor:.2f} times the peak of goodput, goodput is {share:.0%} of its peak "
        f"(promised: {PROMISED_SHARE:.0%}); {lost} answers were lost.{less} "
        f"The first load, repeated at the end, had {again:.0%} of its goodput."
    )


COLUMNS = (
    *("meant", "offered/s", "of the peak", "good/s", "complete/s", "refused", "late", "lost"),
    *("first token p50", "first token p99", "refusal p99"),
)
LEGEND = (
    f"Good: complete, and begun within {FIRST_TOKEN_S_MAX:g} s. Of the peak: what was offered, as "
    "a multiple of the best good/s. Times in ms, at the client. The first load is "
    "repeated at the end: what differs between the two is the machine"
)


def row_of(load: Load, peak: float) -> list[str]:
    return [
        f"{load.times:g} x",
        f"{load.offered:.1f}",
        f"{load.offered / peak:.2f} x" if peak else "-",
        f"{load.goodput:.1f}",
        f"{load.answered:.1f}",
        *(str(number) for number in (load.refused, load.late, load.lost)),
        _ms(load.first_token_p50_s),
        _ms(load.first_token_p99_s),
        _ms(load.refusal_p99_s),
    ]


def _ms(duration_s: float | None) -> str:
    return "-" if duration_s is None else f"{duration_s * 1e3:.1f}"


def prompt_of(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)]


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    machine, commit = machine_description(), commit_description()
    command = command_line(MODULE, options, parser.parse_args([]))
    console.print(f"[dim]{machine}\n{command}[/dim]", soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="bench-overload-") as folder:
        model = Path(folder) / options.model
        write_random_checkpoint(model, "llama", size=options.model)
        loads = asyncio.run(measure(model, options))
    is_kept, words = verdict(loads)
    table = COLUMNS, [row_of(load, peak_of(loads)) for load in loads]
    print_table(console, *table, left=())
    console.print(f"[dim]{LEGEND}.[/dim]")
    console.print(words)
    lines = [
        "# Too much at once",
        "",
        f"Made by `{command}` on {machine}, at commit {commit}.",
        "",
        words,
        "",
        "![What became of requests, and how long it took](overload.png)",
        "",
        *table_lines(*table, left=()),
        "",
        f"{LEGEND}.",
    ]
    document = {
        "command": command,
        "machine": machine,
        "commit": commit,
        "peak_goodput": peak_of(loads),
        "loads": [asdict(load) for load in loads],
    }
    write_results(options.results, "overload", document, lines, indent=2)
    picture = options.results / "overload.png"
    plot_overload(loads, PROMISED_SHARE, FIRST_TOKEN_S_MAX, machine, picture)
    console.print(f"written: overload.md, .json, .png in {options.results}")
    return 0 if is_kept else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--model", choices=["tiny", "25m", "125m"], default="25m")
    parser.add_argument("--times", type=float, nargs="+", default=[1.0, 1.5, 2.0, 3.0])
    parser.add_argument("--seconds", type=float, default=20.0, help="at each load")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--slots", type=int, default=8, help="of the decode worker")
    parser.add_argument("--queue", type=int, default=8, help="requests that may wait")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
