"""What must hold for every whole answer, and for every refusal, whoever wrote it."""

import re
from collections.abc import Iterator
from typing import Any

from neuron_di.clock import unix_s
from neuron_di.testing.conformance.exchange import Heard, Json
from neuron_di.testing.conformance.finding import Fault

# By whether it is a chat.
FINISH_REASONS = {
    True: ("stop", "length", "tool_calls", "content_filter", "function_call"),
    False: ("stop", "length", "content_filter"),
}
ERROR_KEYS = ("message", "type", "param", "code")
DAY_S = 86_400  # a clock may be wrong, or in another zone
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def is_chat(body: Json) -> bool:
    return "messages" in body


def num_choices_of(body: Json) -> int:
    """How many choices a request asks for."""
    prompt = body.get("prompt")
    many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return (body.get("n") or 1) * (len(prompt) if isinstance(prompt, list) and many else 1)


def check_answer(body: Json, document: Any) -> Iterator[Fault]:
    """The rules of an answer, whole or joined from its chunks."""
    if not isinstance(document, dict):
        yield Fault("$", "is not a JSON object")
        return
    wanted = "chat.completion" if is_chat(body) else "text_completion"
    if document.get("object") != wanted:
        yield Fault("$.object", f"is not {wanted!r}")
    if not (isinstance(document.get("id"), str) and document["id"]):
        yield Fault("$.id", "is not a text")
    created = document.get("created")
    if not isinstance(created, int):
        yield Fault("$.created", "is not a whole number")
    elif abs(created - unix_s()) > DAY_S:
        yield Fault("$.created", "is not a time within a day of now, in seconds since 1970")
    if document.get("model") != body["model"]:
        yield Fault("$.model", "is not what was asked for")
    choices = document.get("choices") or []
    indices = [choice.get("index") for choice in choices]
    if indices != list(range(num_choices_of(body))):
        yield Fault("$.choices", f"have the indices {indices}")
    for number, choice in enumerate(choices):
        yield from _check_choice(body, choice, f"$.choices[{number}]")
    is_told = not body.get("stream") or (body.get("stream_options") or {}).get("include_usage")
    if is_told:
        usage = document.get("usage")
        yield from check_usage(usage, "$.usage")
        if isinstance(usage, dict):
            yield from _check_counts(body, choices, usage)


def check_usage(usage: Any, where: str) -> Iterator[Fault]:
    """The arithmetic of a usage report."""
    if not isinstance(usage, dict):
        yield Fault(where, "is missing")
        return
    keys = ("prompt_tokens", "completion_tokens", "total_tokens")
    counts = [usage.get(key) for key in keys]
    for key, count in zip(keys, counts, strict=True):
        if not isinstance(count, int) or count < 0:
            yield Fault(f"{where}.{key}", "is not a count")
            return
    num_prompt, num_generated, total = (int(count or 0) for count in counts)
    if total != num_prompt + num_generated:
        yield Fault(f"{where}.total_tokens", "is not the sum")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None and not 0 <= cached <= num_prompt:
        yield Fault(f"{where}.prompt_tokens_details.cached_tokens", "is not part of the prompt")


def _check_counts(body: Json, choices: list[Json], usage: Json) -> Iterator[Fault]:
    where = "$.usage.completion_tokens"
    count = usage.get("completion_tokens")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if not isinstance(count, int) or not choices:
        return
    if limit is not None:
        if count > limit * len(choices):
            yield Fault(where, f"is {count}: more than `max_tokens` allows")
        if all(choice.get("finish_reason") == "length" for choice in choices) and (
            count != limit * len(choices)
        ):
            yield Fault(where, f"is {count}: answers of full length have {limit} tokens")
    ids = [choice.get("token_ids") for choice in choices]
    if all(isinstance(each, list) for each in ids) and sum(map(len, ids)) != count:  # type: ignore[arg-type]
        yield Fault(where, "is not how many token_ids there are")
    logprobs = [_num_logprobs(choice) for choice in choices]
    if not body.get("echo") and None not in logprobs and sum(n or 0 for n in logprobs) != count:
        yield Fault(where, "is not how many logprobs there are")


def _num_logprobs(choice: Json) -> int | None:
    found = choice.get("logprobs")
    if not isinstance(found, dict):
        return None
    return len(found.get("content") or found.get("tokens") or ())


def _check_choice(body: Json, choice: Json, where: str) -> Iterator[Fault]:
    reason = choice.get("finish_reason")
    if reason not in FINISH_REASONS[is_chat(body)]:
        yield Fault(f"{where}.finish_reason", f"is {reason!r}")
    if is_chat(body):
        message = choice.get("message")
        if not isinstance(message, dict) or message.get("role") != "assistant":
            yield Fault(f"{where}.message.role", "is not `assistant`")
    elif not isinstance(choice.get("text"), str):
        yield Fault(f"{where}.text", "is not a text")
    if _asks_logprobs(body):
        yield from _check_logprobs(body, choice.get("logprobs"), f"{where}.logprobs")
    elif choice.get("logprobs") is not None:
        yield Fault(f"{where}.logprobs", "were not asked for")


def _asks_logprobs(body: Json) -> bool:
    asked = body.get("logprobs")
    return bool(asked) if is_chat(body) else asked is not None


def _check_logprobs(body: Json, found: Any, where: str) -> Iterator[Fault]:
    if not isinstance(found, dict):
        yield Fault(where, "are missing")
    elif is_chat(body):
        for number, item in enumerate(found.get("content") or ()):
            here = f"{where}.content[{number}]"
            if not {"token", "logprob", "bytes", "top_logprobs"} <= item.keys():
                yield Fault(here, "lacks token, logprob, bytes or top_logprobs")
            elif item["logprob"] > 0:
                yield Fault(f"{here}.logprob", "is above 0")
            elif len(item["top_logprobs"]) < (body.get("top_logprobs") or 0):
                yield Fault(f"{here}.top_logprobs", "are fewer than asked for")
    else:
        lengths = {key: len(found.get(key) or ()) for key in _LISTS}
        if not body["logprobs"] and not lengths["top_logprobs"]:
            lengths.pop("top_logprobs")
        if len(set(lengths.values())) != 1:
            yield Fault(where, f"has lists of different length: {lengths}")
        offsets = found.get("text_offset") or []
        if offsets != sorted(offsets):
            yield Fault(f"{where}.text_offset", "goes back")


def check_refusal(heard: Heard, statuses: tuple[int, ...], param: str | None) -> Iterator[Fault]:
    """The rules of an error: its status and OpenAI's error document, all four keys of it."""
    if heard.status not in statuses:
        allowed = " or ".join(map(str, statuses))
        yield Fault("status", f"is {heard.status}, not {allowed}")
        if heard.status == 200:
            return
    if heard.content_type != "application/json":
        yield Fault("header content-type", f"is {heard.content_type!r}")
    error = heard.error()
    if error is None:
        yield Fault("$.error", "is missing")
        return
    for key in ERROR_KEYS:
        if key not in error:
            yield Fault(f"$.error.{key}", "is missing")
    if not (isinstance(error.get("message"), str) and error["message"]):
        yield Fault("$.error.message", "says nothing")
    if param is not None and not names(error, param):
        yield Fault("$.error", f"does not name `{param}`")


def names(error: Json, param: str) -> bool:
    """Whether an error says which field it is about: the whole word, as `n` is in most others."""
    words = f"{error.get('param')} {error.get('message')}"
    return re.search(rf"(?<!\w){re.escape(param)}(?!\w)", words) is not None
