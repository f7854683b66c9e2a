"""The body of POST /v1/completions."""

import re
from functools import cache
from typing import Any

import msgspec

from neuron_di.errors import BadRequest, ContextExceeded
from neuron_di.wire import PromptOptions
from neuron_di.wire.legs import REPORTED_LOGPROBS_MAX
from neuron_di_proxy.choice_request import BYTES_PER_TOKEN
from neuron_di_proxy.client_request import ClientRequest
from neuron_di_proxy.field_rules import (
    CHOICES_MAX_HINT,
    TraitsOf,
    choices_of,
    grammar_of,
    keep_last_of,
    sampling_of,
    take_fields,
    usage_of,
)
from neuron_di_proxy.json_object import Members
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.request_fields import CompletionFields

MAX_TOKENS_DEFAULT = 16  # OpenAI's; a chat may go on to the end of the context

_FIRST_ITEM = re.compile(rb"\[[ \t\r\n]*(.)", re.DOTALL)


def read_completion(
    body: bytes, *, choices_max: int, traits_of: TraitsOf, members: Members = None
) -> ClientRequest:
    """Read the body of POST /v1/completions. Raises BadRequest, which names the field.

    `traits_of` says what is known of a model, and raises what it is refused for. `members`, as of
    `read_body`.
    """
    fields, unread = take_fields("completions", CompletionFields, body, members)
    if "prompt" not in unread:
        raise BadRequest("`prompt` is missing", param="prompt")
    prompts = _split(unread["prompt"], choices_max)
    n = choices_of(fields, len(prompts), choices_max)
    if fields.best_of not in (None, n):
        raise BadRequest("`best_of` is not supported: it may only equal `n`", param="best_of")
    traits = traits_of(fields.model)
    max_tokens = MAX_TOKENS_DEFAULT if fields.max_tokens is None else fields.max_tokens
    drop_output = bool(fields.echo) and max_tokens == 0
    if drop_output and fields.min_tokens:
        raise BadRequest("`min_tokens` is more than `max_tokens`", param="min_tokens")
    sampling = sampling_of(
        fields,
        traits,
        max_tokens=1 if drop_output else max_tokens,
        fits_context=fields.max_tokens is None,
        logprobs=fields.logprobs,
        grammar=grammar_of(fields),
    )
    keep_last = keep_last_of(fields, traits, max_tokens)
    if keep_last is None:
        for prompt in prompts:
            _check_fits(prompt, traits)
    prompt_logprobs = _prompt_logprobs(fields)
    if prompt_logprobs is not None and len(prompts) > 1:
        _check_reported(prompts, prompt_logprobs)
    include_usage, continuous_usage = usage_of(fields)
    return ClientRequest(
        endpoint="completions",
        model=fields.model,
        prompts=prompts,
        sampling=sampling,
        has_seed=fields.seed is not None,
        options=PromptOptions(
            add_special_tokens=fields.add_special_tokens,
            keep_last_tokens=keep_last,
            # The report says how many tokens the prompt has before the request is over.
            report=bool(
                fields.echo
                or fields.return_token_ids
                or continuous_usage
                or fields.prompt_logprobs is not None
            ),
            logprobs=prompt_logprobs,
            logprobs_param="logprobs" if fields.echo else "prompt_logprobs",
        ),
        n=n,
        stream=bool(fields.stream),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        echo=bool(fields.echo),
        drop_output=drop_output,
        return_token_ids=bool(fields.return_token_ids),
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        prompt_logprobs=fields.prompt_logprobs,
    )


def _prompt_logprobs(fields: CompletionFields) -> int | None:
    """How many alternatives a report lists for each token of the prompt."""
    echoed = fields.logprobs if fields.echo else None
    asked = fields.prompt_logprobs
    if echoed is not None and asked not in (None, echoed):
        raise BadRequest(
            "`prompt_logprobs` must equal `logprobs` where `echo` is true", param="prompt_logprobs"
        )
    return echoed if asked is None else asked


def _check_reported(prompts: tuple[msgspec.Raw, ...], num_top: int) -> None:
    """Refuse prompts with too many logprobs together. Of each alone its worker decides, exactly."""
    num_tokens = sum(
        memoryview(prompt).nbytes // BYTES_PER_TOKEN if _is_text(prompt) else _num_ids(prompt)
        for prompt in prompts
    )
    if num_tokens * (num_top + 1) > REPORTED_LOGPROBS_MAX:
        raise BadRequest(
            f"the prompts have about {num_tokens} tokens: with {num_top} alternatives each, their "
            f"logprobs are more than the limit of {REPORTED_LOGPROBS_MAX}",
            param="prompt",
        )


def _split(prompt: msgspec.Raw, choices_max: int) -> tuple[msgspec.Raw, ...]:
    """The prompts of a request: it has one, or a list of strings or of lists of token ids."""
    if _is_text(prompt):
        _check_text(prompt)
        return (prompt,)
    first = _first_item(prompt)
    if first == b"]":
        raise BadRequest("`prompt` is an empty list", param="prompt")
    if first.isdigit():
        return (prompt,)
    if first not in (b'"', b"["):
        raise BadRequest("`prompt` must hold texts or token ids", param="prompt")
    try:
        items = msgspec.structs.astuple(msgspec.json.decode(prompt, type=_list_of(choices_max)))
    except msgspec.ValidationError:
        raise BadRequest(
            f"`prompt` may hold at most {choices_max} prompts; {CHOICES_MAX_HINT}", param="prompt"
        ) from None
    prompts = tuple(item for item in items if item is not None)
    for item in prompts:
        if _is_text(item) != (first == b'"') or not (_is_text(item) or _holds_ids(item)):
            raise BadRequest(
                "the prompts of a list must be all texts, or all lists of token ids",
                param="prompt",
            )
        _check_text(item)
    return prompts


@cache
def _list_of(count_max: int) -> Any:
    """An array of JSON of any kind. One that is longer is given up at its first item too many."""
    missing = msgspec.field(default=None)
    return msgspec.defstruct(
        "Prompts",
        [(f"prompt_{index}", msgspec.Raw, missing) for index in range(count_max)],
        array_like=True,
        forbid_unknown_fields=True,
    )


def _is_text(prompt: msgspec.Raw) -> bool:
    return bytes(memoryview(prompt)[:1]) == b'"'


def _check_text(prompt: msgspec.Raw) -> None:
    if bytes(memoryview(prompt)[:2]) == b'""':
        raise BadRequest("the prompt is empty", param="prompt")


def _holds_ids(prompt: msgspec.Raw) -> bool:
    return bytes(memoryview(prompt)[:1]) == b"[" and _first_item(prompt).isdigit()


def _first_item(prompt: msgspec.Raw) -> bytes:
    """The first byte of a list's first item, or `]`."""
    found = _FIRST_ITEM.match(memoryview(prompt))
    if found is None:
        raise BadRequest("`prompt` must be a text, token ids, or a list of these", param="prompt")
    return found[1]


def _num_ids(prompt: msgspec.Raw) -> int:
    return bytes(prompt).count(b",") + 1


def _check_fits(prompt: msgspec.Raw, traits: ModelTraits) -> None:
    """Refuse token ids that no worker holds. How many tokens a text has, only a worker knows."""
    if traits.context_tokens is None or _is_text(prompt):
        return
    num_prompt = _num_ids(prompt)
    if num_prompt >= traits.context_tokens:
        raise ContextExceeded(
            traits.context_tokens,
            f"the prompt has {num_prompt}, and at least 1 is for the answer",
            param="prompt",
        )
