"""The differential suite: ours disaggregated equals ours combined, and no spoilt answer passes."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from conformance_kit import LONG_PROMPT_CHARS, compare, findings
from openai_kit import Client
from process_kit import run, running_fleet
from tampering_relay import (
    Change,
    Chunks,
    Relayed,
    choices,
    in_bytes,
    in_head,
    in_stream,
    in_whole,
    last_of,
    relay,
    usage_of,
    with_status,
)

from neuron_di.testing.conformance import (
    CASES,
    Endpoint,
    Probe,
    Rules,
    choose,
    learn,
    random_cases,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

NUM_DRAWN = 60

# What this server does not do, or its model's template cannot. Each is refused by name.
REFUSED = {
    "beam-search", "cache-salt", "chat-documents", "chat-echo", "chat-functions", "chat-image",
    "chat-role",
    "chat-modalities-audio", "chat-prediction", "chat-reasoning-effort", "chat-template",
    "chat-template-kwargs", "chat-verbosity", "chat-web-search", "prompt-embeds",
    "request-id-field", "stream-interval", "suffix", "thinking-budget", "tools-auto", "vllm-xargs",
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tool_tales_1p1d: Client) -> Client:
    return tool_tales_1p1d


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def combined(tool_tales: Path) -> AsyncIterator[Client]:
    async with running_fleet(tool_tales, combined=True) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def probe(pair: Client) -> Probe:
    endpoint = Endpoint("A", pair.url, pair.session)
    return await learn(endpoint, long_prompt_chars=LONG_PROMPT_CHARS)


async def test_two_workers_answer_as_one_does(pair: Client, combined: Client, probe: Probe) -> None:
    """To the bit, in every field that may be equal, whole and streamed."""
    results = await compare((pair.url, combined.url), pair, probe, [])
    assert len(results) == len(CASES)
    assert findings(results) == []
    refused = {result.case.name: set(result.refused) for result in results if result.refused}
    assert refused == {name: {"A", "B"} for name in REFUSED}
    await pair.until_idle()
    await combined.until_idle()


async def test_nor_do_they_differ_in_requests_that_are_drawn(
    pair: Client, combined: Client, probe: Probe
) -> None:
    cases = list(random_cases(0, NUM_DRAWN))
    results = await compare((pair.url, combined.url), pair, probe, [], cases=cases)
    assert findings(results) == []
    refused = [result for result in results if result.refused]
    assert len(refused) < NUM_DRAWN / 10
    await pair.until_idle()
    await combined.until_idle()


# What a relay in between may spoil.


def _drop(at: int) -> Change:
    return in_stream(lambda chunks: chunks.pop(at) and None)


def _double(at: int) -> Change:
    return in_stream(lambda chunks: chunks.insert(at, chunks[at]))


def _swap(chunks: Chunks) -> None:
    chunks[1], chunks[2] = chunks[2], chunks[1]


def _merge(chunks: Chunks) -> None:
    text = choices([chunks.pop(2)])[0]["text"]
    choices(chunks)[1]["text"] += text


def _set(key: str, value: Any, *, of: Callable[[Chunks], Any]) -> Change:
    return in_stream(lambda chunks: of(chunks).__setitem__(key, value))


def _leak_prefill(chunks: Chunks) -> None:
    """The prefill leg's own end, seen by the client."""
    choices(chunks)[0]["finish_reason"] = "length"


def _count_twice(chunks: Chunks) -> None:
    usage = usage_of(chunks)
    usage["prompt_tokens"] *= 2
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]


def _one_token_less(document: Any) -> None:
    document["usage"]["completion_tokens"] -= 1
    document["usage"]["total_tokens"] -= 1


def _lose_arguments(chunks: Chunks) -> None:
    calls = [c["delta"]["tool_calls"][0] for c in choices(chunks) if c["delta"].get("tool_calls")]
    calls[-2]["function"]["arguments"] = ""


def _name_call_again(chunks: Chunks) -> None:
    calls = [c["delta"]["tool_calls"][0] for c in choices(chunks) if c["delta"].get("tool_calls")]
    calls[-1]["id"] = calls[0]["id"]


def _mix_choices(chunks: Chunks) -> None:
    """A token of one choice is given to another."""
    choices(chunks)[3]["index"] = (choices(chunks)[3]["index"] + 1) % 3


def _nudge_logprob(chunks: Chunks) -> None:
    choices(chunks)[0]["logprobs"]["token_logprobs"][0] -= 1e-7


def _break_off(chunks: Chunks) -> None:
    error = {"message": "gone", "type": "server_error", "param": None, "code": "x"}
    chunks[2:] = [{"error": error}, "[DONE]"]


def _with_one_id(relayed: Relayed) -> None:
    in_whole(lambda document: document.update(id="one"))(relayed)
    in_stream(lambda chunks: [c.update(id="one") for c in chunks[:-1]] and None)(relayed)


def _cut_character(body: bytes) -> bytes:
    at = body.index("京".encode())
    return body[: at + 1] + body[at + 3 :]


def _answer_with_error(relayed: Relayed) -> None:
    """What must never be: an error with status 200."""
    error = {"message": "no", "type": "x", "param": None, "code": None}
    relayed.body = json.dumps({"error": error}).encode()


SPOILT: list[tuple[str, str, Change, str]] = [
    # (what is done, to which case, how, what must be found)
    ("a token is lost", "length-64", _drop(3), "/B stream $.choices[0].text"),
    ("the first token is lost", "length-64", _drop(0), "/B stream $.choices[0].text"),
    ("a token comes twice", "length-64", _double(3), "/B stream $.choices[0].text"),
    ("two tokens change places", "length-64", in_stream(_swap), "/B stream $.choices[0].text"),
    ("two choices are mixed", "n-3", in_stream(_mix_choices), "/B stream $.choices["),
    ("two chunks become one", "length-64", in_stream(_merge), "$.choices[0].pieces[1]"),
    ("the finish reason is another", "length-64", _set("finish_reason", "stop", of=last_of),
     "$.choices[0].finish_reason 'length' 'stop'"),
    ("the finish reason is not known", "length-1", _set("finish_reason", "abort", of=last_of),
     "has finish_reason 'abort'"),
    ("the finish reason is missing", "length-64", _set("finish_reason", None, of=last_of),
     "has 0 finish reasons"),
    ("the prefill leg's end is seen", "length-64", in_stream(_leak_prefill),
     "has 2 finish reasons"),
    ("the end comes early", "length-64", in_stream(lambda c: c.insert(2, c.pop(-3))),
     "goes on behind its finish reason"),
    ("usage is missing", "length-64", _drop(-2), "does not end with one chunk of usage alone"),
    ("usage comes unasked", "stream-no-usage",
     in_stream(lambda c: c[0].update(usage={"prompt_tokens": 1})), "was not asked for"),
    ("usage comes early", "length-64",
     in_stream(lambda c: c[0].update(usage=usage_of(c))), "is not the last chunk's"),
    ("the prompt is counted twice", "length-64", in_stream(_count_twice), "$.usage.prompt_tokens"),
    ("the sum is wrong", "length-64", _set("total_tokens", 1, of=usage_of), "is not the sum"),
    ("a token is not counted", "length-ignore-eos", in_whole(_one_token_less),
     "answers of full length have 96 tokens"),
    ("cached tokens are others", "length-64",
     _set("prompt_tokens_details", {"cached_tokens": 1}, of=usage_of), "cached_tokens"),
    ("the id changes", "length-64", in_stream(lambda c: c[3].update(id="cmpl-other")),
     "chunk[3].id changed within the stream"),
    ("the model changes", "length-64", in_stream(lambda c: c[3].update(model="other")),
     "chunk[3].model changed within the stream"),
    ("the time changes", "length-64", in_stream(lambda c: c[3].update(created=1)),
     "chunk[3].created changed within the stream"),
    ("the time is no time", "length-64",
     in_whole(lambda d: d.update(created=5)), "$.created is not a time within a day of now"),
    ("an id comes twice", "length-64", _with_one_id, "$.id is that of B whole of length-64, too"),
    ("a key comes twice", "chat",
     in_bytes(lambda body: body.replace(b'"choices"', b'"choices": [], "choices"', 1)),
     "event[0] has 'choices' twice in one object"),
    ("chunks are no chunks", "chat", in_stream(lambda c: c[1].update(object="chat.completion")),
     "object is not 'chat.completion.chunk'"),
    ("a data line is split", "length-64",
     in_bytes(lambda body: body.replace(b',"choices"', b',\n"choices"', 1)
              .replace(b', "choices"', b',\n"choices"', 1)), "is not one line that begins with"),
    ("two events are merged", "length-64", in_bytes(lambda body: body.replace(b"\n\n", b"\n", 1)),
     "is not one line that begins with"),
    ("JSON is cut", "length-64", in_bytes(lambda body: body.replace(b"}\n\n", b"\n\n", 1)),
     "is not a JSON object"),
    ("the stream is cut", "length-64", in_bytes(lambda body: body[: len(body) // 2]),
     "does not end with an empty line"),
    ("[DONE] is missing", "length-64", _drop(-1), "has 0 times [DONE]"),
    ("[DONE] comes twice", "length-64", _double(-1), "follows [DONE]"),
    ("something follows [DONE]", "length-64", in_stream(lambda c: c.append(c[0])),
     "follows [DONE]"),
    ("an error in the stream", "length-64", in_stream(_break_off), "ends with an error event"),
    ("a character is cut", "unicode-completion", in_bytes(_cut_character), "is not UTF-8"),
    ("the role is missing", "chat",
     in_stream(lambda c: choices(c)[0]["delta"].pop("role") and None), "does not begin with"),
    ("the role comes twice", "chat",
     in_stream(lambda c: choices(c)[1]["delta"].update(role="assistant")), "more than once"),
    ("token 0 has no logprob", "logprobs-1", _set("logprobs", None, of=lambda c: choices(c)[0]),
     "$.choices[0].logprobs"),
    ("a logprob is not exact", "logprobs-5", in_stream(_nudge_logprob), "token_logprobs[0]"),
    ("an offset is wrong", "logprobs-5",
     in_stream(lambda c: choices(c)[2]["logprobs"].update(text_offset=[999])), "text_offset"),
    ("logprobs come unasked", "chat", in_whole(
        lambda d: d["choices"][0].update(logprobs={"content": []})), "were not asked for"),
    ("arguments are lost", "tools-named", in_stream(_lose_arguments), "function.arguments"),
    ("a call is named twice", "tools-named", in_stream(_name_call_again), "again in a later piece"),
    ("the stop string is shown", "stop-later",
     in_whole(lambda d: d["choices"][0].update(text="\x00")), "A whole/B whole $.choices[0].text"),
    ("the text is another", "chat",
     in_whole(lambda d: d["choices"][0]["message"].update(content="other")),
     "$.choices[0].message.content"),
    ("a field is missing", "chat",
     in_whole(lambda d: d["choices"][0].pop("stop_reason", 1) and None), "(absent)"),
    ("a field is new", "chat", in_whole(lambda d: d.update(extra=1)), "$.extra (absent) 1"),
    ("choices change places", "prompts-2", in_whole(lambda d: d["choices"].reverse()),
     "have the indices [1, 0]"),
    ("a choice is missing", "n-3", in_whole(lambda d: d["choices"].pop() and None),
     "have the indices [0, 1]"),
    ("the stream has another type", "length-1", in_head(content_type="text/plain"),
     "header content-type"),
    ("the request's id is not echoed", "request-id", in_head(x_request_id="other"),
     "x-request-id is not what the client sent"),
    ("an error has status 200", "length-1", _answer_with_error, "$.choices have the indices []"),
    ("an error has another status", "refuse-model", with_status(500), "status is 500, not 404"),
    ("an error lacks a key", "refuse-n-0", in_whole(lambda d: d["error"].pop("param") and None),
     "$.error.param is missing"),
    ("an error has another code", "refuse-n-0", in_whole(lambda d: d["error"].update(code="x")),
     "$.error.code"),
    ("an error names nothing", "refuse-top-p-0",
     in_whole(lambda d: d["error"].update(param=None, message="no")), "does not name `top_p`"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "change", "found"),
    [spoilt[1:] for spoilt in SPOILT],
    ids=[spoilt[0].replace(" ", "-") for spoilt in SPOILT],
)
async def test_what_is_spoilt_is_found(
    pair: Client, probe: Probe, case: str, change: Change, found: str
) -> None:
    async with relay(pair.url, pair.session, change) as spoilt_url:
        results = await compare((pair.url, spoilt_url), pair, probe, [case])
    assert [line for line in findings(results) if found in line], findings(results)
    assert results[0].outcome in ("broken", "differs")


async def test_a_relay_that_changes_nothing_is_found_equal(pair: Client, probe: Probe) -> None:
    """So that it is the changes that are found."""
    names = sorted({spoilt[1] for spoilt in SPOILT})
    async with relay(pair.url, pair.session) as url:
        results = await compare((pair.url, url), pair, probe, names)
    assert len(results) == len(names)
    assert findings(results) == []


def _as_others_do(relayed: Relayed) -> None:
    """Habits of other servers that break no rule."""
    if relayed.status != 200:
        in_whole(lambda document: document["error"].update(code=relayed.status))(relayed)
    in_whole(lambda document: document.update(service_tier=None, kv_transfer_params=None))(relayed)
    in_stream(_with_other_chunks)(relayed)
    if relayed.is_stream:
        relayed.headers["content-type"] = "text/event-stream; charset=utf-8"
        relayed.body = b": hello\n\n" + relayed.body


def _with_other_chunks(chunks: Chunks) -> None:
    """The role first and alone, the end with the last token, and no usage where it is null."""
    for chunk in chunks[:-1]:
        if not chunk.get("usage"):
            chunk.pop("usage", None)
    mine = [chunk for chunk in chunks[:-1] if chunk["choices"]]
    if len({chunk["choices"][0]["index"] for chunk in mine}) != 1 or len(mine) < 2:
        return
    end, before = mine[-1]["choices"][0], mine[-2]["choices"][0]
    if not end.get("text") and not end.get("delta"):
        before.update(finish_reason=end["finish_reason"], stop_reason=end["stop_reason"])
        chunks.remove(mine[-1])
    if "delta" in before and "role" in mine[0]["choices"][0]["delta"]:
        first = json.loads(json.dumps(mine[0]))
        del mine[0]["choices"][0]["delta"]["role"]
        first["choices"][0] |= {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        first["choices"][0] |= {"finish_reason": None, "token_ids": None}
        chunks.insert(0, first)


async def test_habits_of_other_servers_are_no_faults(pair: Client, probe: Probe) -> None:
    patterns = ["length-*", "stop-*", "logprobs-*", "chat*", "tools-*", "format-*", "refuse-n-*"]
    async with relay(pair.url, pair.session, _as_others_do) as url:
        results = await compare((pair.url, url), pair, probe, patterns, Rules())
        strictly = await compare((pair.url, url), pair, probe, ["length-64"])
    assert findings(results) == []
    assert findings(strictly) != [], "the relay does change something"


# The command.


async def test_the_command_says_what_it_found(pair: Client, combined: Client) -> None:
    ended = await run("conformance", pair.url, f"{combined.url}/v1", "--case=stop-*",
                      "--case=prompt-long")  # fmt: skip
    assert (ended.code, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "prompt-long: refused" in lines  # 100,000 characters are more than the context holds
    assert (
        lines[-1]
        == f"{len(choose(['stop-*'])) + 1} cases: {len(choose(['stop-*']))} same, 1 refused"
    )


async def test_the_command_shows_where_and_what(pair: Client) -> None:
    def change(relayed: Relayed) -> None:
        in_whole(lambda d: d["choices"][0].update(finish_reason="stop"))(relayed)

    async with relay(pair.url, pair.session, change) as url:
        told = await run("conformance", pair.url, url, "--case=length-64")
        document = await run("conformance", pair.url, url, "--case=length-64", "--json")
    assert (told.code, document.code) == (1, 1)
    assert "$.choices[0].finish_reason" in told.stdout
    assert "    A whole   'length'" in told.stdout
    (case,) = json.loads(document.stdout)["cases"]
    assert case["outcome"] == "differs"
    assert case["differences"][0] == {
        "path": "$.choices[0].finish_reason", "A whole": "'length'", "B whole": "'stop'"
    }  # fmt: skip


async def test_the_command_ends_with_2_where_nothing_can_be_tried(pair: Client) -> None:
    for arguments, words in (
        ((pair.url, "http://127.0.0.1:9"), "no endpoint answers at http://127.0.0.1:9"),
        ((pair.url, pair.url, "--model=nobody"), "has no model 'nobody'"),
        ((pair.url, pair.url, "--case=nothing"), "no case is called nothing"),
        ((pair.url,), "two URLs are needed"),
        ((pair.url, pair.url, "--key-env-a=NO_SUCH_NAME"), "the environment has no NO_SUCH_NAME"),
    ):
        ended = await run("conformance", *arguments)
        assert ended.code == 2
        assert words in ended.stderr
        assert ended.stdout == ""


async def test_the_command_lists_its_cases(pair: Client) -> None:
    ended = await run("conformance", "--list")
    assert ended.code == 0
    assert len(ended.stdout.splitlines()) == len(CASES)
