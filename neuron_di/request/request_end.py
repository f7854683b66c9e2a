"""When a request ends: which token is its last, and how many it may have."""

from typing import NamedTuple

from neuron_di.errors import BadRequest, ContextExceeded
from neuron_di.request.request import Request
from neuron_di.types import FinishReason
from neuron_di.wire import SamplingParams
from neuron_di.wire.sampling_rules import check_min_tokens


class Finish(NamedTuple):
    """Why a request is complete. `text` is what was held back until now.

    `stop` is the stop string or the stop token id that ended it; None for EOS and for length.
    """

    reason: FinishReason
    stop: str | int | None
    text: str


class TokenOutcome(NamedTuple):
    """What one token changed: the text that may be sent, and the end, if it is that."""

    text: str
    finish: Finish | None


def resolve_max_tokens(
    params: SamplingParams, num_prompt: int, context_tokens: int, *, param: str = "prompt"
) -> int:
    """How many tokens this request may generate: at least 1.

    Raises BadRequest when the prompt, the client's field `param`, is empty, and ContextExceeded
    when it and `max_tokens` do not fit.
    """
    if num_prompt == 0:
        raise BadRequest("the prompt is empty", param=param)
    room = context_tokens - num_prompt
    if room < 1:
        raise ContextExceeded(
            context_tokens,
            f"the prompt has {num_prompt}, and at least 1 is for the answer",
            param=param,
        )
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if params.fits_context:
        max_tokens = min(max_tokens, room)
    if max_tokens > room:
        name = params.max_tokens_param
        raise ContextExceeded(
            context_tokens,
            f"the prompt has {num_prompt} and {name} is {max_tokens}, which can be at most {room}",
            param=name,
        )
    check_min_tokens(params, max_tokens)
    return max_tokens


def end_token_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that end a request. Neither they nor stop strings do before `min_tokens`."""
    return params.stop_token_ids if params.ignore_eos else eos_token_ids + params.stop_token_ids


def accept_token(request: Request, token_id: int, eos_token_ids: tuple[int, ...]) -> TokenOutcome:
    """Append the newest token to `request`, take its text, and decide whether it is the last.

    EOS and stop tokens count as generated, but their own text is not part of the output, unless
    `include_stop_str_in_output`. A stop wins over the length that is reached with the same token.
    A grammar that is complete ends the request as EOS does, also before `min_tokens`.

    Raises what the grammar says of a token that cannot come here.
    """
    params = request.sampling
    index = len(request.generated)
    request.generated.append(token_id)
    if index >= params.min_tokens and token_id in end_token_ids(params, eos_token_ids):
        is_eos = token_id in eos_token_ids and not params.ignore_eos
        return _end(request, token_id, is_eos=is_eos)
    rules = request.rules
    if rules is not None and rules.grammar is not None and rules.grammar.accept(token_id):
        is_eos = token_id in eos_token_ids
        if is_eos or token_id in params.stop_token_ids:
            return _end(request, token_id, is_eos=is_eos)
        return TokenOutcome(request.output.push(token_id), _finish(request, "stop", None))
    text = request.output.push(token_id)
    if request.output.stop_hit is not None:
        return TokenOutcome(text, _finish(request, "stop", None))
    if len(request.generated) >= request.max_tokens:
        return TokenOutcome(text, _finish(request, "length", None))
    return TokenOutcome(text, None)


def _end(request: Request, token_id: int, *, is_eos: bool) -> TokenOutcome:
    include = request.sampling.include_stop_str_in_output
    text = request.output.push(token_id) if include else ""
    return TokenOutcome(text, _finish(request, "stop", None if is_eos else token_id))


def _finish(request: Request, reason: FinishReason, stop_token_id: int | None) -> Finish:
    held = request.output.flush()
    # Half a character, once it is known to stay half, may complete a stop string.
    stop_hit = request.output.stop_hit
    if stop_hit is not None:
        return Finish("stop", stop_hit, held)
    return Finish(reason, stop_token_id, held)
