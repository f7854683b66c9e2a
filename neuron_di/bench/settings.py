"""What a run is asked to do, checked: defaults, then a preset's values, then the flags'."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from neuron_di.bench.arrivals import Arrivals
from neuron_di.bench.lengths import TOKENS_MAX, Lengths
from neuron_di.bench.presets import PRESETS
from neuron_di.bench.slo import Slo
from neuron_di.errors import ConfigError

Loop = Literal["open", "closed", "trace"]

_INPUT_TOKENS = Lengths("fixed", 256)
_OUTPUT_TOKENS = Lengths("fixed", 64)
_NO_SLO = Slo()
_LOAD = ("rate", "concurrency", "arrivals", "burstiness")
_AMOUNT = ("requests", "duration_s")
_ABOVE_ZERO = (
    *("rate", "burstiness", "concurrency", "requests", "duration_s", "timeout_s", "slices"),
    *("time_scale", "token_scale", "trace_block_tokens", "context_tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """None: not limited, or for the endpoint to say. `concurrency` beside a rate is a cap."""

    urls: tuple[str, ...]
    names: tuple[str, ...]
    model: str | None = None
    api: Literal["completions", "chat"] = "completions"
    arrivals: Arrivals = "poisson"
    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 4
    input_tokens: Lengths = _INPUT_TOKENS
    output_tokens: Lengths = _OUTPUT_TOKENS
    shared_prefix_tokens: int = 0
    trace: Path | None = None
    trace_block_tokens: int = 512
    time_scale: float = 1.0
    token_scale: float = 1.0
    context_tokens: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int = 0
    timeout_s: float = 600.0
    slices: int = 1
    class_bounds: tuple[int, int] = (512, 4096)
    slo: Slo = _NO_SLO

    @property
    def loop(self) -> Loop:
        """trace: an open loop whose arrivals are the trace's own."""
        if self.rate is not None:
            return "open"
        return "closed" if self.concurrency is not None else "trace"


def make_settings(given: Mapping[str, Any], preset: str | None = None) -> Settings:
    """Of what was given, by the settings' names; None stands for not given. Raises ConfigError."""
    values = {name: value for name, value in given.items() if value is not None}
    if preset is not None:
        known = dict(PRESETS[preset].values)
        # Another load is another load altogether, and no mixture of two; so is a trace.
        groups = [_LOAD, _AMOUNT]
        if "trace" in values:
            groups[0] = (*_LOAD, "input_tokens", "output_tokens")
        for group in groups:
            if "trace" in values or any(name in values for name in group):
                known = {name: value for name, value in known.items() if name not in group}
        values = known | values
    for name in ("input_tokens", "output_tokens"):
        if name in values:
            values[name] = Lengths.read(values[name], _flag(name))
    _check_numbers(values)
    values["names"] = _names(values["urls"], values.get("names", ()))
    if not ("rate" in values or "concurrency" in values or "trace" in values):
        values["concurrency"] = 4
    if not ("requests" in values or "duration_s" in values or "trace" in values):
        values["requests"] = 100
    slices = 1 if len(values["urls"]) == 1 else min(4, values.get("requests", 4))
    values.setdefault("slices", slices)
    settings = Settings(**{each.name: values[each.name] for each in fields(Settings)
                           if each.name in values})  # fmt: skip
    _check_together(settings, values)
    return settings


def _check_numbers(values: Mapping[str, Any]) -> None:
    for name in _ABOVE_ZERO:
        value = values.get(name, 1)
        may_be_infinite = name == "rate"
        if not value > 0 or (math.isinf(value) and not may_be_infinite):
            raise ConfigError(f"{_flag(name)} is to be above 0, and is {value}")
    for name in ("warmup", "shared_prefix_tokens", "seed", "temperature"):
        value = values.get(name, 0)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{_flag(name)} is to be 0 or more, and is {value}")
    if values.get("shared_prefix_tokens", 0) > TOKENS_MAX:
        raise ConfigError(f"--shared-prefix-tokens goes up to {TOKENS_MAX:,}")
    short, medium = values.get("class_bounds", (1, 2))
    if not 0 < short < medium:
        raise ConfigError("--class-bounds are two numbers of tokens, the smaller one first")


def _check_together(settings: Settings, values: Mapping[str, Any]) -> None:
    """Flags that would have no effect are refused: who gave them expects one."""
    if settings.loop != "open" and ("arrivals" in values or "burstiness" in values):
        raise ConfigError("--arrivals and --burstiness say how requests arrive at a --rate")
    if settings.rate == math.inf and settings.duration_s is not None:
        raise ConfigError(
            "at --rate inf all requests come at once, so --duration-s bounds nothing: see "
            "--requests"
        )
    if "burstiness" in values and settings.arrivals != "burst":
        raise ConfigError("--burstiness is for --arrivals burst")
    if settings.trace is None:
        for name in ("time_scale", "token_scale", "trace_block_tokens"):
            if name in values:
                raise ConfigError(f"{_flag(name)} is for a --trace")
    elif "input_tokens" in values or "output_tokens" in values:
        raise ConfigError("a --trace says how long prompts and answers are: see --token-scale")
    if "time_scale" in values and settings.loop != "trace":
        raise ConfigError("--time-scale is for the trace's own arrivals: leave --rate out")
    if settings.requests is not None and settings.slices > settings.requests:
        raise ConfigError("there are more --slices than --requests")


def _names(urls: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    if names and len(names) != len(urls):
        raise ConfigError("--name is given once for each --url, in their order, or not at all")
    if len(set(names)) != len(names):
        raise ConfigError("two endpoints have the same --name")
    return tuple(names) or tuple(chr(ord("A") + place) for place in range(len(urls)))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
