"""Requests that are wrong: every endpoint must say so, with the right status and all four keys."""

from typing import Any

from neuron_di.testing.conformance.case import (
    MESSAGES,
    PATHS,
    Case,
    MustRefuse,
    Probe,
    chat,
    completion,
)

_COMPLETIONS, _CHAT = PATHS["completions"], PATHS["chat"]


def _wrong(param: str | None, *statuses: int) -> MustRefuse:
    return MustRefuse(param=param, statuses=statuses or (400, 422))


def _wrong_completion(name: str, param: str, /, **fields: Any) -> Case:
    return completion(f"refuse-{name}", f"names `{param}`", must_refuse=_wrong(param), **fields)


def _wrong_chat(name: str, param: str, /, **fields: Any) -> Case:
    return chat(f"refuse-{name}", f"names `{param}`", must_refuse=_wrong(param), **fields)


def _raw(name: str, path: str, raw: bytes, **more: Any) -> Case:
    return Case(
        name=f"refuse-{name}", why="is not a request", path=path, raw=raw, modes=("whole",),
        must_refuse=MustRefuse(**more),
    )  # fmt: skip


def _too_long(probe: Probe) -> list[int]:
    return [5] * ((probe.context_tokens or 2_000_000) + 1)


REFUSAL_CASES: tuple[Case, ...] = (
    _raw("no-json", _COMPLETIONS, b"{"),
    _raw("chat-no-json", _CHAT, b"{"),
    _raw("json-list", _COMPLETIONS, b"[]"),
    _raw("empty-body", _COMPLETIONS, b""),
    _raw("not-utf-8", _COMPLETIONS, b'{"model": "m", "prompt": "\xff"}'),
    _raw("deep", _COMPLETIONS, b'{"model": "m", "prompt": ' + b"[" * 50_000),
    _wrong_completion("no-prompt", "prompt", prompt=...),
    _wrong_completion("prompt-type", "prompt", prompt={"text": "a"}),
    _wrong_completion("prompt-mixed", "prompt", prompt=["a", 1]),
    _wrong_completion("prompt-id-negative", "prompt", prompt=[1, -1]),
    _wrong_completion("prompts-empty", "prompt", prompt=[]),
    _wrong_completion("max-tokens-type", "max_tokens", max_tokens="8"),
    _wrong_completion("max-tokens-negative", "max_tokens", max_tokens=-1),
    _wrong_completion("temperature-3", "temperature", temperature=3),
    _wrong_completion("temperature-negative", "temperature", temperature=-0.5),
    _wrong_completion("top-p-0", "top_p", top_p=0),
    _wrong_completion("top-p-2", "top_p", top_p=2),
    _wrong_completion("n-0", "n", n=0),
    _wrong_completion("n-many", "n", n=100_000),
    _wrong_completion("logprobs-many", "logprobs", logprobs=1_000),
    _wrong_completion("penalty", "presence_penalty", presence_penalty=9),
    _wrong_completion("seed-type", "seed", seed="7"),
    _wrong_completion("seed-wide", "seed", seed=1 << 64),
    _wrong_completion("logit-bias-value", "logit_bias", logit_bias={"5": 1000}),
    _wrong_completion("logit-bias-key", "logit_bias", logit_bias={"five": 1}),
    _wrong_completion("stop-type", "stop", stop=[1]),
    _wrong_completion("stream-options-alone", "stream_options",
                      stream_options={"include_usage": True}),
    _wrong_completion("stream-type", "stream", stream="yes"),
    _wrong_completion("prompt-logprobs-sse", "prompt_logprobs", prompt_logprobs=1,
                      modes=("stream",)),
    _wrong_completion("min-above-max", "min_tokens", min_tokens=9, max_tokens=8),
    _wrong_completion("too-long", "tokens", prompt=_too_long),
    _wrong_chat("no-messages", "messages", messages=...),
    _wrong_chat("messages-empty", "messages", messages=[]),
    _wrong_chat("messages-type", "messages", messages="hello"),
    _wrong_chat("no-role", "role", messages=[{"content": "a"}]),
    _wrong_chat("top-logprobs-alone", "logprobs", top_logprobs=2),
    _wrong_chat("top-logprobs-many", "top_logprobs", logprobs=True, top_logprobs=1_000),
    _wrong_chat("tool-choice-alone", "tool_choice", tool_choice="required"),
    _wrong_chat("tool-unknown", "tool_choice", tools=[
        {"type": "function", "function": {"name": "f"}}],
        tool_choice={"type": "function", "function": {"name": "g"}}),
    _wrong_chat("tools-type", "tools", tools=[{"type": "function"}]),
    _wrong_chat("format-type", "response_format", response_format={"type": "yaml"}),
    _wrong_chat("schema-missing", "json_schema", response_format={"type": "json_schema"}),
    _wrong_chat("schema-wrong", "response_format", response_format={
        "type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nothing"}}}),
    completion("refuse-model", "an unknown model is not found", model="no-such-model",
               must_refuse=_wrong("no-such-model", 404)),
    chat("refuse-chat-model", "an unknown model is not found", model="no-such-model",
         must_refuse=_wrong("no-such-model", 404)),
    completion("refuse-stream-model", "a real status before the first byte", modes=("stream",),
               model="no-such-model", must_refuse=_wrong("no-such-model", 404)),
    completion("refuse-no-model", "a model is named", model=..., must_refuse=_wrong("model")),
    Case(name="refuse-path", why="nothing is there", path="/v1/no-such-path",
         fields={"a": 1}, modes=("whole",), must_refuse=MustRefuse(statuses=(404,))),
    Case(name="refuse-method", why="a GET asks for nothing", path=_COMPLETIONS, method="GET",
         modes=("whole",), must_refuse=MustRefuse(statuses=(405,))),
    # Between a server and its workers: a client that could set it might read others' KV.
    completion("refuse-kv-transfer", "internal", must_refuse=_wrong("kv_transfer_params"),
               kv_transfer_params={"do_remote_prefill": True, "remote_engine_id": "x"}),
    chat("refuse-chat-kv-transfer", "internal", must_refuse=_wrong("kv_transfer_params"),
         kv_transfer_params={"do_remote_decode": True}),
    completion("refuse-ec-transfer", "internal", must_refuse=_wrong("ec_transfer_params"),
               ec_transfer_params={"a": "b"}),
)  # fmt: skip

HEADER_CASES: tuple[Case, ...] = (
    completion("request-id", "X-Request-Id is echoed", headers={"X-Request-Id": "conf-1.a"}),
    chat("chat-request-id", "X-Request-Id is echoed", headers={"X-Request-Id": "conf-2.b"}),
    completion("request-id-refused", "X-Request-Id is echoed by errors, too", prompt=...,
               headers={"X-Request-Id": "conf-3.c"}, must_refuse=_wrong("prompt")),
    completion("traceparent", "W3C's header is taken", headers={
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}),
    chat("charset", "a content type with its charset", messages=MESSAGES,
         headers={"Content-Type": "application/json; charset=utf-8"}),
)  # fmt: skip
