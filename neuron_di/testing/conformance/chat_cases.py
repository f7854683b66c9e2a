"""The cases of /v1/chat/completions."""

import re
from collections.abc import Callable
from typing import Any

from neuron_di.testing.conformance.case import MESSAGES, PROMPT, Case, chat, completion
from neuron_di.testing.conformance.checks import (
    calls_are,
    choices_differ,
    ends_at_stop,
    has,
    is_json,
    no_calls,
    num_generated_is,
    text_is,
)

_SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["fox", "owl"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
_EXPRESSION = "[0-9]{3}-[a-c]{2,4}"
_UNICODE = "naïve 東京 \U0001f469\u200d\U0001f680 e\u0301"  # of two to four bytes, and joined


def _tool(name: str) -> dict[str, Any]:
    city = {"type": "string", "maxLength": 8}
    parameters = {
        "type": "object",
        "properties": {"city": city, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    function = {"name": name, "description": "Tells the weather.", "parameters": parameters}
    return {"type": "function", "function": function}


_TOOLS = [_tool("get_weather"), _tool("get_tides")]
_NAMED = {"type": "function", "function": {"name": "get_tides"}}


def _fits_expression(text: str) -> bool:
    return re.fullmatch(_EXPRESSION, text) is not None


def _fits_schema(document: Any) -> bool:
    return (
        sorted(document) == ["age", "kind", "name"]
        and document["kind"] in ("fox", "owl")
        and isinstance(document["age"], int)
        and len(document["name"]) <= 8
    )


def _fits_tool(arguments: Any) -> bool:
    is_whole = sorted(arguments) == ["city", "days"]
    return is_whole and isinstance(arguments["city"], str) and arguments["days"] in range(1, 10)


def _by_schema(schema: Any) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": named}


def _one_of(*wanted: str) -> Callable[[list[str]], bool]:
    return lambda names: set(names) <= set(wanted)


CHAT_CASES: tuple[Case, ...] = (
    # Messages.
    chat("chat", "one message"),
    chat("chat-system", "a system message", messages=[
        {"role": "system", "content": "Be brief."}, *MESSAGES]),
    chat("chat-developer", "OpenAI's newer word for it", messages=[
        {"role": "developer", "content": "Be brief."}, *MESSAGES]),
    chat("chat-turns", "several turns", messages=[
        *MESSAGES, {"role": "assistant", "content": "There was one."},
        {"role": "user", "content": "And then?"}]),
    chat("chat-parts", "content in parts", messages=[
        {"role": "user", "content": [{"type": "text", "text": "Tell me a tale of a reader."}]}]),
    chat("chat-unicode", "characters of up to four bytes", messages=[
        {"role": "user", "content": "Füße, 東京, \U0001f9ed?"}], max_completion_tokens=24),
    chat("chat-tool-turns", "calls of earlier turns", messages=[
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function",
             "function": {"name": "get_tides", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "low"}]),
    chat("chat-continue", "the last message goes on", continue_final_message=True,
         add_generation_prompt=False, messages=[
             *MESSAGES, {"role": "assistant", "content": "There was"}]),
    chat("chat-no-prompt", "without the template's last words", add_generation_prompt=False),
    chat("chat-template-kwargs", "for the template", chat_template_kwargs={"brief": True}),
    chat("chat-documents", "for the template", documents=[{"title": "t", "text": "d"}]),
    chat("chat-add-special-tokens", "the template's own", add_special_tokens=False),
    # Length and stop.
    chat("chat-length-1", "one token", max_completion_tokens=1, checks=(num_generated_is(1),)),
    chat("chat-length-2", "two tokens", max_completion_tokens=2),
    chat("chat-max-tokens", "the older word for it", max_completion_tokens=..., max_tokens=3),
    chat("chat-max-tokens-both", "both words, one meaning", max_completion_tokens=3, max_tokens=3),
    chat("chat-stop", "a stop string", stop=[" ", "."], max_completion_tokens=48,
         checks=(ends_at_stop,)),
    chat("chat-stop-included", "and kept", stop=[" ", "."], max_completion_tokens=48,
         include_stop_str_in_output=True, checks=(ends_at_stop,)),
    # Sampling and choices.
    chat("chat-seed", "a seeded draw", **_SAMPLED, max_completion_tokens=16),
    chat("chat-top-p-k", "nucleus and the k best", **_SAMPLED, top_p=0.8, top_k=9),
    chat("chat-penalties", "all three", presence_penalty=0.5, frequency_penalty=0.5,
         repetition_penalty=1.1, max_completion_tokens=32),
    chat("chat-n-3", "three choices", **_SAMPLED, n=3, max_completion_tokens=12,
         checks=(choices_differ,)),
    chat("chat-logit-bias", "one token only", return_token_ids=True,
         logit_bias=lambda probe: {str(probe.ids[0]): 100}),
    # Logprobs.
    chat("chat-logprobs", "the chosen token's", logprobs=True, checks=(has("logprobs"),)),
    chat("chat-top-logprobs", "and three others", logprobs=True, top_logprobs=3,
         checks=(has("logprobs"),)),
    chat("chat-logprobs-1", "the first token's", logprobs=True, top_logprobs=1,
         max_completion_tokens=1, checks=(has("logprobs"),)),
    chat("chat-logprobs-n-2", "each choice's own", **_SAMPLED, n=2, logprobs=True,
         top_logprobs=2),
    chat("chat-logprobs-off", "said in so many words", logprobs=False),
    chat("chat-return-token-ids", "ids beside the text", return_token_ids=True,
         checks=(has("token_ids"),)),
    chat("chat-prompt-logprobs", "of the prompt", prompt_logprobs=1, modes=("whole",)),
    # Structured output.
    chat("format-text", "any text", response_format={"type": "text"}),
    chat("format-json-object", "any JSON object", response_format={"type": "json_object"},
         max_completion_tokens=300, temperature=0.2, seed=3),
    chat("format-json-schema", "JSON that a schema allows", response_format=_by_schema(_SCHEMA),
         max_completion_tokens=200, checks=(is_json(_fits_schema),)),
    chat("format-json-schema-seeded", "drawn, two choices", **_SAMPLED, n=2,
         response_format=_by_schema(_SCHEMA), max_completion_tokens=200,
         checks=(is_json(_fits_schema),)),
    chat("format-cut", "JSON that is cut", response_format=_by_schema(_SCHEMA),
         max_completion_tokens=5),
    chat("format-logprobs", "logprobs under a grammar", response_format=_by_schema(_SCHEMA),
         max_completion_tokens=200, logprobs=True, top_logprobs=2,
         checks=(is_json(_fits_schema),)),
    chat("unicode-across-chunks", "characters that tokens share",
         response_format=_by_schema({"enum": [_UNICODE]}), max_completion_tokens=200,
         checks=(is_json(_UNICODE.__eq__),)),
    completion("unicode-completion", "the same, without a chat", prompt=PROMPT, max_tokens=200,
               response_format=_by_schema({"enum": [_UNICODE]}),
               checks=(is_json(_UNICODE.__eq__),)),
    completion("unicode-stop", "a stop string within such text", prompt=PROMPT, max_tokens=200,
               response_format=_by_schema({"enum": [_UNICODE]}), stop="京",
               checks=(text_is(lambda text: text == '"naïve 東', "is not cut at its stop"),)),
    completion("unicode-logprobs", "tokens that are no characters", prompt=PROMPT, logprobs=1,
               response_format=_by_schema({"enum": [_UNICODE]}), max_tokens=200),
    completion("structured-choice", "vLLM's word for an enum", max_tokens=32,
               structured_outputs={"choice": ["yes", "no", "それ"]},
               checks=(text_is(("yes", "no", "それ").__contains__, "is none of the choices"),)),
    completion("structured-regex", "text that an expression allows", max_tokens=32,
               structured_outputs={"regex": _EXPRESSION},
               checks=(text_is(_fits_expression, "does not match"),)),
    completion("structured-json", "vLLM's word for a schema", max_tokens=200,
               structured_outputs={"json": _SCHEMA}, checks=(is_json(_fits_schema),)),
    # Tools.
    chat("tools-auto", "the model may call", tools=_TOOLS, tool_choice="auto"),
    chat("tools-none", "the model may not", tools=_TOOLS, tool_choice="none", checks=(no_calls,)),
    chat("tools-required", "the model must call", tools=_TOOLS, tool_choice="required",
         parallel_tool_calls=False, max_completion_tokens=200,
         checks=(calls_are(_one_of("get_weather", "get_tides"), _fits_tool),)),
    chat("tools-named", "this one", tools=_TOOLS, tool_choice=_NAMED, max_completion_tokens=200,
         checks=(calls_are(["get_tides"].__eq__, _fits_tool),)),
    chat("tools-seeded", "drawn, two choices", **_SAMPLED, n=2, tools=_TOOLS,
         tool_choice="required", parallel_tool_calls=False, max_completion_tokens=200,
         checks=(calls_are(_one_of("get_weather", "get_tides"), _fits_tool),)),
    chat("tools-parallel", "several calls of one answer", **_SAMPLED, tools=_TOOLS,
         tool_choice="required", parallel_tool_calls=True, max_completion_tokens=200),
    chat("tools-cut", "a call that is cut", tools=_TOOLS, tool_choice=_NAMED,
         max_completion_tokens=4),
    # Streams.
    chat("chat-stream-no-usage", "usage that nobody asked for", stream_options=...,
         modes=("stream",)),
    chat("chat-stream-usage-continuous", "usage in each chunk", modes=("stream",),
         stream_options={"include_usage": True, "continuous_usage_stats": True}),
    # Accepted, and not about the answer.
    chat("chat-account", "about the account", user="u", metadata={"k": "v"}, store=False,
         service_tier="auto", safety_identifier="s", prompt_cache_key="k"),
    chat("chat-modalities-text", "text is what there is", modalities=["text"]),
    # Offered by some: taken, or refused by name.
    chat("chat-modalities-audio", "speech", modalities=["text", "audio"],
         audio={"voice": "alloy", "format": "wav"}),
    chat("chat-image", "a picture", messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]),
    chat("chat-role", "a role that only some templates know",
         messages=[{"role": "ipython", "content": "a"}, *MESSAGES]),
    chat("chat-reasoning-effort", "how long to reason", reasoning_effort="low"),
    chat("chat-verbosity", "how much to say", verbosity="low"),
    chat("chat-prediction", "what the answer may be",
         prediction={"type": "content", "content": "There was"}),
    chat("chat-web-search", "searching", web_search_options={}),
    chat("chat-functions", "the older word for tools",
         functions=[{"name": "f", "parameters": {"type": "object", "properties": {}}}]),
    chat("chat-template", "a template of one's own", chat_template="{{ messages }}"),
    chat("chat-echo", "vLLM's", echo=True),
)  # fmt: skip
