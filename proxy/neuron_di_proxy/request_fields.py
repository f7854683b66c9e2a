"""The fields of both endpoints: their types and what they mean, as clients can read it.

`openapi` shows these classes to clients, so a description is written for them. `null` means the
default everywhere. Which values are allowed together is decided where a request is read.
"""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from neuron_di.wire.legs import JSON_NULL
from neuron_di.wire.sampling_rules import LOGPROBS_MAX, REPETITION_PENALTY_MIN
from neuron_di_proxy.choice_request import Endpoint

INT64_MAX = (1 << 63) - 1
Unsupported: TypeAlias = None  # the type of a field that may only be null

Int64 = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
PositiveCount = Annotated[int, Meta(ge=1, le=INT64_MAX)]
NumAlternatives = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]


def _allows(low: float, high: float) -> Meta:
    """The bounds of a number, for readers of the document. `check_sampling` enforces them."""
    return Meta(extra_json_schema={"minimum": low, "maximum": high})


def _raw() -> Any:
    """The default of a field that is read where it is used. See `given`."""
    return msgspec.field(default_factory=lambda: JSON_NULL)


def given(raw: msgspec.Raw) -> msgspec.Raw | None:
    """What a client gave for such a field; None: nothing, or null."""
    if raw is JSON_NULL:  # the default, most of the time
        return None
    return None if bytes(memoryview(raw)[:5]) == b"null" else raw


def _says(description: str) -> Meta:
    return Meta(description=description)


EFFORT_CHARS_MAX = 32
ReasoningEffort: TypeAlias = Annotated[
    str,
    Meta(min_length=1, max_length=EFFORT_CHARS_MAX),
    _says("Where the chat template knows it."),
]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag="text"):
    """Any text."""

    json_schema: Unsupported = None


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, tag="json_object"):
    """Any JSON object."""

    json_schema: Unsupported = None


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
    schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, tag="json_schema"):
    """JSON that a schema allows. `strict` or not, nothing else is ever written."""

    json_schema: NamedSchema


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's way to say it. Exactly one of `json`, `json_object`, `choice` and `regex`."""

    json: msgspec.Raw = _raw()  # a schema, or a string that holds one
    json_object: bool | None = None
    choice: list[str] | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None  # all of the answer matches it
    grammar: Unsupported = None
    structural_tag: Unsupported = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: Unsupported = None


class RequestFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that both endpoints have."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, _allows(0, 2)] | None = None
    top_p: (
        Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] | None
    ) = None
    presence_penalty: Annotated[float, _allows(-2, 2)] | None = None
    frequency_penalty: Annotated[float, _allows(-2, 2)] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    n: PositiveCount | None = None
    logit_bias: msgspec.Raw = _raw()
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    # Not OpenAI's, but vLLM's and common to servers of open models.
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX), _says("0 and -1: off.")] | None = None
    min_p: Annotated[float, _allows(0, 1)] | None = None
    repetition_penalty: Annotated[float, _allows(REPETITION_PENALTY_MIN, 2)] | None = None
    stop_token_ids: list[Int64] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[Int64] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Annotated[NumAlternatives, _says("Not with `stream`.")] | None = None
    truncate_prompt_tokens: (
        Annotated[
            int,
            Meta(ge=-1, le=INT64_MAX),
            _says("Use only the last tokens: so many, or -1: what the context holds."),
        ]
        | None
    ) = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    # What vLLM offers and this server does not: only the value that changes nothing.
    use_beam_search: Literal[False] | None = None
    length_penalty: float | None = None
    priority: Literal[0] | None = None
    # About the client's account or on where KV may be found, not about the answer: not used.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, str] | None = None
    session_id: str | None = None


class CompletionFields(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions, without its prompt."""

    logprobs: NumAlternatives | None = None
    best_of: Annotated[PositiveCount, _says("May only equal `n`.")] | None = None
    echo: bool | None = None


class ChatFields(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions, without its messages and documents."""

    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: (
        Annotated[NumAlternatives, _says("More than 0 needs `logprobs` to be true.")] | None
    ) = None
    echo: Literal[False] | None = None  # of completions, in vLLM also of chats
    tools: msgspec.Raw = _raw()
    tool_choice: msgspec.Raw = _raw()
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = _raw()
    reasoning_effort: ReasoningEffort | None = None
    modalities: list[Literal["text"]] | None = None
    include_reasoning: Literal[True] | None = None


# Fields that may be long. They are passed on, and only their first bytes are looked at.
UNREAD_FIELDS: dict[Endpoint, frozenset[str]] = {
    "completions": frozenset({"prompt"}),
    "chat": frozenset({"messages", "documents"}),
}

# Of either endpoint: null is taken by the other, too.
FIELDS_OF_ANY = frozenset(
    (*CompletionFields.__struct_fields__, *ChatFields.__struct_fields__)
).union(*UNREAD_FIELDS.values())

_INTERNAL = "is between this server and its workers: it is never taken from a client"
_NO_GRAMMAR = "is not supported: `response_format` and `structured_outputs` say what an answer is"
_NO_MEDIA = "is not supported: this server reads and writes text"

# Fields that clients of such servers know, and why this one refuses them.
REFUSALS: dict[str, str] = {
    **dict.fromkeys(
        (
            "kv_transfer_params",
            "ec_transfer_params",
            "disaggregated_params",
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "bootstrap_pair_key",
            "data_parallel_rank",
            "data_parallel_rank_decode",
            "disagg_prefill_dp_rank",
            "disagg_request_id",
            "prefill_host_port",
            "nvext",
        ),
        _INTERNAL,
    ),
    **dict.fromkeys(
        (
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "guided_decoding_backend",
            "guided_whitespace_pattern",
            "structural_tag",
            "regex",
            "ebnf",
            "grammar",
        ),
        _NO_GRAMMAR,
    ),
    **dict.fromkeys(
        ("audio", "mm_processor_kwargs", "media_io_kwargs", "prompt_embeds", "image_data"),
        _NO_MEDIA,
    ),
    "cache_salt": "is derived by the server from who asks",
    "request_id": "is not taken: send the header X-Request-Id",
    "rid": "is not taken: send the header X-Request-Id",
    "chat_template": "is not supported: the model's own template is used",
    "suffix": "is not supported: models here write on from a prompt",
    "functions": "is not supported any more: use `tools`",
    "function_call": "is not supported any more: use `tool_choice`",
    "thinking_token_budget": "is not supported",
    "verbosity": "is not supported",
    "prediction": "is not supported",
    "web_search_options": "is not supported",
    "moderation": "is not supported",
    "vllm_xargs": "is not supported",
    "logits_processors": "is not supported",
    "logprob_token_ids": "is not supported",
    "repetition_detection": "is not supported",
    "stream_interval": "is not supported: each token is sent as it comes",
    "lora_path": "is not supported",
}
