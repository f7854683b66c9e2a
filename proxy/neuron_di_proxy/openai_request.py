"""OpenAI's request documents, read and checked. Prompts are passed on unread.

A field that is not listed here, or not supported yet, is refused by its name; nothing a
client asks for is dropped in silence. `null` means the default.

Next: proxy/neuron_di_proxy/route.py
"""

import re
import secrets
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from neuron_di.errors import BadRequest
from neuron_di.request import check_sampling
from neuron_di.wire import SamplingParams

Endpoint = Literal["chat", "completions"]

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Unsupported: TypeAlias = None  # the type of a field that may only be null

CHOICES_MAX = 8
COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default; a chat may go on to the end of the context


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A checked request. `prompt` is the client's own JSON: a string, token ids or messages."""

    endpoint: Endpoint
    model: str
    prompt: msgspec.Raw
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    n: int = 1  # choices: 1 to CHOICES_MAX

    def choice(self, index: int) -> "ClientRequest":
        """The request for choice `index`: choice 0 is what n=1 gives, each has its own seed."""
        if index == 0:
            return self
        seed = (self.sampling.seed + index + (1 << 63)) % (1 << 64) - (1 << 63)  # stays an int64
        return replace(self, sampling=msgspec.structs.replace(self.sampling, seed=seed))


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that both endpoints have."""

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=CHOICES_MAX)] | None = None
    logit_bias: Unsupported = None
    # Not OpenAI's, but common to servers of open models.
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Int64] | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    # About the client's account, not about the answer: taken and not used.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class _CompletionBody(_Body, kw_only=True, forbid_unknown_fields=True):
    prompt: msgspec.Raw
    logprobs: Int64 | None = None
    best_of: Int64 | None = None
    echo: bool | None = None
    suffix: Unsupported = None


class _TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]


class _ChatBody(_Body, kw_only=True, forbid_unknown_fields=True):
    messages: msgspec.Raw
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    response_format: _TextFormat | None = None
    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    modalities: Unsupported = None
    parallel_tool_calls: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    tool_choice: Unsupported = None
    tools: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None


_completion_decoder = msgspec.json.Decoder(_CompletionBody)
_chat_decoder = msgspec.json.Decoder(_ChatBody)

_PASSED_ON = (  # the fields that mean the same in `SamplingParams`
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
)


def read_completion(body: bytes) -> ClientRequest:
    """Read the body of POST /v1/completions. Raises BadRequest, which names the field."""
    fields = _decode(_completion_decoder, body)
    if fields.echo:
        raise BadRequest("`echo` is not supported", param="echo")
    if fields.best_of not in (None, fields.n or 1):
        raise BadRequest("`best_of` is not supported: it may only equal `n`", param="best_of")
    _check_prompt(bytes(fields.prompt))
    max_tokens = COMPLETIONS_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    return _client_request(
        "completions", fields, fields.prompt, max_tokens=max_tokens, logprobs=fields.logprobs
    )


def read_chat(body: bytes) -> ClientRequest:
    """Read the body of POST /v1/chat/completions. Raises BadRequest, which names the field."""
    fields = _decode(_chat_decoder, body)
    _check_messages(bytes(fields.messages))
    if fields.top_logprobs is not None and not fields.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    max_tokens = fields.max_completion_tokens
    if max_tokens is None:
        max_tokens = fields.max_tokens
    elif fields.max_tokens not in (None, max_tokens):
        raise BadRequest(
            "`max_tokens` and `max_completion_tokens` differ", param="max_completion_tokens"
        )
    return _client_request(
        "chat",
        fields,
        fields.messages,
        max_tokens=max_tokens,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
    )


def _client_request(
    endpoint: Endpoint,
    fields: _Body,
    prompt: msgspec.Raw,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> ClientRequest:
    if fields.stream_options is not None and not fields.stream:
        raise BadRequest("`stream_options` needs `stream` to be true", param="stream_options")
    given = {name: value for name in _PASSED_ON if (value := getattr(fields, name)) is not None}
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    sampling = SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=stop,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        # Both legs must draw the same numbers, so a seed is drawn here when none is given.
        seed=secrets.randbits(63) if fields.seed is None else fields.seed,
    )
    check_sampling(sampling)
    return ClientRequest(
        endpoint=endpoint,
        model=fields.model,
        prompt=prompt,
        sampling=sampling,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        n=1 if fields.n is None else fields.n,
    )


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        body.decode()  # `Raw` fields are not checked by the decoder
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _explain(text: str) -> BadRequest:
    """Turn msgspec's words ("Expected `int`, got `str` - at `$.n`") into an error with a name."""
    named = re.search(r"field `([^`]*)`", text)
    path = re.search(r"`\$\.([^`]*)`$", text)
    param = ".".join(match[1] for match in (path, named) if match) or None
    if text.startswith("Object contains unknown field"):
        return BadRequest(f"`{param}` is unknown or not supported", param=param)
    if text.startswith("Expected `null`, got"):
        return BadRequest(f"`{param}` is not supported", param=param)
    if text.startswith("Invalid enum value"):
        return BadRequest(f"this value of `{param}` is not supported", param=param)
    return BadRequest(text.replace("$.", ""), param=param)


def _check_prompt(prompt: bytes) -> None:
    """See that a prompt is one string or one list of token ids, by its first bytes."""
    start = prompt[:1]
    if start == b"[":
        start = prompt[1:].lstrip()[:1]
        if start in (b'"', b"["):
            raise BadRequest("a list of prompts is not supported: send one", param="prompt")
        if start == b"]":
            raise BadRequest("`prompt` is an empty list", param="prompt")
        if not (start.isdigit() or start == b"-"):
            raise BadRequest("`prompt` must hold token ids", param="prompt")
    elif start != b'"':
        raise BadRequest("`prompt` must be a string or a list of token ids", param="prompt")


def _check_messages(messages: bytes) -> None:
    if messages[:1] != b"[" or messages[1:].lstrip()[:1] != b"{":
        raise BadRequest("`messages` must be a list of at least one message", param="messages")
