"""One GPU: a prefill and a decode worker that share it, beside one worker that does both.

A Poisson load with long prompts, from the product's own benchmark: the same requests for each, in
slices that take turns. All servers are loaded; those whose turn it is not have nothing to do.
"""

import asyncio
import importlib.util
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.device_check.fleets import fleet, mps
from benchmarks.device_check.models import checkpoint
from benchmarks.device_check.record import Record
from benchmarks.device_check.settings import Settings
from neuron_di.bench.document import Document
from neuron_di.bench.plot import plot
from neuron_di.bench.run import View, bench
from neuron_di.bench.settings import make_settings
from neuron_di.bench.statistics import Summary
from neuron_di.bench.summary import summarize
from neuron_di.serve import Fleet

PLOT_NAME = "pair.png"
_COLUMNS = [
    *("", "answers", "failed", "TTFT p50, ms", "p99", "ITL p50, ms", "p99", "max"),
    "tokens/s",
]


def measure(settings: Settings, record: Record) -> None:
    shape = settings.shapes[-1]
    document = asyncio.run(run(settings, record, checkpoint(shape, Path(settings.models))))
    record.note(f"{shape}, {document.load}; {document.lengths}.")
    record.note("Green contexts: neuron-di has no option for them, so they were not measured.")
    rows = []
    for each in document.endpoints:
        figures = each.figures
        rows.append(
            [
                each.name,
                str(figures.num_ok),
                str(figures.num_failed),
                *_times(figures.ttft_ms, "p50", "p99"),
                *_times(figures.itl_ms, "p50", "p99", "max"),
                f"{each.output_tokens_per_s:,.0f}",
            ]
        )
    record.table(f"Seen by the client, {shape}", _COLUMNS, rows)
    ratios = [
        [f"{each.figure}, {each.name} / {each.over}", f"{each.median:.2f}",
         f"{each.least:.2f} to {each.most:.2f}"]
        for each in document.ratios
    ]  # fmt: skip
    if ratios:
        record.table("Ratios, slice by slice", ["", "median", "least to most"], ratios)
    for warning in document.client.warnings:
        record.note(f"The client: {warning}")
    if importlib.util.find_spec("matplotlib") is None:
        record.note("No plot: matplotlib is missing.")
    else:
        plot(document, Path(settings.out) / PLOT_NAME)
        record.plot(PLOT_NAME)
    num_failed = sum(each.figures.num_failed for each in document.endpoints)
    if num_failed:
        raise RuntimeError(f"{num_failed} requests failed")


async def run(settings: Settings, record: Record, model: Path) -> Document:
    """Start them one after the other, then measure all."""
    async with AsyncExitStack() as stack:
        fleets = {
            "combined": await stack.enter_async_context(fleet(settings, model, combined=True)),
            "1P1D": await stack.enter_async_context(fleet(settings, model)),
        }
        if settings.wants_mps:
            with mps() as is_there:
                if is_there:
                    fleets["1P1D, MPS"] = await stack.enter_async_context(fleet(settings, model))
                else:
                    record.note("MPS is not available on this machine.")
                return await load(settings, fleets)
        record.note("Without MPS: --mps starts a server of it.")
        return await load(settings, fleets)


async def load(settings: Settings, fleets: dict[str, Fleet]) -> Document:
    is_small = settings.is_small
    given: dict[str, Any] = {
        "rate": 4.0 if is_small else 2.0,
        "requests": settings.pick(80, 32, 4),
        "slices": 2 if is_small else 4,
        "warmup": 1 if is_small else 4,
        "input_tokens": "uniform:24,90" if is_small else "uniform:1000,8000",
        "output_tokens": "8" if is_small else "128",
        "urls": tuple(each.url for each in fleets.values()),
        "names": tuple(fleets),
        "timeout_s": 120.0,
    }
    return summarize(await bench(make_settings(given), None, None, View()))


def _times(summary: Summary | None, *names: str) -> list[str]:
    if summary is None:
        return ["-"] * len(names)
    return [f"{getattr(summary, name):,.1f}" for name in names]
