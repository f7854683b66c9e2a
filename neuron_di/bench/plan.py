"""Which requests are sent, and when: drawn before the first one is, so that every endpoint gets
the same ones."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from neuron_di.bench.arrivals import Seconds, arrival_times_s
from neuron_di.bench.lengths import Tokens
from neuron_di.bench.settings import Settings
from neuron_di.bench.traces import Trace
from neuron_di.errors import ConfigError

REQUESTS_MAX = 1 << 20  # that are drawn where only a duration is given
_DRAWS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Requests 0 to `len - 1` as columns.

    `at_s` is None in a closed loop. `trace_rows` says which row of the trace a request is.
    """

    at_s: Seconds | None
    input_tokens: Tokens
    output_tokens: Tokens
    trace: Trace | None = None
    trace_rows: Tokens | None = None
    num_left_out: int = 0  # of the trace, longer than the endpoint's context

    def __len__(self) -> int:
        return len(self.input_tokens)

    def hashes(self, index: int) -> Tokens | None:
        """The trace's names for the blocks of a prompt, where it has them."""
        if self.trace is None or self.trace_rows is None:
            return None
        return self.trace.hashes(int(self.trace_rows[index]))

    def slices(self, num: int) -> list[range]:
        """The requests, in order, in `num` parts of the same size but for one request."""
        bounds = np.linspace(0, len(self), num + 1).astype(int).tolist()
        return [range(*pair) for pair in pairwise(bounds)]


def make_plan(settings: Settings, trace: Trace | None, context_tokens: int | None) -> Plan:
    """Draw the requests. ConfigError when none fits into the endpoint's context."""
    if trace is not None:
        return _replay(settings, trace, context_tokens)
    num = settings.requests or REQUESTS_MAX
    at_s = _arrivals(settings, num)
    if at_s is not None:
        num = len(at_s)
    rng = np.random.default_rng([settings.seed, 1])
    inputs, outputs = _draw_lengths(settings, num, rng, context_tokens)
    return Plan(at_s=at_s, input_tokens=inputs, output_tokens=outputs)


def _arrivals(settings: Settings, num: int) -> Seconds | None:
    """None in a closed loop. No more than come within the duration."""
    if settings.rate is None:
        return None
    rng = np.random.default_rng([settings.seed, 0])
    at_s = arrival_times_s(
        settings.arrivals, settings.rate, num, rng, burstiness=settings.burstiness
    )
    if settings.duration_s is not None:
        at_s = at_s[at_s < settings.duration_s]
    if not len(at_s):
        raise ConfigError("no request arrives within --duration-s at this --rate")
    return at_s


def _draw_lengths(
    settings: Settings, num: int, rng: np.random.Generator, context_tokens: int | None
) -> tuple[Tokens, Tokens]:
    inputs = settings.input_tokens.draw(num, rng)
    outputs = settings.output_tokens.draw(num, rng)
    if context_tokens is None:
        return inputs, outputs
    for _ in range(_DRAWS_MAX):
        too_long = np.flatnonzero(inputs + outputs > context_tokens)
        if not len(too_long):
            return inputs, outputs
        inputs[too_long] = settings.input_tokens.draw(len(too_long), rng)
        outputs[too_long] = settings.output_tokens.draw(len(too_long), rng)
    raise ConfigError(
        f"prompts and answers of these lengths do not fit into a context of {context_tokens:,} "
        "tokens: see --input-tokens, --output-tokens and --context-tokens"
    )


def _replay(settings: Settings, trace: Trace, context_tokens: int | None) -> Plan:
    scale = settings.token_scale
    inputs = np.maximum(1, np.rint(trace.input_tokens * scale)).astype(np.int64)
    outputs = np.maximum(1, np.rint(trace.output_tokens * scale)).astype(np.int64)
    fits = np.ones(len(trace), bool)
    if context_tokens is not None:
        fits = inputs + outputs <= context_tokens
    at_s = trace.at_s * settings.time_scale
    is_in_time = np.ones(len(trace), bool)
    if settings.loop == "trace" and settings.duration_s is not None:
        is_in_time = at_s < settings.duration_s
    rows = np.flatnonzero(fits & is_in_time)[: settings.requests]
    if not len(rows):
        raise ConfigError(
            f"no request of the trace fits into a context of {context_tokens} tokens: "
            "see --token-scale"
        )
    is_cut = len(rows) == settings.requests  # what lies behind was not to be sent anyway
    reached = slice(int(rows[-1]) + 1 if is_cut else None)
    num_left_out = int((~fits[reached] & is_in_time[reached]).sum())
    times = at_s[rows] if settings.loop == "trace" else _arrivals(settings, len(rows))
    if times is not None:
        rows = rows[: len(times)]
    return Plan(
        at_s=times,
        input_tokens=inputs[rows],
        output_tokens=outputs[rows],
        trace=trace,
        trace_rows=rows,
        num_left_out=num_left_out,
    )
