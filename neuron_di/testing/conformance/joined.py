"""A stream's events, and the whole answer that they add up to."""

from collections.abc import Iterator
from typing import Any

from neuron_di.testing.conformance.exchange import Json, read_json
from neuron_di.testing.conformance.finding import Fault, shorten

DONE = "[DONE]"


def read_events(body: bytes) -> tuple[list[Json], list[Fault]]:
    """The chunks of a stream, and what is wrong with its framing.

    An event is one line `data: …` and an empty line; comments may stand between events.
    """
    faults: list[Fault] = []
    try:
        text = body.decode()
    except UnicodeDecodeError:
        faults.append(Fault("stream", "is not UTF-8: a character was cut between two events"))
        text = body.decode("utf-8", "replace")
    pieces = text.replace("\r\n", "\n").split("\n\n")
    if pieces.pop() != "":
        faults.append(Fault("stream", "does not end with an empty line"))
    chunks: list[Json] = []
    num_done = 0
    for number, piece in enumerate(pieces):
        lines = [line for line in piece.strip("\n").split("\n") if not line.startswith(":")]
        if not lines:
            continue
        where = f"event[{number}]"
        if len(lines) != 1 or not lines[0].startswith("data:"):
            faults.append(Fault(where, "is not one line that begins with `data:`"))
            continue
        if num_done:
            faults.append(Fault(where, "follows [DONE]"))
        data = lines[0].removeprefix("data:").strip()
        if data == DONE:
            num_done += 1
            continue
        chunk, doubled = read_json(data)
        faults += [Fault(where, f"has {shorten(key)} twice in one object") for key in doubled]
        if isinstance(chunk, dict):
            chunks.append(chunk)
        else:
            faults.append(Fault(where, "is not a JSON object"))
    if num_done != 1 and not any("error" in chunk for chunk in chunks):
        faults.append(Fault("stream", f"has {num_done} times [DONE]"))
    return chunks, faults


def join(chunks: list[Json]) -> Json:
    """The document that the same request would have got without `stream`.

    `pieces` of a choice, which no document has, are the texts of its chunks.
    """
    whole: Json = {}
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for key, value in chunk.items():
            if key not in ("choices", "object") and value is not None:
                whole[key] = value
        whole["object"] = str(chunk.get("object", "")).removesuffix(".chunk")
        for choice in _dicts(chunk.get("choices")):
            index = choice.get("index")
            if isinstance(index, int):
                _add(choices.setdefault(index, {"index": index, "pieces": []}), choice)
    for choice in choices.values():
        message = choice.get("message")
        if message is not None and "tool_calls" in message:
            message["tool_calls"] = list(message["tool_calls"].values())
    whole["choices"] = [choices[index] for index in sorted(choices)]
    return whole


def _add(joined: Json, choice: Json) -> None:
    for key, value in choice.items():
        if key == "text":
            _append(joined, key, value)
            if value:
                joined["pieces"].append(value)
        elif key == "delta" and isinstance(value, dict):
            _add_delta(joined, value)
        elif key == "token_ids":
            known = joined.get(key)
            joined[key] = known if value is None else [*(known or ()), *value]
        elif key == "logprobs":
            _add_logprobs(joined, value)
        elif key != "index" and (value is not None or key not in joined):
            joined[key] = value


def _add_delta(joined: Json, delta: Json) -> None:
    message = joined.setdefault("message", {"role": None, "content": None})
    for key, value in delta.items():
        if key == "tool_calls":
            calls = message.setdefault("tool_calls", {})
            for piece in _dicts(value):
                _add_call(calls.setdefault(piece.get("index"), {}), piece)
        elif key in ("content", "reasoning", "reasoning_content", "refusal"):
            _append(message, key, value)
            if value and key == "content":
                joined["pieces"].append(value)
        elif value is not None:
            message[key] = value


def _add_call(call: Json, piece: Json) -> None:
    for key, value in piece.items():
        if key == "function" and isinstance(value, dict):
            function = call.setdefault("function", {"name": None, "arguments": ""})
            if value.get("name") is not None:
                function["name"] = value["name"]
            _append(function, "arguments", value.get("arguments"))
        elif key != "index" and value is not None:
            call[key] = value


def _add_logprobs(joined: Json, value: Any) -> None:
    if not isinstance(value, dict):
        joined.setdefault("logprobs", None)
        return
    known = joined.get("logprobs") or {}
    for key, items in value.items():
        known[key] = [*(known.get(key) or ()), *items] if isinstance(items, list) else items
    joined["logprobs"] = known


def _append(document: Json, key: str, value: Any) -> None:
    """Texts add up; a null adds nothing, and stays null where nothing else comes."""
    before = document.get(key)
    if isinstance(value, str):
        document[key] = (before or "") + value
    else:
        document.setdefault(key, before)


def _dicts(value: Any) -> Iterator[Json]:
    return (
        (each for each in value if isinstance(each, dict)) if isinstance(value, list) else iter(())
    )
