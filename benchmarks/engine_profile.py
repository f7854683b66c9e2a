"""Where our engine's time goes: prefill by torch operator, a decode step by layer of code."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.contenders.command_loop import Settings
from benchmarks.contenders.ours import load
from benchmarks.engine_rounds import BATCH_MAX, LONG_PROMPT_TOKENS, PROMPT_TOKENS
from neuron_di.backends.cpu import CpuBackend
from neuron_di.engine import Engine, engine
from neuron_di_bindings import cpu_kernels

NUM_OPERATORS = 12
_DECODE_TOKENS = 65
_SHORT_PROMPT_TOKENS = 16

Spans = list[tuple[float, float]]  # (start, end) of each call, in seconds


@dataclass(slots=True)
class _Stopwatch:
    """Notes when each wrapped function ran."""

    spans: dict[str, Spans] = field(default_factory=dict)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        spans = self.spans.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spans.append((start_s, time.perf_counter()))

        return timed


def profile_engine(console: Console, title: str, settings: Settings) -> None:
    """Print both tables for one model, computed in this process."""
    _, generate = load(settings)
    prompt = list(range(LONG_PROMPT_TOKENS))
    for num_tokens in (PROMPT_TOKENS, LONG_PROMPT_TOKENS):
        generate([prompt[:num_tokens]], 1)
        _print_prefill(
            console, f"{title}: prefill of {num_tokens} tokens", generate, prompt[:num_tokens]
        )
    table = Table(title=f"{title}: one decode step, ms", title_justify="left")
    for column in (
        "batch",
        "context",
        "whole",
        "kernel",
        "backend",
        "sampling",
        "engine",
        "between",
    ):
        table.add_column(column, justify="right")
    for batch in (1, BATCH_MAX):
        for context in (_SHORT_PROMPT_TOKENS, PROMPT_TOKENS):
            with _timed_decode() as watch:
                generate([prompt[:context]] * batch, _DECODE_TOKENS)
            parts = decode_parts_ms(watch.spans)
            table.add_row(str(batch), str(context), *(f"{part:.3f}" for part in parts))
    console.print(table)


def decode_parts_ms(spans: dict[str, Spans]) -> tuple[float, ...]:
    """A step's mean duration and what it is made of.

    The kernel, the rest of the backend's call, sampling, the rest of the engine's step, and
    what passes between steps: reading the inbox, handing out events.
    """
    kernels, backends = spans["kernel"], spans["backend"]
    steps = [step for step in spans["step"] if _holds(step, backends)]
    samples = [sample for sample in spans["sample"] if _is_within(sample, steps)]
    num = len(steps)
    # From the start of the first step to the start of the last, so that there are as many
    # gaps between steps as there are steps.
    whole_s = (steps[-1][0] - steps[0][0]) / (num - 1)
    kernel_s, backend_s, sample_s, step_s = (
        _total_s(part) / num for part in (kernels, backends, samples, steps)
    )
    parts_s = (
        whole_s,
        kernel_s,
        backend_s - kernel_s,
        sample_s,
        step_s - backend_s - sample_s,
        whole_s - step_s,
    )
    return tuple(part * 1000 for part in parts_s)


@contextmanager
def _timed_decode() -> Iterator[_Stopwatch]:
    watch = _Stopwatch()
    with ExitStack() as stack:
        for owner, attribute, name in (
            (cpu_kernels.CpuDecoder, "step", "kernel"),
            (CpuBackend, "decode", "backend"),
            (engine, "sample", "sample"),
            (Engine, "step", "step"),
        ):
            timed = watch.wrap(name, getattr(owner, attribute))
            stack.enter_context(patch.object(owner, attribute, timed))
        yield watch


def _print_prefill(
    console: Console, title: str, generate: Callable[..., Any], prompt: list[int]
) -> None:
    """The operators by their own time. Profiled on the engine's thread, where they run."""
    profiles: list[Any] = []
    prefill = CpuBackend.prefill

    def profiled(*args: Any, **kwargs: Any) -> Any:
        with profile(activities=[ProfilerActivity.CPU]) as one_chunk:
            logits = prefill(*args, **kwargs)
        profiles.append(one_chunk)
        return logits

    with patch.object(CpuBackend, "prefill", profiled):
        generate([prompt], 1)
    own_us: dict[str, float] = {}
    calls: dict[str, int] = {}
    for one_chunk in profiles:
        for operator in one_chunk.key_averages():
            own_us[operator.key] = own_us.get(operator.key, 0.0) + operator.self_cpu_time_total
            calls[operator.key] = calls.get(operator.key, 0) + operator.count
    total_us = sum(own_us.values())
    table = Table(title=f"{title}: {total_us / 1000:.0f} ms", title_justify="left")
    for column in ("operator", "calls", "ms", "share"):
        table.add_column(column, justify="left" if column == "operator" else "right")
    for key in sorted(own_us, key=own_us.__getitem__, reverse=True)[:NUM_OPERATORS]:
        share = own_us[key] / total_us
        table.add_row(key, str(calls[key]), f"{own_us[key] / 1000:.1f}", f"{share:.1%}")
    console.print(table)


def _total_s(spans: Spans) -> float:
    return sum(end_s - start_s for start_s, end_s in spans)


def _holds(outer: tuple[float, float], inner: Spans) -> bool:
    return any(outer[0] <= start_s and end_s <= outer[1] for start_s, end_s in inner)


def _is_within(inner: tuple[float, float], outer: Spans) -> bool:
    return any(start_s <= inner[0] and inner[1] <= end_s for start_s, end_s in outer)
