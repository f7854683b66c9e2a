"""KV layer by layer, beside whole: `python -m benchmarks.layer_streaming`.

For each lane two servers of one prefill and one decode worker, alike but for `--stream-layers`,
get the same prompts in turns. See benchmarks/README.md. Exit code 1 when `auto` chooses what makes
the first decoded token come later.
"""

import argparse
import asyncio
import importlib.util
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console

from benchmarks.interference_client import Client, Stream, random_prompt
from benchmarks.layer_network import leave_network, slowed_link
from benchmarks.layer_plot import plot_layers
from benchmarks.layer_report import (
    OFF,
    ON,
    Answer,
    Cell,
    LayerReport,
    Turn,
    print_report,
    shortfalls,
    write_report,
)
from benchmarks.process_tree import cpu_s
from benchmarks.provenance import command_line, commit_description, machine_description
from neuron_di.config import (
    ByteSize,
    EngineOptions,
    HandOverOptions,
    LogOptions,
    ServeOptions,
    TransferOptions,
)
from neuron_di.serve import Fleet
from neuron_di.testing import write_random_checkpoint

MODULE = "benchmarks.layer_streaming"
AUTO = "auto"
NUM_VOCAB = 2048
# Little arithmetic beside much KV: 16 KiB a token, what a model 30 times as large would have.
SHAPE = {
    "vocab_size": NUM_VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "rope_scaling": None,
}
SCENE = "A model of 8 layers with 16 KiB of KV a token, 1P1D, chunks of 512 tokens"
KV_MEMORY = ByteSize(512 << 20)
# (cell, how often in a round): short prompts vary more, and cost less.
CELLS = (
    (Cell(32, 1), 16),
    (Cell(128, 1), 8),
    (Cell(512, 1), 4),
    (Cell(2048, 1), 2),
    (Cell(8000, 1), 1),
    (Cell(512, 4), 2),
    (Cell(2048, 4), 1),
)
NEW_TOKENS = 4


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    report = LayerReport(
        command=command_line(MODULE, options, parser.parse_args([])),
        machine=machine_description(),
        commit=commit_description(),
        scene=SCENE,
    )
    console.print(f"[dim]{report.machine}\n{report.command}[/dim]", soft_wrap=True)
    why_not = leave_network() if options.link_gbit else ""
    with tempfile.TemporaryDirectory(prefix="bench-layers-") as folder:
        model = Path(folder) / "model"
        write_random_checkpoint(model, "llama", config=SHAPE)
        for name, engine, gbit_per_s in lanes(options):
            if gbit_per_s is not None and why_not:
                report.left_out[name] = why_not
            elif engine == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
                report.left_out[name] = "the extra nixl is not installed"
            else:
                with slowed_link(gbit_per_s), console.status(name):
                    asyncio.run(measure(name, engine, model, options, report))
    print_report(console, report)
    write_report(report, options.results)
    plot_layers(report, options.results / "layer_streaming.png")
    console.print(f"written: layer_streaming.md, .json, .png in {options.results}")
    return 1 if shortfalls(report) else 0


def lanes(options: argparse.Namespace) -> Iterator[tuple[str, str, float | None]]:
    """(name, transfer engine, Gbit/s of the link or None) of each that is asked for."""
    for engine in options.engines:
        yield engine, engine, None
        if engine == "tcp" and options.link_gbit:
            yield f"tcp, {options.link_gbit:g} Gbit/s", engine, options.link_gbit


@dataclass(frozen=True, slots=True)
class Server:
    """Where the prompts go, and the processes that compute."""

    client: Client
    fleet: Fleet

    def cpu_s(self) -> float:
        """CPU time of its workers so far."""
        return sum(cpu_s(pid) for name, pid in self.fleet.pids().items() if name != "proxy")

    async def turn(self, prompts: list[list[int]]) -> tuple[list[Answer], float]:
        """Ask all at once. The answers, and the workers' CPU seconds for each."""
        before_s = self.cpu_s()
        answers = await asyncio.gather(*(ask(self.client, prompt) for prompt in prompts))
        return list(answers), (self.cpu_s() - before_s) / len(prompts)


async def measure(
    lane: str, engine: str, model: Path, options: argparse.Namespace, report: LayerReport
) -> None:
    """All turns over one lane."""
    loads = [load for load in CELLS if load[0].num_tokens <= options.tokens_max]
    source = random.Random(0)
    async with AsyncExitStack() as stack:
        starting = (serving(model, engine, each, stack) for each in (OFF, ON, AUTO))
        off, on, auto = await asyncio.gather(*starting)
        servers = {OFF: off, ON: on}
        for num_tokens in dict.fromkeys(cell.num_tokens for cell, _ in loads):
            ((chosen,), _) = await auto.turn([random_prompt(source, NUM_VOCAB, num_tokens)])
            report.auto.setdefault(lane, {})[num_tokens] = chosen.form
        for number in range(options.rounds):
            for cell, num_times in loads:
                for place in range(num_times):
                    prompts = [
                        random_prompt(source, NUM_VOCAB, cell.num_tokens)
                        for _ in range(cell.num_at_once)
                    ]
                    for setting in (OFF, ON) if (number + place) % 2 else (ON, OFF):
                        answers, used_s = await servers[setting].turn(prompts)
                        report.turns.append(Turn(lane, cell, setting, number, answers, used_s))


async def serving(model: Path, engine: str, setting: str, stack: AsyncExitStack) -> Server:
    """A server, warm, until the end of the stack."""
    options = ServeOptions(
        model=str(model),
        port=0,
        engine=EngineOptions(threads=1, kv_memory=KV_MEMORY),
        kv_transfer=TransferOptions(transfer=(engine,)),
        hand_over=HandOverOptions(stream_layers=setting),  # type: ignore[arg-type]
        log=LogOptions(log_level="error"),
    )
    fleet = await stack.enter_async_context(Fleet(options))
    timeout = aiohttp.ClientTimeout(total=None)
    session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
    server = Server(Client(session, fleet.url, fleet.model_name), fleet)
    source = random.Random(1)
    # The first connects, and makes it known that layers are wanted.
    for num_tokens in (64, 64, 2048):
        await server.turn([random_prompt(source, NUM_VOCAB, num_tokens)])
    return server


async def ask(client: Client, prompt: list[int]) -> Answer:
    stream = Stream()
    sent_s = time.perf_counter()
    answer_id = await client.run_stream(prompt, NEW_TOKENS, stream)
    async with client.session.get(f"{client.url}/v1/receipts/{answer_id}") as response:
        response.raise_for_status()
        receipt = await response.json()
    return Answer(
        first_s=stream.token_s[0] - sent_s,
        second_s=stream.token_s[1] - sent_s,
        kv_bytes=receipt["kv_bytes"],
        form=receipt["form"],
        verify_s=receipt["verify_s"],
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["tcp", "nixl", "shm"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens-max", type=int, default=8000, help="of a prompt")
    parser.add_argument(
        "--link-gbit",
        type=float,
        default=10.0,
        help="tcp over a loopback of so many Gbit/s, too, where this runs as root; 0: not",
    )
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
