"""What must hold for every stream of chunks, whoever wrote it."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from neuron_di.testing.conformance.answer_rules import FINISH_REASONS, check_usage, is_chat
from neuron_di.testing.conformance.exchange import Heard, Json
from neuron_di.testing.conformance.finding import Fault

# What a choice in a chunk may carry beside its index without saying anything new.
_SILENT: tuple[Any, ...] = (None, "", [], {})


def check_stream(body: Json, heard: Heard, chunks: list[Json]) -> Iterator[Fault]:
    """The rules of a stream as such; `answer_rules` has those of what it adds up to."""
    if heard.content_type != "text/event-stream":
        yield Fault("header content-type", f"is {heard.content_type!r}")
    if any("error" in chunk for chunk in chunks):
        yield Fault("stream", "ends with an error event")
        return
    if not chunks:
        yield Fault("stream", "has no chunk")
        return
    yield from _check_constants(body, chunks)
    yield from _check_choices(body, chunks)
    yield from _check_usage(body, chunks)


def _check_constants(body: Json, chunks: list[Json]) -> Iterator[Fault]:
    wanted = "chat.completion.chunk" if is_chat(body) else "text_completion"
    first = chunks[0]
    for number, chunk in enumerate(chunks):
        if chunk.get("object") != wanted:
            yield Fault(f"chunk[{number}].object", f"is not {wanted!r}")
        for key in ("id", "created", "model"):
            if chunk.get(key) != first.get(key):
                yield Fault(f"chunk[{number}].{key}", "changed within the stream")
            elif not chunk.get(key):
                yield Fault(f"chunk[{number}].{key}", "is missing")


def _check_choices(body: Json, chunks: list[Json]) -> Iterator[Fault]:
    by_index: dict[Any, list[tuple[int, Json]]] = defaultdict(list)
    for number, chunk in enumerate(chunks):
        for choice in chunk.get("choices") or ():
            by_index[choice.get("index")].append((number, choice))
    for index, mine in by_index.items():
        where = f"choice {index}"
        ends = [number for number, choice in mine if choice.get("finish_reason") is not None]
        if len(ends) != 1:
            yield Fault(where, f"has {len(ends)} finish reasons")
        elif any(number > ends[0] and _says_more(choice) for number, choice in mine):
            yield Fault(where, "goes on behind its finish reason")
        for number, choice in mine:
            reason = choice.get("finish_reason")
            if reason is not None and reason not in FINISH_REASONS[is_chat(body)]:
                yield Fault(f"chunk[{number}] of {where}", f"has finish_reason {reason!r}")
        if is_chat(body):
            yield from _check_deltas(where, [choice.get("delta") or {} for _, choice in mine])


def _says_more(choice: Json) -> bool:
    rest = {key: value for key, value in choice.items() if key not in ("index", "delta")}
    said = [*rest.values(), *(choice.get("delta") or {}).values()]
    return any(value not in _SILENT for value in said)


def _check_deltas(where: str, deltas: list[Json]) -> Iterator[Fault]:
    roles = [delta.get("role") for delta in deltas]
    if not roles or roles[0] != "assistant":
        yield Fault(where, "does not begin with the role `assistant`")
    if sum(role is not None for role in roles) > 1:
        yield Fault(where, "says its role more than once")
    known: set[int] = set()
    for delta in deltas:
        for call in delta.get("tool_calls") or ():
            index = call.get("index")
            if not isinstance(index, int):
                yield Fault(where, "has a piece of a tool call without an index")
                continue
            is_named = bool(call.get("id")) and bool((call.get("function") or {}).get("name"))
            if index in known:
                if call.get("id") or (call.get("function") or {}).get("name"):
                    yield Fault(where, f"names tool call {index} again in a later piece")
            elif index != len(known) or not is_named:
                yield Fault(where, f"begins tool call {index} without its place, id or name")
            known.add(index)


def _check_usage(body: Json, chunks: list[Json]) -> Iterator[Fault]:
    options = body.get("stream_options") or {}
    is_continuous = bool(options.get("continuous_usage_stats"))
    told = [(number, chunk) for number, chunk in enumerate(chunks) if chunk.get("usage")]
    bare = [number for number, chunk in enumerate(chunks) if not chunk.get("choices")]
    if not options.get("include_usage"):
        if told:
            yield Fault(f"chunk[{told[0][0]}].usage", "was not asked for")
        return
    last = len(chunks) - 1
    if bare != [last] or not chunks[last].get("usage"):
        yield Fault("stream", "does not end with one chunk of usage alone")
    if not is_continuous and [number for number, _ in told] not in ([], [last]):
        yield Fault(f"chunk[{told[0][0]}].usage", "is not the last chunk's")
    counts = [chunk["usage"].get("completion_tokens", 0) for _, chunk in told[:-1]]
    if is_continuous:
        num_choices = len({c.get("index") for chunk in chunks for c in chunk.get("choices") or ()})
        if num_choices == 1 and counts != sorted(counts):
            yield Fault("usage", "of the chunks does not only grow")
        for number, chunk in told:
            yield from check_usage(chunk["usage"], f"chunk[{number}].usage")
