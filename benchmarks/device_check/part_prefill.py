"""Prompts of 4k and 16k tokens: how much of the measured bf16 matrix rate their prefill has."""

from pathlib import Path
from statistics import median

from benchmarks.device_check.device_model import DeviceModel, device_model, prefill_flops
from benchmarks.device_check.models import checkpoint
from benchmarks.device_check.rates import matrix_flops_per_s, timed_s
from benchmarks.device_check.record import Record
from benchmarks.device_check.settings import Settings

_COLUMNS = ["prompt", "chunk", "s", "tokens/s", "TFLOP/s", "of the matrix rate"]


def measure(settings: Settings, record: Record) -> None:
    rate = matrix_flops_per_s(settings)
    record.note(f"The product of matrices has {rate / 1e12:.0f} TFLOP/s.")
    record.note("The target's figure is the best chunk's. Causal attention counts by half.")
    for shape in settings.shapes:
        rows: list[list[str]] = []
        for length in prompt_lengths(settings):
            best = 0.0
            for chunk in chunks(settings):
                folder = checkpoint(shape, Path(settings.models))
                with device_model(
                    folder,
                    device=settings.device,
                    dtype="bfloat16",
                    num_tokens=length + 16,
                    context_tokens=length + 16,
                    decode_batch=1,
                    chunk_tokens=chunk,
                ) as model:
                    duration_s = prefill_s(model, length, settings)
                    flops = prefill_flops(model.spec, length) / duration_s
                best = max(best, flops / rate)
                rows.append(
                    [
                        f"{length:,}",
                        f"{chunk:,}",
                        f"{duration_s:.4f}",
                        f"{length / duration_s:,.0f}",
                        f"{flops / 1e12:.0f}",
                        f"{flops / rate:.2f}",
                    ]
                )
                record.table(f"Prefill, {shape} bfloat16", _COLUMNS, rows)
            record.figure("prefill_rate", f"{shape}, {length:,} tokens", best)


def prompt_lengths(settings: Settings) -> tuple[int, ...]:
    return (40,) if settings.is_small else (4096, 16_384)


def chunks(settings: Settings) -> tuple[int, ...]:
    """The default of `--chunk-tokens` first."""
    return (16, 32) if settings.is_small else (2048, 512, 8192)


def prefill_s(model: DeviceModel, length: int, settings: Settings) -> float:
    """Median seconds of one prompt from its first chunk to its last logits."""
    model.forget()
    request = model.request(length, 1)

    def once() -> None:
        request.num_computed = 0
        int(model.prefill(request).argmax())

    return median(timed_s(once, warm_ups=settings.pick(2, 1, 0), repeats=settings.pick(5, 3, 1)))
