"""Answers written by the real writers, and read as a client reads them."""

import json
from typing import Any

import msgspec
from request_bodies import TRAITS, chat, completion
from scripted_worker import finished, token

from neuron_di.types import RequestId
from neuron_di.wire import Finished, Token, TokenLogprob, TokenLogprobs
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.openai_response import Answer, answer_to

Json = dict[str, Any]
REQUEST_ID = RequestId("r1")


def chat_answer(traits: ModelTraits = TRAITS, **fields: Any) -> Answer:
    return answer_to(chat(traits, **fields), REQUEST_ID, traits)


def completion_answer(traits: ModelTraits = TRAITS, **fields: Any) -> Answer:
    return answer_to(completion(traits, **fields), REQUEST_ID, traits)


def logprobs(text: str, logprob: float, *others: tuple[str, float]) -> TokenLogprobs:
    def entry(text: str, logprob: float) -> TokenLogprob:
        return TokenLogprob(text, logprob, list(text.encode()), sum(text.encode()))

    return TokenLogprobs(
        chosen=entry(text, logprob), top=[entry(text, logprob), *(entry(*o) for o in others)]
    )


def documents(events: bytes) -> list[Json]:
    *parts, rest = events.decode().split("\n\n")
    _check(rest == "", "an event without an end")
    _check(all(part.startswith("data: ") for part in parts), "an event without data")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def streamed(answer: Answer, choices: list[tuple[list[Token], Finished]]) -> list[Json]:
    """All chunks of an answer, its choices one after the other."""
    events = b""
    for index, (tokens, end) in enumerate(choices):
        events += b"".join(answer.chunk(each, index) for each in tokens)
        events += answer.last_chunk(end, None, index)
    return documents(events + answer.usage_chunk([end for _, end in choices]))


def whole(answer: Answer, choices: list[tuple[list[Token], Finished]]) -> Json:
    return json.loads(answer.whole(choices))


def ended(texts: list[str], held: str = "", **changes: Any) -> tuple[list[Token], Finished]:
    """One choice: a token for each text, and its end."""
    tokens = [token(index, text) for index, text in enumerate(texts)]
    fields: Json = {"reason": "stop"} | changes
    end = finished(len(tokens), reason=fields.pop("reason"))
    return tokens, msgspec.structs.replace(end, text=held, **fields)


def assembled(chunks: list[Json]) -> list[Json]:
    """The choices of a chat as a client puts them together. Fails where a chunk is out of order."""
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            index = part["index"]
            if index not in choices:
                _check(part["delta"].get("role") == "assistant", "a choice without its role")
                choices[index] = {"content": "", "reasoning": "", "calls": [], "logprobs": []}
                choices[index] |= {"finish_reason": None, "token_ids": []}
            else:
                _check("role" not in part["delta"], "the role comes twice")
            _add(choices[index], part)
    return [choices[index] for index in sorted(choices)]


def _add(choice: Json, part: Json) -> None:
    _check(choice["finish_reason"] is None, "something follows the end of a choice")
    delta = part["delta"]
    choice["content"] += delta.get("content", "")
    choice["reasoning"] += delta.get("reasoning", "")
    for call in delta.get("tool_calls", []):
        if "id" in call:
            _check(call["index"] == len(choice["calls"]), "a call out of order")
            call = {name: value for name, value in call.items() if name != "index"}
            choice["calls"].append(call)
        else:
            _check(call.keys() == {"index", "function"}, "a call is named twice")
            choice["calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if part["logprobs"] is not None:
        choice["logprobs"] += part["logprobs"]["content"]
    choice["token_ids"] += part.get("token_ids", [])
    choice["finish_reason"] = part["finish_reason"]
    if part["finish_reason"] is not None:
        choice["stop_reason"] = part["stop_reason"]


def _check(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise AssertionError(otherwise)
