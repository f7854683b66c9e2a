"""The body of POST /v1/chat/completions."""

import re

import msgspec

from neuron_di.errors import BadRequest
from neuron_di.wire import Grammar, PromptOptions
from neuron_di.wire.legs import JSON_NULL
from neuron_di_proxy.client_request import ClientRequest
from neuron_di_proxy.field_rules import (
    TraitsOf,
    choices_of,
    grammar_of,
    keep_last_of,
    sampling_of,
    take_fields,
    usage_of,
)
from neuron_di_proxy.json_object import Members, read_members
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.request_fields import ChatFields, given
from neuron_di_proxy.tool_calls import ToolUse, read_tools, tool_grammar

TEMPLATE_KWARGS_MAX = 64

_LIST_OF_OBJECTS = re.compile(rb"\[[ \t\r\n]*\{")
_THINKING_SWITCHES = ("enable_thinking", "thinking")  # what templates call it


def read_chat(
    body: bytes, *, choices_max: int, traits_of: TraitsOf, members: Members = None
) -> ClientRequest:
    """Read the body of POST /v1/chat/completions. Raises BadRequest, which names the field.

    `traits_of` says what is known of a model, and raises what it is refused for. `members`, as of
    `read_body`.
    """
    fields, unread = take_fields("chat", ChatFields, body, members)
    if "messages" not in unread:
        raise BadRequest("`messages` is missing", param="messages")
    for name, raw in unread.items():
        if _LIST_OF_OBJECTS.match(memoryview(raw)) is None:
            what = "message" if name == "messages" else "document"
            raise BadRequest(f"`{name}` must be a list of at least one {what}", param=name)
    n = choices_of(fields, 1, choices_max)
    traits = traits_of(fields.model)
    tools = read_tools(
        given(fields.tools), given(fields.tool_choice), fields.parallel_tool_calls, traits
    )
    max_tokens = _max_tokens(fields)
    sampling = sampling_of(
        fields,
        traits,
        max_tokens=max_tokens,
        fits_context=max_tokens is None,
        logprobs=_logprobs(fields),
        grammar=_grammar(fields, tools, traits),
    )
    if fields.max_completion_tokens is not None:
        sampling = msgspec.structs.replace(sampling, max_tokens_param="max_completion_tokens")
    include_usage, continuous_usage = usage_of(fields)
    return ClientRequest(
        endpoint="chat",
        model=fields.model,
        prompts=(unread["messages"],),
        sampling=sampling,
        has_seed=fields.seed is not None,
        options=PromptOptions(
            tools=fields.tools,
            hides_tools=tools is None and given(fields.tools) is not None,
            documents=unread.get("documents", JSON_NULL),
            template_kwargs=fields.chat_template_kwargs,
            reasoning_effort=fields.reasoning_effort,
            add_generation_prompt=adds_generation_prompt(
                fields.add_generation_prompt, goes_on=fields.continue_final_message
            ),
            continue_final_message=bool(fields.continue_final_message),
            add_special_tokens=fields.add_special_tokens,
            keep_last_tokens=keep_last_of(fields, traits, max_tokens),
            # The report says how many tokens the prompt has before the request is over.
            report=bool(
                fields.return_token_ids or continuous_usage or fields.prompt_logprobs is not None
            ),
            logprobs=fields.prompt_logprobs,
        ),
        n=n,
        stream=bool(fields.stream),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=bool(fields.return_token_ids),
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        prompt_logprobs=fields.prompt_logprobs,
        tools=tools,
    )


def _max_tokens(fields: ChatFields) -> int | None:
    """A chat's limit has two names. None: to the end of the context."""
    if fields.max_completion_tokens is None:
        return fields.max_tokens
    if fields.max_tokens not in (None, fields.max_completion_tokens):
        raise BadRequest(
            "`max_tokens` and `max_completion_tokens` differ", param="max_completion_tokens"
        )
    return fields.max_completion_tokens


def _logprobs(fields: ChatFields) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    return None


def adds_generation_prompt(asked: bool | None, *, goes_on: bool | None) -> bool:
    """Whether an answer's begin is put behind a chat: unless its last message `goes_on`."""
    if not goes_on:
        return asked is not False
    if asked:
        raise BadRequest(
            "`continue_final_message` and `add_generation_prompt` cannot both be true",
            param="continue_final_message",
        )
    return False


def _may_reason(fields: ChatFields) -> bool:
    """Whether a model that can reason may do so before it answers, as the client has it."""
    switches: dict[str, msgspec.Raw] = {}
    template_kwargs = given(fields.chat_template_kwargs)
    if template_kwargs is not None:
        name = "chat_template_kwargs"
        try:
            switches = read_members(
                template_kwargs, msgspec.Raw, count_max=TEMPLATE_KWARGS_MAX, param=name
            )
        except msgspec.DecodeError:
            raise BadRequest(f"`{name}` must be an object", param=name) from None
    return all(bytes(switches.get(name, b"")) != b"false" for name in _THINKING_SWITCHES)


def _grammar(fields: ChatFields, tools: ToolUse | None, traits: ModelTraits) -> Grammar | None:
    grammar = grammar_of(fields)
    if tools is not None:
        grammar = tool_grammar(tools, grammar)
    may_reason = _may_reason(fields)  # asked always: it checks the field, too
    if grammar is None or not may_reason:
        return grammar
    return msgspec.structs.replace(grammar, reasoning=traits.reasoning)
