"""What single cases ask of an answer, beyond what holds of all.

A check gets the request's body, whether it needs it or not.
"""

# ruff: noqa: ARG001

import json
from collections.abc import Callable, Iterator
from typing import Any

from neuron_di.testing.conformance.case import Check
from neuron_di.testing.conformance.exchange import Json
from neuron_di.testing.conformance.finding import Fault


def ends(*reasons: str) -> Check:
    """Every choice ends for one of these reasons."""

    def check(body: Json, answer: Json) -> Iterator[Fault]:
        for number, choice in enumerate(answer["choices"]):
            if choice.get("finish_reason") not in reasons:
                where = f"$.choices[{number}].finish_reason"
                yield Fault(where, f"is not {' or '.join(reasons)}")

    return check


def text_is(wanted: Callable[[str], bool], words: str) -> Check:
    """The text of every choice is as `words` say."""

    def check(body: Json, answer: Json) -> Iterator[Fault]:
        for number, choice in enumerate(answer["choices"]):
            if not wanted(text_of(choice)):
                yield Fault(f"$.choices[{number}]", f"has a text that {words}")

    return check


def has(*path: str) -> Check:
    """Every choice has this member."""

    def check(body: Json, answer: Json) -> Iterator[Fault]:
        for number, choice in enumerate(answer["choices"]):
            value: Any = choice
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if not value:
                yield Fault(f"$.choices[{number}].{'.'.join(path)}", "is missing")

    return check


def begins_with_prompt(body: Json, answer: Json) -> Iterator[Fault]:
    """The prompt is echoed."""
    for number, choice in enumerate(answer["choices"]):
        if not text_of(choice).startswith(body["prompt"]):
            yield Fault(f"$.choices[{number}].text", "does not begin with the prompt")


def ends_at_stop(body: Json, answer: Json) -> Iterator[Fault]:
    """Nothing of the stop string is shown, or all of it where that was asked for."""
    stops = [body["stop"]] if isinstance(body["stop"], str) else body["stop"]
    for number, choice in enumerate(answer["choices"]):
        text, where = text_of(choice), f"$.choices[{number}]"
        if choice.get("finish_reason") != "stop":
            yield Fault(f"{where}.finish_reason", "is not stop")
        elif body.get("include_stop_str_in_output"):
            if not text.endswith(tuple(stops)):
                yield Fault(where, "does not end with the stop string")
        elif any(stop in text for stop in stops):
            yield Fault(where, "shows the stop string")


def num_generated_is(wanted: int) -> Check:
    """So many tokens, of all choices together."""

    def check(body: Json, answer: Json) -> Iterator[Fault]:
        found = (answer.get("usage") or {}).get("completion_tokens")
        if found != wanted:
            yield Fault("$.usage.completion_tokens", f"is {found}, not {wanted}")

    return check


def num_generated_at_least(wanted: int) -> Check:
    """So many tokens or more, of all choices together."""

    def check(body: Json, answer: Json) -> Iterator[Fault]:
        found = (answer.get("usage") or {}).get("completion_tokens") or 0
        if found < wanted:
            yield Fault("$.usage.completion_tokens", f"is {found}, less than {wanted}")

    return check


def num_prompt_is(wanted: int) -> Check:
    """So many tokens of the prompt were used."""

    def check(body: Json, answer: Json) -> Iterator[Fault]:
        found = (answer.get("usage") or {}).get("prompt_tokens")
        if found != wanted:
            yield Fault("$.usage.prompt_tokens", f"is {found}, not {wanted}")

    return check


def choices_differ(body: Json, answer: Json) -> Iterator[Fault]:
    """Seeds of their own: not all choices are the same."""
    if len({text_of(choice) for choice in answer["choices"]}) == 1:
        yield Fault("$.choices", "are all the same: each should draw with a seed of its own")


def choices_are_equal(body: Json, answer: Json) -> Iterator[Fault]:
    """Where only the best token may be drawn, all choices of a prompt are the same."""
    if len({text_of(choice) for choice in answer["choices"]}) != 1:
        yield Fault("$.choices", "differ, although only the best token may be drawn")


def is_json(fits: Callable[[Any], bool]) -> Check:
    """Every choice is JSON that fits, whole and ended by itself."""

    def check(body: Json, answer: Json) -> Iterator[Fault]:
        for number, choice in enumerate(answer["choices"]):
            where = f"$.choices[{number}]"
            if choice.get("finish_reason") != "stop":
                yield Fault(f"{where}.finish_reason", "is not stop: the JSON is cut")
                continue
            yield from _json_faults(text_of(choice), fits, where)

    return check


def calls_are(names: Callable[[list[str]], bool], fits: Callable[[Any], bool]) -> Check:
    """Every choice calls tools by such names; the arguments of each call are JSON that fits."""

    def check(body: Json, answer: Json) -> Iterator[Fault]:
        for number, choice in enumerate(answer["choices"]):
            where = f"$.choices[{number}].message.tool_calls"
            calls = (choice.get("message") or {}).get("tool_calls") or []
            called = [call.get("function", {}).get("name") for call in calls]
            if not calls or not names(called):
                yield Fault(where, f"call {called}")
            if len({call.get("id") for call in calls}) != len(calls):
                yield Fault(where, "have ids that are not unique")
            for index, call in enumerate(calls):
                if call.get("type") != "function":
                    yield Fault(f"{where}[{index}].type", "is not function")
                arguments = call.get("function", {}).get("arguments", "")
                yield from _json_faults(arguments, fits, f"{where}[{index}].function.arguments")

    return check


def no_calls(body: Json, answer: Json) -> Iterator[Fault]:
    """No tool is called."""
    for number, choice in enumerate(answer["choices"]):
        if (choice.get("message") or {}).get("tool_calls"):
            yield Fault(f"$.choices[{number}].message.tool_calls", "were not allowed")


def ids_are_among(body: Json, answer: Json) -> Iterator[Fault]:
    """Only allowed tokens were drawn."""
    for number, choice in enumerate(answer["choices"]):
        if not set(choice.get("token_ids") or ()) <= set(body["allowed_token_ids"]):
            yield Fault(f"$.choices[{number}].token_ids", "has an id that is not allowed")


def follows_bias(body: Json, answer: Json) -> Iterator[Fault]:
    """A bias of 100 leaves no other token a chance."""
    (wanted,) = map(int, body["logit_bias"])
    for number, choice in enumerate(answer["choices"]):
        if set(choice.get("token_ids") or ()) - {wanted}:
            yield Fault(f"$.choices[{number}].token_ids", "ignores logit_bias")


def is_full_length(body: Json, answer: Json) -> Iterator[Fault]:
    """Neither an end-of-text token nor anything else ended it."""
    yield from ends("length")(body, answer)


def text_of(choice: Json) -> str:
    """What a choice says: its text, or its message's content."""
    text = choice.get("text")
    if text is None:
        text = (choice.get("message") or {}).get("content")
    return text or ""


def _json_faults(text: str, fits: Callable[[Any], bool], where: str) -> Iterator[Fault]:
    try:
        document = json.loads(text)
    except ValueError:
        yield Fault(where, "is not JSON")
        return
    try:
        is_fitting = fits(document)
    except (TypeError, KeyError, AttributeError):
        is_fitting = False
    if not is_fitting:
        yield Fault(where, "does not fit its schema")
