"""Decode steps: how much of the memory's bandwidth they use, and how they compare with generate.

A step is what the engine's thread waits for: the backend's call and the tokens on the host.
"""

from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.device_check.device_model import device_model, step_bytes
from benchmarks.device_check.generation import Sides
from benchmarks.device_check.models import checkpoint
from benchmarks.device_check.rates import copy_bytes_per_s, timed_s
from benchmarks.device_check.record import Record
from benchmarks.device_check.settings import Settings
from neuron_di.models import ModelSpec

PLOT_NAME = "decode.png"
BATCHES = (1, 8, 64)
_COLUMNS = [
    *("batch", "context", "step, ms", "least to most", "read, GB", "TB/s", "of the copy"),
    "tokens/s",
]


def measure(settings: Settings, record: Record) -> None:
    copy_rate = copy_bytes_per_s(settings)
    record.note(f"The copy reads and writes {copy_rate / 1e12:.2f} TB/s.")
    shares: dict[str, dict[int, float]] = {}
    for shape in settings.shapes:
        folder = checkpoint(shape, Path(settings.models))
        shares[shape] = {}
        steps_s = measure_steps(settings, record, shape, folder, copy_rate, shares[shape])
        plot(settings, record, shares)
        compare_with_generate(settings, record, shape, folder, steps_s)


def plot(settings: Settings, record: Record, shares: dict[str, dict[int, float]]) -> None:
    if find_spec("matplotlib") is None:
        return
    from benchmarks.device_check.decode_plot import plot_decode

    plot_decode(shares, Path(settings.out) / PLOT_NAME)
    if PLOT_NAME not in record.result.plots:
        record.plot(PLOT_NAME)


def batches(settings: Settings) -> tuple[int, ...]:
    return (1, 2) if settings.is_small else BATCHES


def measure_steps(
    settings: Settings,
    record: Record,
    shape: str,
    folder: Path,
    copy_rate: float,
    shares: dict[int, float],
) -> dict[int, float]:
    """Median seconds of a step by batch; `shares` gets what part of the copy's rate that is."""
    context = settings.pick(1024, 1024, 20)
    spec = ModelSpec.from_folder(folder)
    rows: list[list[str]] = []
    steps_s: dict[int, float] = {}
    with device_model(
        folder,
        device=settings.device,
        dtype="bfloat16",
        num_tokens=max(batches(settings)) * (context + 16),
        context_tokens=context + 16,
        decode_batch=max(batches(settings)),
    ) as model:
        record.note(f"{shape} computes as: {model.backend.numerics or 'no numerics said'}.")
        for batch in batches(settings):
            model.forget()
            decoding = model.decoding(batch, context)
            durations_s = timed_s(
                lambda: model.step(decoding),  # noqa: B023 - called in this turn only
                warm_ups=settings.pick(10, 10, 1),
                repeats=settings.pick(100, 50, 2),
            )
            step_s = steps_s[batch] = median(durations_s)
            num_bytes = step_bytes(spec, [context] * batch, 2)
            rate = num_bytes / step_s
            shares[batch] = rate / copy_rate
            rows.append(
                [
                    str(batch),
                    str(context),
                    f"{step_s * 1e3:.3f}",
                    f"{min(durations_s) * 1e3:.3f} to {max(durations_s) * 1e3:.3f}",
                    f"{num_bytes / 1e9:.2f}",
                    f"{rate / 1e12:.2f}",
                    f"{rate / copy_rate:.2f}",
                    f"{batch / step_s:,.0f}",
                ]
            )
            record.table(f"Steps, {shape} bfloat16", _COLUMNS, rows)
            record.figure("decode_roofline", f"{shape}, batch {batch}", rate / copy_rate)
    return steps_s


def compare_with_generate(
    settings: Settings, record: Record, shape: str, folder: Path, steps_s: dict[int, float]
) -> None:
    """Tokens/s of whole generations. Where `LLM` cannot run here, of our steps alone."""
    rows = []
    with Sides(settings, folder, max(batches(settings))) as sides:
        for words in sides.words:
            record.note(f"{shape}: {words}")
        for batch in batches(settings):
            ours, theirs = sides.tokens_per_s(batch)
            by_steps = batch / steps_s[batch]
            ratio = (ours or by_steps) / theirs if theirs else None
            rows.append(
                [
                    str(batch),
                    f"{ours:,.0f}" if ours else "-",
                    f"{by_steps:,.0f}",
                    f"{theirs:,.0f}" if theirs else "-",
                    f"{ratio:.2f}" if ratio else "-",
                ]
            )
            columns = ["batch", "LLM.generate", "our steps alone", "Hugging Face", "ratio"]
            record.table(f"Decoded tokens/s, {shape} bfloat16", columns, rows)
            if ratio is not None:
                of = "LLM.generate" if ours else "our steps alone"
                record.figure("decode_hugging_face", f"{shape}, batch {batch}, {of}", ratio)
