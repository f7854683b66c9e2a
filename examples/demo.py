"""The demo behind `make demo`: serve the shipped model, chat once, print a receipt.

Starts one prefill worker, one decode worker and the proxy as processes, sends a streaming
chat request with the `openai` client, and prints what each process did for it.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from neuron_di.config import LogOptions, ServeOptions
from neuron_di.errors import NeuronDiError
from neuron_di.serve import Fleet
from neuron_di.serve_terminal import LoadProgress

MODEL = Path(__file__).parent / "models" / "tiny-tales"
QUESTION = "Tell me a story about a fox and a lantern."
ANSWER_TIMEOUT_S = 60.0


async def main(question: str, model: Path) -> int:
    console = Console(highlight=False)
    options = ServeOptions(
        model=str(model), prefill=1, decode=1, port=0, log=LogOptions(log_level="warning")
    )
    with LoadProgress(Console(stderr=True)) as progress:
        fleet = Fleet(options, progress.on_report)
        await fleet.__aenter__()
    try:
        names = ", ".join(f"{name} (pid {pid})" for name, pid in fleet.pids().items())
        console.print(f"[dim]{names} at {fleet.url}[/dim]\n", soft_wrap=True)
        console.print(f"[bold]you[/bold]    {question}\n[bold]model[/bold]  ", end="")
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer_id = await chat(console, fleet, question)
            receipt = await fetch_receipt(fleet, answer_id)
        print_receipt(console, receipt)
    finally:
        await fleet.__aexit__(None, None, None)
    return 0


async def chat(console: Console, fleet: Fleet, question: str) -> str:
    """Print the answer as it arrives. Returns its id."""
    client = AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    answer_id = ""
    async with client:
        stream = await client.chat.completions.create(
            model=fleet.model_name,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=300,
            stream=True,
        )
        async for chunk in stream:
            answer_id = chunk.id
            console.print(
                chunk.choices[0].delta.content or "", end="", soft_wrap=True, markup=False
            )
    console.print("\n")
    return answer_id


async def fetch_receipt(fleet: Fleet, answer_id: str) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{fleet.url}/v1/receipts/{answer_id}") as response,
    ):
        response.raise_for_status()
        receipt: dict[str, Any] = await response.json()
        return receipt


def print_receipt(console: Console, receipt: dict[str, Any]) -> None:
    """Which process did what, and what the hand-over between them cost."""
    table = Table(title="receipt", title_justify="left", box=None, header_style="bold")
    for column in ("worker", "did", "waited", "computed"):
        table.add_column(column, justify="left" if column in ("worker", "did") else "right")
    prefill, decode = receipt["prefill"], receipt["decode"]
    if prefill is None or decode is None or not receipt["transfer_s"]:
        console.print(receipt)  # an answer of one token moves nothing
        return
    table.add_row(
        f"{prefill['worker_id']} (pid {prefill['pid']})",
        f"{receipt['num_prompt']} prompt tokens, token 0",
        ms(prefill["queued_s"]),
        ms(prefill["prefill_s"]),
    )
    table.add_row(
        f"{decode['worker_id']} (pid {decode['pid']})",
        f"tokens 1 to {receipt['num_generated'] - 1}",
        ms(decode["queued_s"]),
        ms(decode["decode_s"]),
    )
    console.print(table)
    took = ms(receipt["transfer_s"])
    if receipt["form"] == "handed_over":
        blocks = f"{decode['kv_blocks']} block{'s' * (decode['kv_blocks'] > 1)}"
        kv = f"{blocks} of KV changed owner in {took}: no byte moved"
    else:
        kv = f"KV moved {receipt['kv_bytes']:,} bytes by {receipt['link']} in {took}"
    console.print(
        f" TTFT {ms(receipt['ttft_s'])}, mean ITL {ms(receipt['itl_mean_s'])}\n {kv}",
        soft_wrap=True,
    )


def ms(duration_s: float) -> str:
    return f"{duration_s * 1000:.2f} ms"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--model", type=Path, default=MODEL)
    arguments = parser.parse_args()
    try:
        sys.exit(asyncio.run(main(arguments.question, arguments.model)))
    except NeuronDiError as error:
        sys.exit(f"demo: {error.message}")
