"""What the common load generators send and how they read it, as plain functions.

Each reader is as forgiving, and as strict, as the tool it is named after: both were written from
what those tools do, and share no line with them.
"""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Json = dict[str, Any]


@dataclass
class Read:
    """What a tool makes of one answer. `num_steps` counts events that it takes for a token."""

    text: str = ""
    num_steps: int = 0
    usage: Json = field(default_factory=dict)
    answer_id: str | None = None
    tool_calls: dict[int, Json] = field(default_factory=dict)
    is_done: bool = False


# `vllm bench serve`, backends `openai` and `openai-chat`.


def vllm_completion(model: str, prompt: Any, output_len: int, **extra: Any) -> Json:
    """The body of a request; `extra` is what its flags and `--extra-body` add."""
    return {
        "model": model,
        "prompt": prompt,
        "repetition_penalty": 1.0,
        "max_tokens": output_len,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | extra


def vllm_chat(model: str, prompt: str, output_len: int, **extra: Any) -> Json:
    """The same of a chat: the prompt is a part of a message."""
    content = [{"type": "text", "text": prompt}]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | extra


async def read_as_vllm(response: aiohttp.ClientResponse) -> Read:
    """Each read of the socket is stripped, so events come without their empty lines."""
    read, held = Read(), ""
    async for piece in response.content.iter_any():
        held += piece.decode().strip()
        *events, held = held.split("\n\n")
        if is_whole(held):
            events.append(held)
            held = ""
        for event in events:
            _take_vllm(read, event.strip())
    if held:
        raise ValueError("the end of the stream is no event")
    return read


def is_whole(event: str) -> bool:
    """Whether an event that may still grow is complete."""
    data = event.removeprefix("data: ")
    if data == "[DONE]":
        return True
    try:
        json.loads(data)
    except ValueError:
        return False
    return event.startswith("data: ")


def _take_vllm(read: Read, event: str) -> None:
    if not event or event.startswith(":"):
        return
    data = event.removeprefix("data: ")
    if data == "[DONE]":
        read.is_done = True
        return
    chunk = json.loads(data)
    if chunk.get("choices"):
        choice = chunk["choices"][0]
        text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
        read.num_steps += 1
        read.text += text or ""
    elif chunk.get("usage"):
        read.usage = chunk["usage"]


# guidellm 0.8, formats `/v1/completions` and `/v1/chat/completions`.


def guidellm_body(model: str, output_tokens: int | None, *, stream: bool, **more: Any) -> Json:
    """The body of a request. Where a length is asked for, nothing else may end the answer."""
    body: Json = {"model": model}
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if output_tokens is not None:
        name = "max_completion_tokens" if "messages" in more else "max_tokens"
        body |= {name: output_tokens, "ignore_eos": True}
    return body | more


async def read_as_guidellm(response: aiohttp.ClientResponse) -> Read:
    """Line by line. The last usage counts, and an `error` member fails the request."""
    read = Read()
    async for line in _lines(response):
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            read.is_done = True
            break
        chunk = json.loads(data)
        if "error" in chunk:
            raise ValueError("the stream ends with an error")
        read.answer_id = read.answer_id or chunk["id"]
        read.usage = chunk.get("usage") or read.usage
        if chunk["choices"]:
            _take_choice(read, chunk["choices"][0])
    return read


def _take_choice(read: Read, choice: Json) -> None:
    delta: Json = choice.get("delta", {})
    text = delta.get("content") or choice.get("text") or ""
    read.text += text
    for piece in delta.get("tool_calls") or ():
        # A call is known by its index; its name and its arguments come in pieces.
        known = read.tool_calls.setdefault(
            piece["index"], {"id": piece.get("id", ""), "name": "", "arguments": ""}
        )
        for key in ("name", "arguments"):
            known[key] += piece.get("function", {}).get(key) or ""
    read.num_steps += bool(text or delta.get("tool_calls"))


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        yield line.decode().strip()


def counts(usage: Mapping[str, Any]) -> tuple[int, int]:
    """(tokens of the prompt, tokens of the answer), as both tools take them."""
    return usage["prompt_tokens"], usage["completion_tokens"]
