"""The batch-invariant mode: whether rows are what they are alone, bit for bit, and its cost."""

from pathlib import Path
from statistics import median

import torch

from benchmarks.device_check.device_model import DeviceModel, device_model
from benchmarks.device_check.models import checkpoint
from benchmarks.device_check.part_decode import batches
from benchmarks.device_check.part_prefill import prefill_s
from benchmarks.device_check.rates import timed_s
from benchmarks.device_check.record import Record, Skip
from benchmarks.device_check.settings import Settings
from neuron_di.core import DecodeBatch


def measure(settings: Settings, record: Record) -> None:
    if settings.device == "cpu":
        raise Skip("the CPU backend has no such mode")
    for shape in settings.shapes:
        folder = checkpoint(shape, Path(settings.models))
        plain = run(settings, folder, batch_invariant=False)
        invariant = run(settings, folder, batch_invariant=True)
        rows = [
            [what, f"{plain.times_s[what] * 1e3:.3f}", f"{invariant.times_s[what] * 1e3:.3f}",
             f"{invariant.times_s[what] / plain.times_s[what]:.2f}"]
            for what in plain.times_s
        ]  # fmt: skip
        columns = ["", "as usual, ms", "batch-invariant, ms", "times"]
        record.table(f"Batch-invariant mode, {shape} bfloat16", columns, rows)
        for what in plain.times_s:
            times = invariant.times_s[what] / plain.times_s[what]
            record.figure("", f"batch-invariant mode, {shape}, {what}: times as long", times)
        record.note(
            f"{shape}: of {invariant.num_rows} rows computed with others, {plain.num_differing} "
            f"differ from the same row alone as usual, {invariant.num_differing} in that mode."
        )
        record.figure("invariant_rows", shape, invariant.num_differing)


class Run:
    """Medians by what was timed, and how many rows depend on who shares their batch."""

    def __init__(self) -> None:
        self.times_s: dict[str, float] = {}
        self.num_rows = 0
        self.num_differing = 0


def run(settings: Settings, folder: Path, *, batch_invariant: bool) -> Run:
    context, length = settings.pick(1024, 1024, 20), settings.pick(4096, 4096, 40)
    result = Run()
    with device_model(
        folder,
        device=settings.device,
        dtype="bfloat16",
        num_tokens=max(batches(settings)) * (context + 16) + length + 16,
        context_tokens=length + 16,
        decode_batch=max(batches(settings)),
        chunk_tokens=settings.pick(2048, 2048, 16),
        batch_invariant=batch_invariant,
    ) as model:
        for batch in batches(settings):
            model.forget()
            decoding = model.decoding(batch, context)
            durations_s = timed_s(
                lambda: model.step(decoding),  # noqa: B023 - called in this turn only
                warm_ups=settings.pick(10, 5, 1),
                repeats=settings.pick(50, 30, 1),
            )
            result.times_s[f"decode step, batch {batch}"] = median(durations_s)
        count_differing(model, decoding, result)
        result.times_s[f"prefill of {length:,} tokens"] = prefill_s(model, length, settings)
    return result


def count_differing(model: DeviceModel, decoding: DecodeBatch, result: Run) -> None:
    """Each row of the batch beside itself alone."""
    together_BV = model.logits(decoding)
    for row_V, request in zip(together_BV, decoding.requests, strict=True):
        alone_V = model.logits(DecodeBatch((request,)))[0]
        result.num_rows += 1
        result.num_differing += not torch.equal(row_V, alone_V)
