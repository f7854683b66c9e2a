"""Choosing the next token from a model's logits: one row, one request, one number drawn.

A row sees its own logits and its own request, nothing of the batch. The number is a function
of (seed, token index). So a request gets the same tokens whoever shares its batch, and
whichever worker draws them. The order of the steps is vLLM's:

    raw logits -> logprobs reported
      -> grammar -> allowed ids -> bad words -> EOS and stop ids masked until `min_tokens`
      -> bias -> penalties
      -> temperature 0: the largest, the lowest id of equals
      -> else temperature -> top-k and min-p -> top-p -> one draw

NumPy, because its loops over one row are single-threaded and sum in a fixed order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from neuron_di.engine.logit_masks import Floats, biased, restricted
from neuron_di.errors import LocalProtocolError
from neuron_di.request import OutputText, Request, Tokenizer, end_token_ids, uniform
from neuron_di.wire import SamplingParams, TokenLogprob, TokenLogprobs
from neuron_di.wire.sampling_rules import LOGPROB_MIN, TEMPERATURE_MIN

_CDF_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Natural logs of probabilities under the raw logits: before penalties and temperature."""

    chosen: float
    top: list[tuple[int, float]]  # (token id, logprob), best first, the lower id of equals


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token chosen for one request, with logprobs if the request asks for them."""

    token_id: int
    logprobs: RawLogprobs | None = None


def sample(
    logits_BV: torch.Tensor, requests: Sequence[Request], eos_token_ids: tuple[int, ...]
) -> list[SampledToken]:
    """Choose one token per request. `logits_BV` is float32 on the CPU, row b for requests[b].

    The token's index is `len(request.generated)`; neither logits nor requests are changed.
    Raises LocalProtocolError when a row's largest logit is NaN or infinite, BadRequest when the
    request's rules leave no token, or its grammar cannot go on.
    """
    assert logits_BV.dtype == torch.float32, logits_BV.dtype
    rows = logits_BV.detach().numpy()
    return [
        _sample_row(logits_V, request, eos_token_ids)
        for logits_V, request in zip(rows, requests, strict=True)
    ]


def describe_logprobs(
    tokenizer: Tokenizer, sampled: SampledToken, output: OutputText | None = None
) -> TokenLogprobs | None:
    """The logprobs of a sampled token as the API shows them, or None if it has none.

    `output` is the text before it; None: nobody asks where it begins.
    """
    raw = sampled.logprobs
    if raw is None:
        return None

    def describe(token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(
            text=tokenizer.token_text(token_id),
            logprob=max(logprob, LOGPROB_MIN),
            token_bytes=list(tokenizer.token_bytes(token_id)),
            token_id=token_id,
        )

    return TokenLogprobs(
        chosen=describe(sampled.token_id, raw.chosen),
        top=[describe(token_id, logprob) for token_id, logprob in raw.top],
        num_held=0 if output is None else output.num_before(sampled.token_id),
    )


def _sample_row(raw_V: Floats, request: Request, eos_token_ids: tuple[int, ...]) -> SampledToken:
    params = request.sampling
    index = len(request.generated)
    logits_V, rules = raw_V, request.rules
    if rules is not None:
        logits_V = restricted(logits_V, rules, request)
    if held_back := _held_back(request, index, eos_token_ids):
        logits_V = _without(logits_V, held_back)
    if rules is not None:
        logits_V = biased(logits_V, rules)
    logits_V = _penalised(logits_V, request)
    best = int(np.argmax(logits_V))
    if not np.isfinite(logits_V[best]):  # argmax finds NaN first
        raise LocalProtocolError(f"the model gave no usable logits for {request.request_id}")
    if params.temperature < TEMPERATURE_MIN:
        token_id = best
    else:
        token_id = _draw(logits_V, best, params, uniform(params.seed or 0, index))
    if params.logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, raw_logprobs(raw_V, token_id, params.logprobs))


def _held_back(request: Request, index: int, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that may be chosen only if there is no other: those that would end it too soon.

    A grammar offers EOS even if `ignore_eos`, so that an answer whose grammar is complete ends.
    """
    params, rules = request.sampling, request.rules
    ids = end_token_ids(params, eos_token_ids) if index < params.min_tokens else ()
    if params.ignore_eos and rules is not None and rules.grammar is not None:
        return ids + eos_token_ids
    return ids


def _without(logits_V: Floats, token_ids: tuple[int, ...]) -> Floats:
    """The logits with these tokens made impossible, unless that would leave none."""
    masked_V = logits_V.copy()
    masked_V[[token_id for token_id in token_ids if token_id < len(masked_V)]] = -np.inf
    return logits_V if np.isneginf(masked_V.max()) else masked_V


def _penalised(logits_V: Floats, request: Request) -> Floats:
    """Repetition over prompt and generated ids, presence and frequency over generated ids."""
    params = request.sampling
    if params.repetition_penalty != 1.0:
        logits_V = logits_V.copy()
        seen = request.seen_tokens().ids
        values = logits_V[seen]
        penalty = np.float32(params.repetition_penalty)
        logits_V[seen] = np.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty or params.frequency_penalty) and request.generated:
        logits_V = logits_V.copy()
        seen_tokens = request.seen_tokens()
        penalties = params.presence_penalty + params.frequency_penalty * seen_tokens.counts
        logits_V[seen_tokens.generated_ids] -= penalties
    return logits_V


def _draw(logits_V: Floats, best: int, params: SamplingParams, number: float) -> int:
    """One token from the distribution that temperature, top-k, min-p and top-p leave."""
    with np.errstate(over="ignore"):  # a model may mask with float32's lowest: -inf is right
        scaled_V = (logits_V - logits_V[best]) / np.float32(params.temperature)
    ids: npt.NDArray[np.intp] | None = None  # None: all
    floor = _floor(scaled_V, params)
    if floor > -np.inf:
        ids = np.flatnonzero(scaled_V >= floor)
        scaled_V = scaled_V[ids]
    mass = np.exp(scaled_V)  # of the likeliest token: 1
    if params.top_p < 1.0:
        kept = _nucleus(mass, params.top_p)
        ids = kept if ids is None else ids[kept]
        mass = mass[kept]
    drawn = _invert_cdf(mass, number)
    return drawn if ids is None else int(ids[drawn])


def _floor(scaled_V: Floats, params: SamplingParams) -> float:
    """The smallest scaled logit that top-k and min-p keep. All equals of the k-th are kept."""
    floor = -np.inf
    num_vocab = len(scaled_V)
    if 0 < params.top_k < num_vocab:
        kth = num_vocab - params.top_k
        floor = float(np.partition(scaled_V, kth)[kth])
    if params.min_p > 0.0:
        # The likeliest token's scaled logit is 0, so this is min_p times its probability.
        floor = max(floor, float(np.log(params.min_p)))
    return floor


def _nucleus(mass: Floats, top_p: float) -> npt.NDArray[np.intp]:
    """Indices of the fewest likeliest tokens that hold `top_p` of all mass; never none.

    Most of a large vocabulary need not be sorted: tokens of less than (1 - top_p) / n of the
    mass hold less than 1 - top_p together, so top-p ends before it comes to them. Half of that
    leaves room for rounding.
    """
    total = float(mass.sum(dtype=np.float64))
    likely = mass[mass > 0.5 * (1.0 - top_p) * total / len(mass)]
    falling = np.sort(likely)[::-1]  # values alone sort many times faster than indices
    cdf = np.cumsum(falling, dtype=np.float64)
    num_kept = min(int(np.searchsorted(cdf, top_p * total)) + 1, len(falling))
    least = falling[num_kept - 1]
    above = np.flatnonzero(mass > least)
    equal = np.flatnonzero(mass == least)  # of these the lower ids
    return np.concatenate([above, equal[: num_kept - len(above)]])


def _invert_cdf(mass: Floats, number: float) -> int:
    """The index whose share of the mass holds `number` of [0, 1). Never one without mass."""
    # Two levels, because adding up blocks is much faster than every partial sum.
    starts = np.arange(0, len(mass), _CDF_BLOCK)
    block_mass = np.add.reduceat(mass, starts, dtype=np.float64)
    block, rest = _find_share(block_mass, number * float(block_mass.sum()))
    start = block * _CDF_BLOCK
    within, _ = _find_share(mass[start : start + _CDF_BLOCK], rest)
    return start + within


def _find_share(mass: Floats, target: float) -> tuple[int, float]:
    """The first index whose cumulated mass exceeds `target`, and how far into it that is."""
    cdf = np.cumsum(mass, dtype=np.float64)
    # Rounding can carry the target to the end; then it is the last index that has mass.
    last = np.searchsorted(cdf, cdf[-1])
    index = int(min(np.searchsorted(cdf, target, side="right"), last))
    return index, target - (float(cdf[index - 1]) if index else 0.0)


def raw_logprobs(raw_V: Floats, token_id: int, num_top: int) -> RawLogprobs:
    """The logprob of one token, and the `num_top` largest, under these logits [V]."""
    peak = raw_V.max()
    log_total = float(np.log(np.exp(raw_V - peak).sum(dtype=np.float64))) + float(peak)
    top = [(int(i), float(raw_V[i]) - log_total) for i in _largest(raw_V, num_top)]
    return RawLogprobs(float(raw_V[token_id]) - log_total, top)


def _largest(values_V: Floats, num: int) -> npt.NDArray[np.intp]:
    """Indices of the `num` largest values, best first, the lower index of equals first."""
    if num == 0:
        return np.empty(0, dtype=np.intp)
    kth = max(len(values_V) - num, 0)
    candidates = np.flatnonzero(values_V >= np.partition(values_V, kth)[kth])
    return candidates[np.argsort(-values_V[candidates], kind="stable")[:num]]
