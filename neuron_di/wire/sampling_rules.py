"""Which values a request's parameters may have, wherever they come from.

Ranges are OpenAI's where OpenAI has the field (temperature 0 to 2, penalties -2 to 2), else
vLLM's. 0 turns `top_k` and `min_p` off, 1 turns `top_p` and `repetition_penalty` off.
"""

from collections.abc import Sequence

from neuron_di.errors import BadRequest
from neuron_di.wire.legs import Grammar, SamplingParams

STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 1024
STOP_TOKEN_IDS_MAX = 128
LOGPROBS_MAX = 20
LOGIT_BIAS_MAX = 1024
ALLOWED_IDS_MAX = 1 << 20  # where the size of the vocabulary is not known
BAD_WORDS_MAX = 128
BAD_WORD_CHARS_MAX = 256
GRAMMAR_CHARS_MAX = 64 << 10
# Below this a temperature counts as 0, as in vLLM: dividing by it would leave float32's range.
TEMPERATURE_MIN = 1e-5
LOGPROB_MIN = -9999.0  # JSON has no -inf; OpenAI and vLLM write this for a probability of 0
REPETITION_PENALTY_MIN = 0.01  # smaller ones leave the range of float32

_SEED_MIN, _SEED_MAX = -(1 << 63), (1 << 63) - 1


def check_sampling(params: SamplingParams, num_vocab: int | None = None) -> None:
    """Raise BadRequest, with the field and its range, unless every parameter is allowed.

    Without `num_vocab` token ids are not compared with the vocabulary.
    """
    # Written so that NaN, which compares false with everything, is refused.
    if not 0 <= params.temperature <= 2:
        raise _out_of_range("temperature", 0, 2)
    if not 0 < params.top_p <= 1:
        raise _out_of_range("top_p", 0, 1, low_is_allowed=False)
    if not 0 <= params.min_p <= 1:
        raise _out_of_range("min_p", 0, 1)
    if not -2 <= params.presence_penalty <= 2:
        raise _out_of_range("presence_penalty", -2, 2)
    if not -2 <= params.frequency_penalty <= 2:
        raise _out_of_range("frequency_penalty", -2, 2)
    if not REPETITION_PENALTY_MIN <= params.repetition_penalty <= 2:
        raise _out_of_range("repetition_penalty", REPETITION_PENALTY_MIN, 2)
    if params.seed is not None and not _SEED_MIN <= params.seed <= _SEED_MAX:
        raise _out_of_range("seed", _SEED_MIN, _SEED_MAX)
    if params.top_k < 0:
        raise BadRequest("top_k must be 0 (off) or more", param="top_k")
    if params.logprobs is not None and not 0 <= params.logprobs <= LOGPROBS_MAX:
        raise _out_of_range("logprobs", 0, LOGPROBS_MAX)
    max_tokens = params.max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise BadRequest("max_tokens must be at least 1", param="max_tokens")
    if params.min_tokens < 0:
        raise BadRequest("min_tokens must be at least 0", param="min_tokens")
    if max_tokens is not None:
        check_min_tokens(params, max_tokens)
    if params.stop or params.stop_token_ids:
        _check_stop(params, num_vocab)
    if params.logit_bias:
        _check_logit_bias(params, num_vocab)
    if params.allowed_token_ids is not None:
        _check_allowed(params.allowed_token_ids, num_vocab)
    if params.bad_words:
        _check_bad_words(params)
    if params.grammar is not None:
        check_grammar(params.grammar)


def _out_of_range(name: str, low: float, high: float, *, low_is_allowed: bool = True) -> BadRequest:
    border = "between" if low_is_allowed else "more than"
    joint = "and" if low_is_allowed else "and at most"
    return BadRequest(f"{name} must be {border} {low} {joint} {high}", param=name)


def check_min_tokens(params: SamplingParams, max_tokens: int) -> None:
    """Raise BadRequest where an answer would have to be longer than it may be."""
    if params.min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens is {params.min_tokens}, more than the {max_tokens} tokens allowed",
            param="min_tokens",
        )


def _check_stop(params: SamplingParams, num_vocab: int | None) -> None:
    if len(params.stop) > STOP_STRINGS_MAX:
        raise BadRequest(f"stop holds more than {STOP_STRINGS_MAX} strings", param="stop")
    if not all(1 <= len(text) <= STOP_CHARS_MAX for text in params.stop):
        raise BadRequest(
            f"each stop string must have 1 to {STOP_CHARS_MAX} characters", param="stop"
        )
    if len(params.stop_token_ids) > STOP_TOKEN_IDS_MAX:
        raise BadRequest(
            f"stop_token_ids holds more than {STOP_TOKEN_IDS_MAX} ids", param="stop_token_ids"
        )
    _check_ids("stop_token_ids", params.stop_token_ids, num_vocab)


def _check_logit_bias(params: SamplingParams, num_vocab: int | None) -> None:
    if len(params.logit_bias) > LOGIT_BIAS_MAX:
        raise BadRequest(f"logit_bias holds more than {LOGIT_BIAS_MAX} ids", param="logit_bias")
    _check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], num_vocab)
    if not all(-100 <= bias <= 100 for _, bias in params.logit_bias):
        raise _out_of_range("logit_bias", -100, 100)


def _check_allowed(allowed: Sequence[int], num_vocab: int | None) -> None:
    allowed_max = ALLOWED_IDS_MAX if num_vocab is None else num_vocab
    if not 1 <= len(allowed) <= allowed_max:
        raise BadRequest(
            f"allowed_token_ids must hold 1 to {allowed_max} ids", param="allowed_token_ids"
        )
    _check_ids("allowed_token_ids", allowed, num_vocab)


def _check_bad_words(params: SamplingParams) -> None:
    if len(params.bad_words) > BAD_WORDS_MAX:
        raise BadRequest(f"bad_words holds more than {BAD_WORDS_MAX} words", param="bad_words")
    if not all(1 <= len(word) <= BAD_WORD_CHARS_MAX for word in params.bad_words):
        raise BadRequest(
            f"each of bad_words must have 1 to {BAD_WORD_CHARS_MAX} characters", param="bad_words"
        )


def check_grammar_chars(num_chars: int, param: str) -> None:
    """Refuse a grammar by its length alone: whatever is made of it takes time."""
    if num_chars > GRAMMAR_CHARS_MAX:
        raise BadRequest(f"{param} is longer than {GRAMMAR_CHARS_MAX} characters", param=param)


def check_grammar(grammar: Grammar) -> None:
    """Raise BadRequest unless what the worker has to read is of a bearable length."""
    check_grammar_chars(len(grammar.value), grammar.param)
    if grammar.calls is not None:
        check_grammar_chars(len(grammar.calls.call_schema), grammar.calls.param)
    if grammar.reasoning and not all(0 < len(tag) <= STOP_CHARS_MAX for tag in grammar.reasoning):
        raise BadRequest(
            f"{grammar.param} begins behind a tag of 0 or more than {STOP_CHARS_MAX} characters",
            param=grammar.param,
        )


def _check_ids(name: str, token_ids: Sequence[int], num_vocab: int | None) -> None:
    if not token_ids:
        return
    if min(token_ids) < 0 or (num_vocab is not None and max(token_ids) >= num_vocab):
        allowed = "at least 0" if num_vocab is None else f"between 0 and {num_vocab - 1}"
        raise BadRequest(f"{name}: a token's id must be {allowed}", param=name)
