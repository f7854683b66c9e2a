"""Where the time of a decode step and of a prefill goes: kernel by kernel, and between them.

What limits a figure is read here. The profiler slows the host down: read the shares.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.device_check.device_model import device_model
from benchmarks.device_check.models import checkpoint
from benchmarks.device_check.part_decode import batches
from benchmarks.device_check.rates import synchronize
from benchmarks.device_check.record import Record
from benchmarks.device_check.settings import Settings

_ROWS = 14
_NAME_CHARS_MAX = 90
_COLUMNS = ["kernel", "calls", "µs each", "of the kernels' time"]


def measure(settings: Settings, record: Record) -> None:
    context, length = settings.pick(1024, 1024, 20), settings.pick(4096, 4096, 40)
    for shape in settings.shapes:
        with device_model(
            checkpoint(shape, Path(settings.models)),
            device=settings.device,
            dtype="bfloat16",
            num_tokens=max(batches(settings)) * (context + 16) + length + 16,
            context_tokens=length + 16,
            decode_batch=max(batches(settings)),
            chunk_tokens=settings.pick(2048, 2048, 16),
        ) as model:
            for batch in (batches(settings)[0], batches(settings)[-1]):
                model.forget()
                decoding = model.decoding(batch, context)
                title = f"{shape}, decode step, batch {batch}"
                look(
                    record,
                    title,
                    lambda: model.step(decoding),  # noqa: B023 - called in this turn only
                    repeats=settings.pick(10, 10, 1),
                )
            request = model.request(length, 1)

            def prefill() -> None:
                request.num_computed = 0  # noqa: B023 - called in this turn only
                model.prefill(request)  # noqa: B023

            look(record, f"{shape}, prefill of {length:,} tokens", prefill, repeats=1)


def look(record: Record, title: str, call: Callable[[], object], *, repeats: int) -> None:
    """A table of what takes the time, and a note of how much of the wall time it is."""
    on_gpu = torch.cuda.is_available()
    for _ in range(2):
        call()
    synchronize()
    start_s = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    wall_us = (time.perf_counter() - start_s) * 1e6
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for _ in range(repeats):
            call()
        synchronize()
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events: list[Any] = [each for each in seen.key_averages() if getattr(each, field) > 0]
    events.sort(key=lambda each: -getattr(each, field))
    total_us = sum(getattr(each, field) for each in events)
    if not events:
        record.note(f"{title}: the profiler saw nothing.")
        return
    rows = [
        [
            each.key[:_NAME_CHARS_MAX],
            f"{each.count / repeats:g}",
            f"{getattr(each, field) / each.count:.1f}",
            f"{getattr(each, field) / total_us:.1%}",
        ]
        for each in events[:_ROWS]
    ]
    record.table(title, _COLUMNS, rows)
    record.note(
        f"{title}: {wall_us / repeats:,.0f} µs without the profiler, kernels "
        f"{total_us / repeats:,.0f} µs: {1 - min(1.0, total_us / wall_us):.0%} of the time none."
    )
