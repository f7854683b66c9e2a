"""What both endpoints do with the fields of a request: take, refuse, and make sense of them.

Next: proxy/neuron_di_proxy/completion_request.py
"""

import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from neuron_di.errors import BadRequest, TooLarge
from neuron_di.wire import Grammar, SamplingParams
from neuron_di.wire.sampling_rules import LOGIT_BIAS_MAX, check_grammar_chars, check_sampling
from neuron_di_proxy.choice_request import Endpoint
from neuron_di_proxy.json_object import (
    NAME_CHARS_MAX,
    Members,
    explain,
    read_body,
    read_members,
    refuse_doubles,
)
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.request_fields import (
    FIELDS_OF_ANY,
    REFUSALS,
    UNREAD_FIELDS,
    JsonObjectFormat,
    JsonSchemaFormat,
    RequestFields,
    StructuredOutputs,
    given,
)

READ_BYTES_MAX = 1 << 20  # of the fields that are read here: they take the event loop's time

TraitsOf = Callable[[str], ModelTraits]
Fields = TypeVar("Fields", bound=RequestFields)

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")

_PASSED_ON = (  # the fields that mean the same in `SamplingParams`
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
CHOICES_MAX_HINT = "more need a server with another --choices-max"
_get_passed_on = attrgetter(*_PASSED_ON)


def take_fields(
    endpoint: Endpoint, kind: type[Fields], body: bytes, members: Members = None
) -> tuple[Fields, dict[str, msgspec.Raw]]:
    """The fields of a body, checked one by one, and those that stay unread, by name.

    Raises BadRequest, which names the field, or TooLarge.
    """
    unread: dict[str, msgspec.Raw] = {}
    pieces: list[bytes] = [b"{"]
    known, decoder = _reading(kind)
    for name, raw in read_body(body, members).items():
        label = known.get(name)
        if label is not None:
            pieces += (label, raw, b",")
        elif name in UNREAD_FIELDS[endpoint]:
            if given(raw) is not None:
                unread[name] = raw
        else:
            _refuse_field(name, raw)
    if len(pieces) > 1:
        pieces.pop()  # a comma
    pieces.append(b"}")
    document = b"".join(pieces)
    if len(document) > READ_BYTES_MAX or document.find(b"{", 1) > 0:
        _check_pieces(pieces)
    try:
        return decoder.decode(document), unread
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _check_pieces(pieces: Sequence[bytes]) -> None:
    """Refuse what is too long, and a name that comes twice in any object of a field.

    `pieces` are an object's: of each member its label, its value, and what stands behind it.
    """
    labels, values = pieces[1::3], [bytes(raw) for raw in pieces[2::3]]
    num_bytes = [len(label) + len(value) for label, value in zip(labels, values, strict=True)]
    if sum(num_bytes) > READ_BYTES_MAX:
        longest = labels[num_bytes.index(max(num_bytes))]
        raise TooLarge(
            f"the fields beside the prompt have more than {READ_BYTES_MAX} bytes",
            param=longest[1:-2].decode(),
        )
    try:
        for label, value in zip(labels, values, strict=True):
            if b"{" in value:
                refuse_doubles(value, label[1:-2].decode())
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


@cache
def _reading(kind: type[Fields]) -> tuple[dict[str, bytes], "msgspec.json.Decoder[Fields]"]:
    """The names of an endpoint's fields, each as JSON has it, and what reads them."""
    known = {name: b'"%b":' % name.encode() for name in kind.__struct_fields__}
    return known, msgspec.json.Decoder(kind)


def sampling_of(
    fields: RequestFields,
    traits: ModelTraits,
    *,
    max_tokens: int | None,
    fits_context: bool,
    logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingParams:
    """How tokens are chosen. Raises BadRequest for what is out of range."""
    if fields.length_penalty is not None or fields.prompt_logprobs is not None:
        _refuse_what_is_not_there(fields)
    given_fields: dict[str, Any] = {**traits.sampling_defaults} | {
        name: value
        for name, value in zip(_PASSED_ON, _get_passed_on(fields), strict=True)
        if value is not None
    }
    if fields.top_k is not None:
        given_fields["top_k"] = 0 if fields.top_k == -1 else fields.top_k
    if (stop := fields.stop) is not None:
        given_fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if fields.stop_token_ids:
        given_fields["stop_token_ids"] = tuple(fields.stop_token_ids)
    if (biases := given(fields.logit_bias)) is not None:
        given_fields["logit_bias"] = _read_logit_bias(biases)
    if fields.allowed_token_ids is not None:
        given_fields["allowed_token_ids"] = tuple(fields.allowed_token_ids)
    if fields.bad_words:
        given_fields["bad_words"] = tuple(fields.bad_words)
    sampling = SamplingParams(
        **given_fields,
        max_tokens=max_tokens,
        fits_context=fits_context,
        logprobs=logprobs,
        grammar=grammar,
        # Both legs must draw the same numbers, so a seed is drawn here when none is given.
        seed=draw_seed() if fields.seed is None else fields.seed,
    )
    check_sampling(sampling, traits.num_vocab)
    return sampling


def draw_seed() -> int:
    """A seed for a request that gives none."""
    return random.getrandbits(63)


def grammar_of(fields: RequestFields) -> Grammar | None:
    """What an answer must be by `response_format` or `structured_outputs`; None: any text."""
    if fields.response_format is None and fields.structured_outputs is None:
        return None
    by_format = None
    if isinstance(fields.response_format, JsonObjectFormat):
        by_format = Grammar(kind="json_object")
    elif isinstance(fields.response_format, JsonSchemaFormat):
        schema = fields.response_format.json_schema.schema
        by_format = _schema_grammar(bytes(schema), "response_format.json_schema.schema")
    if fields.structured_outputs is None:
        return by_format
    if by_format is not None:
        raise BadRequest(
            "`structured_outputs` and `response_format` say different things: send one",
            param="structured_outputs",
        )
    grammar = _structured_grammar(fields.structured_outputs)
    return msgspec.structs.replace(grammar, param="structured_outputs")


def usage_of(fields: RequestFields) -> tuple[bool, bool]:
    """(include_usage, continuous_usage) of a stream."""
    options = fields.stream_options
    if options is None:
        return False, False
    if not fields.stream:
        raise BadRequest("`stream_options` needs `stream` to be true", param="stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        raise BadRequest(
            "`continuous_usage_stats` needs `include_usage` to be true",
            param="stream_options.continuous_usage_stats",
        )
    return bool(options.include_usage), bool(options.continuous_usage_stats)


def choices_of(fields: RequestFields, num_prompts: int, choices_max: int) -> int:
    """`n`. Raises BadRequest where that makes more choices than one request may have."""
    n = 1 if fields.n is None else fields.n
    if n * num_prompts <= choices_max:
        return n
    if num_prompts == 1:
        raise BadRequest(f"`n` may be at most {choices_max}; {CHOICES_MAX_HINT}", param="n")
    raise BadRequest(
        f"{num_prompts} prompts with `n` {n} make {n * num_prompts} choices: a request may have "
        f"at most {choices_max}; {CHOICES_MAX_HINT}",
        param="prompt",
    )


def keep_last_of(fields: RequestFields, traits: ModelTraits, max_tokens: int | None) -> int | None:
    """How many of a prompt's last tokens are used; None: all."""
    count = fields.truncate_prompt_tokens
    if count == 0:
        raise BadRequest(
            "`truncate_prompt_tokens` must be -1 or at least 1", param="truncate_prompt_tokens"
        )
    if count != -1:
        return count
    if traits.context_tokens is None:
        return None
    return max(1, traits.context_tokens - (max_tokens or 1))  # so that the answer fits, too


def _refuse_field(name: str, raw: msgspec.Raw) -> None:
    if is_known_null(name, raw):
        return
    reason = REFUSALS.get(name, "is not a field of this endpoint")
    name = name[:NAME_CHARS_MAX]
    raise BadRequest(f"`{name}` {reason}", param=name)


def is_known_null(name: str, raw: msgspec.Raw) -> bool:
    """Whether a client says that a field which some endpoint knows, or refuses, is not there."""
    return given(raw) is None and (name in FIELDS_OF_ANY or name in REFUSALS)


def _refuse_what_is_not_there(fields: RequestFields) -> None:
    if fields.length_penalty not in (None, 1.0):
        raise BadRequest(
            "`length_penalty` is not supported: it belongs to beam search", param="length_penalty"
        )
    if fields.stream and fields.prompt_logprobs is not None:
        raise BadRequest(
            "`prompt_logprobs` and `stream` cannot be combined", param="prompt_logprobs"
        )


def _read_logit_bias(raw: msgspec.Raw) -> tuple[tuple[int, float], ...]:
    try:
        biases = read_members(raw, float, count_max=LOGIT_BIAS_MAX, param="logit_bias")
    except msgspec.DecodeError:
        raise BadRequest("`logit_bias` must be an object of numbers", param="logit_bias") from None
    if not all(map(_TOKEN_ID.fullmatch, biases)):
        raise BadRequest(
            '`logit_bias` must have token ids as names, such as "17"', param="logit_bias"
        )
    return tuple(sorted((int(name), bias) for name, bias in biases.items()))


def _schema_grammar(schema: bytes, param: str) -> Grammar:
    text = schema.decode()
    check_grammar_chars(len(text), param)
    try:
        read_members(schema, msgspec.Raw, count_max=READ_BYTES_MAX, param=param)
    except msgspec.DecodeError:
        raise BadRequest(f"`{param}` must be a JSON Schema: an object", param=param) from None
    return Grammar(kind="json_schema", value=text)


def _structured_grammar(wanted: StructuredOutputs) -> Grammar:
    schema = given(wanted.json)
    others = wanted.choice, wanted.regex
    num_given = sum(
        (schema is not None, bool(wanted.json_object), *(o is not None for o in others))
    )
    if num_given != 1:
        raise BadRequest(
            "`structured_outputs` must have exactly one of json, json_object, choice and regex",
            param="structured_outputs",
        )
    if schema is not None:
        param = "structured_outputs.json"
        raw = bytes(schema)
        if raw[:1] != b'"':
            return _schema_grammar(raw, param)
        raw = msgspec.json.decode(raw, type=str).encode()
        grammar = _schema_grammar(raw, param)
        refuse_doubles(raw, param)  # what is in a text was not seen when the body was read
        return grammar
    if wanted.choice is not None:
        if not wanted.choice or not all(wanted.choice):
            raise BadRequest(
                "`structured_outputs.choice` must be a list of texts that are not empty",
                param="structured_outputs.choice",
            )
        return Grammar(kind="choice", value=msgspec.json.encode(wanted.choice).decode())
    if wanted.regex is not None:
        return Grammar(kind="regex", value=wanted.regex)
    return Grammar(kind="json_object")
