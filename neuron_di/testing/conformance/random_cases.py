"""Requests that no list has: each is drawn from its own number, field by field.

All that is drawn is what a server may be asked for, in combinations that make sense: one that is
refused should be refused for a field that the server does not support.
"""

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from neuron_di.testing.conformance.case import Case, chat, completion
from neuron_di.testing.conformance.exchange import Json

SEED_MAX = 1 << 32

_WORDS = ("once", "a", "fox", "and", "the", "東京", "café", "\U0001f469\u200d\U0001f680", ".", ",")
_STOPS = (" ", "a", "e", ".", " the", "s a", "\n", "never said")
_IDS = range(3, 200)
_TOOL_NAMES = ("look", "say")

# (how often, field, its value): of both endpoints.
_FIELDS: tuple[tuple[float, str, Callable[[Random], Any]], ...] = (
    (0.3, "top_p", lambda rng: round(rng.uniform(0.05, 1), 2)),
    (0.3, "top_k", lambda rng: rng.choice([-1, 0, 1, 5, 50])),
    (0.2, "min_p", lambda rng: round(rng.uniform(0, 0.5), 2)),
    (0.2, "presence_penalty", lambda rng: round(rng.uniform(-2, 2), 1)),
    (0.2, "frequency_penalty", lambda rng: round(rng.uniform(-2, 2), 1)),
    (0.2, "repetition_penalty", lambda rng: round(rng.uniform(0.5, 1.9), 1)),
    (0.3, "stop", lambda rng: rng.sample(_STOPS, rng.randint(1, 4))),
    (0.2, "n", lambda rng: rng.randint(1, 3)),
    (0.2, "logit_bias", lambda rng: {str(each): rng.choice([-100, -5, 3]) for each in _ids(rng)}),
    (0.2, "min_tokens", lambda rng: rng.randint(0, 4)),
    (0.2, "ignore_eos", lambda _: True),
    (0.2, "include_stop_str_in_output", lambda _: True),
    (0.1, "skip_special_tokens", lambda _: False),
    (0.2, "stop_token_ids", lambda rng: _ids(rng)),
    (0.1, "bad_words", lambda rng: rng.sample(_STOPS[1:6], 2)),
    (0.1, "return_token_ids", lambda _: True),
    (0.1, "return_tokens_as_token_ids", lambda _: True),
    (0.1, "truncate_prompt_tokens", lambda rng: rng.choice([1, 5, 50])),
    (0.7, "seed", lambda rng: rng.randrange(-(1 << 63), 1 << 63)),
)


def random_cases(seed: int, count: int) -> Iterator[Case]:
    """Cases number `seed`, `seed` + 1, ...: a number is the same case in each run, by its name."""
    for number in range(seed, seed + count):
        yield _random_case(number)


def _random_case(number: int) -> Case:
    rng = Random(number)
    fields = _shape(rng)  # what is rare comes first: a report has room for little
    fields |= {name: draw(rng) for often, name, draw in _FIELDS if rng.random() < often}
    fields["temperature"] = rng.choice([0, 0.3, 1.0, 1.7])
    if fields["temperature"]:
        fields.setdefault("seed", number)  # else no two answers are alike
    make, num_tokens = completion, rng.choice([1, 2, 5, 17, 40])
    if "min_tokens" in fields:
        fields["min_tokens"] = min(fields["min_tokens"], num_tokens)
    if rng.random() < 0.5:
        make, own = chat, {"max_completion_tokens": num_tokens, **_chat(rng)}
        if "tools" in own:  # which are a shape of their own
            for name in ("response_format", "structured_outputs"):
                fields.pop(name, None)
    else:
        own = {"max_tokens": num_tokens, **_completion(rng)}
    fields |= own
    return make(f"random-{number}", json.dumps(fields, ensure_ascii=False), **fields)


def _completion(rng: Random) -> Json:
    fields: Json = {"prompt": _prompt(rng)}
    if rng.random() < 0.3:
        fields["logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.2:
        fields["echo"] = True
    return fields


def _prompt(rng: Random) -> Any:
    match rng.randrange(5):
        case 0:
            return [_text(rng) for _ in range(2)]
        case 1:
            return rng.choices(_IDS, k=rng.choice([1, 15, 16, 17, 33]))
        case _:
            return _text(rng)


def _chat(rng: Random) -> Json:
    fields: Json = {"messages": [{"role": "user", "content": _text(rng)}]}
    if rng.random() < 0.3:
        fields["messages"].insert(0, {"role": "system", "content": _text(rng)})
    if rng.random() < 0.2:
        fields["messages"].append({"role": "assistant", "content": _text(rng)})
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if rng.random() < 0.3:
        fields |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
    if rng.random() < 0.2:
        named = {"type": "function", "function": {"name": _TOOL_NAMES[0]}}
        fields["tools"] = [_tool(name, rng) for name in _TOOL_NAMES]
        fields["tool_choice"] = rng.choice(["none", "required", named])
    return fields


def _shape(rng: Random) -> Json:
    """What all of the answer must be; as a rule nothing."""
    match rng.randrange(12):
        case 0:
            return {"response_format": {"type": "json_object"}}
        case 1 | 2:
            named = {"name": "answer", "schema": _schema(rng)}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
        case 3:
            return {"structured_outputs": {"choice": ["yes", "no", "それ"]}}
        case 4:
            return {"structured_outputs": {"regex": rng.choice(["[a-f]{3,8}", "(fox|owl)+"])}}
        case _:
            return {}


def _schema(rng: Random, depth: int = 0) -> Json:
    match rng.randrange(4 if depth > 1 else 7):
        case 0:
            return {"type": "string", "maxLength": rng.randint(0, 8)}
        case 1:
            return {"type": "integer", "minimum": -9, "maximum": rng.randint(0, 999)}
        case 2:
            return {"enum": ["fox", "東", 3, None, True]}
        case 3:
            return {"type": "boolean"}
        case 4:
            return {"type": "array", "items": _schema(rng, depth + 1), "maxItems": 3}
        case 5:
            return {"anyOf": [_schema(rng, depth + 1) for _ in range(2)]}
        case _:
            return _object(rng, depth + 1)


def _object(rng: Random, depth: int) -> Json:
    properties = {name: _schema(rng, depth) for name in rng.sample(["a", "b", "ü x"], 2)}
    required = [name for name in properties if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _tool(name: str, rng: Random) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": _object(rng, 1)}}


def _text(rng: Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.choice([1, 3, 12, 60])))


def _ids(rng: Random) -> list[int]:
    return rng.sample(_IDS, rng.randint(1, 20))
