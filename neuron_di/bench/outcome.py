"""What an answer was: read from its bytes when it is over, not while others are timed."""

from array import array
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from neuron_di.bench.client import Heard
from neuron_di.bench.measured import Ending, Outcome

_DONE = b"[DONE]"
_NAN = float("nan")


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None  # some servers send null or [] in every chunk


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_token(self) -> bool:
        """Does it stand for a token? One may have no text of its own, as half a character has."""
        if self.text:
            return True
        if self.delta is None:
            return self.text is not None and self.finish_reason is None
        delta = self.delta
        if delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls:
            return True
        # The chunk that only says who speaks, and the one that only says why it ended, have none.
        return delta.content is not None and delta.role is None and self.finish_reason is None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None
    message: str | None = None  # of an error, as some servers send it


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True, slots=True)
class Expected:
    """What was asked for. `is_exact`: the endpoint was told not to end before `num_tokens`."""

    num_tokens: int
    is_exact: bool


@dataclass(slots=True)
class _Read:
    """A stream, read. `token_times_s`: one per chunk with a token."""

    token_times_s: "array[float]"
    usage: _Usage | None = None
    finish_reason: str | None = None
    is_done: bool = False
    error: str | None = None
    trouble: str | None = None  # what could not be understood


def read_outcome(heard: Heard, expected: Expected) -> Outcome:
    """The outcome of a streamed request."""
    if heard.end == "connection":
        return Outcome(ending="connection", end_s=heard.end_s, why=heard.why)
    if heard.status != 200 and heard.end != "timeout":
        return Outcome(ending=_refusal(heard.status), end_s=heard.end_s, why=explain(heard))
    read = _read_stream(heard)
    ending, why = _ending(heard, read, expected)
    times_s, usage = read.token_times_s, read.usage
    return Outcome(
        ending=ending,
        first_s=times_s[0] if times_s else _NAN,
        last_s=times_s[-1] if times_s else _NAN,
        end_s=heard.end_s,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        output_tokens=usage.completion_tokens if usage else len(times_s),
        num_chunks=len(times_s),
        gaps_s=[b - a for a, b in pairwise(times_s)],
        why=why,
    )


def explain(heard: Heard) -> str:
    """What a refusal says of itself."""
    try:
        chunk = _decoder.decode(heard.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"status {heard.status}"
    words = _error_words(chunk)
    return f"status {heard.status}: {words}" if words else f"status {heard.status}"


def _refusal(status: int) -> Ending:
    return {429: "refused_429", 503: "refused_503"}.get(status, "refused")  # type: ignore[return-value]


def _ending(heard: Heard, read: _Read, expected: Expected) -> tuple[Ending, str]:
    if read.error is not None:
        return "error_event", read.error
    if heard.end == "timeout":
        return "timeout", heard.why
    if read.trouble is not None:
        return "bad_answer", read.trouble
    if heard.end == "cut" or not read.is_done:
        return "cut", heard.why or "the response ended without [DONE]"
    if read.usage is None:
        # Chunks may hold several tokens: their number proves nothing.
        return ("ok", "") if read.token_times_s else ("wrong_tokens", "no token came")
    num, wanted = read.usage.completion_tokens, expected.num_tokens
    is_short = num < wanted and (expected.is_exact or read.finish_reason == "length")
    if num > wanted or is_short or num == 0 or not read.token_times_s:
        return (
            "wrong_tokens",
            f"{num} tokens for {wanted}, {len(read.token_times_s)} chunks with text",
        )
    return "ok", ""


def _read_stream(heard: Heard) -> _Read:
    """Take the events apart. A time is that of the piece in which an event ended."""
    read = _Read(array("d"))
    rest = b""
    for at_s, piece in zip(heard.times_s, heard.pieces, strict=True):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                _read_event(read, line[5:].strip(), at_s)
    return read


def _read_event(read: _Read, data: bytes, at_s: float) -> None:
    if data == _DONE:
        read.is_done = True
        return
    try:
        chunk = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        read.trouble = read.trouble or f"an event is no chunk: {error}"
        return
    if chunk.error is not None or (chunk.message is not None and not chunk.choices):
        read.error = read.error or _error_words(chunk) or "an error without words"
    for choice in chunk.choices:
        if choice.has_token():
            read.token_times_s.append(at_s)
        if choice.finish_reason is not None:
            read.finish_reason = choice.finish_reason
    if chunk.usage is not None:
        read.usage = chunk.usage


def _error_words(chunk: _Chunk) -> str:
    if isinstance(chunk.error, str):
        return chunk.error
    if chunk.error is None:
        return chunk.message or ""
    return chunk.error.message or str(chunk.error.code or chunk.error.type or "")
