"""What an answer says of its prompt: echo, ids, logprobs, usage so far."""

import msgspec
import pytest
from answer_documents import (
    chat_answer,
    completion_answer,
    documents,
    ended,
    logprobs,
    streamed,
    whole,
)
from request_bodies import chat, completion

from neuron_di.wire import PromptReport, TokenLogprob, TokenLogprobs

REPORT = PromptReport(text="Hé!", token_ids=[1, 72, 33])


def with_prompt(texts, prompt=REPORT, **changes):
    tokens, end = ended(texts, num_prompt=len(prompt.token_ids), **changes)
    return [msgspec.structs.replace(tokens[0], prompt=prompt), *tokens[1:]], end


def joined(chunks):
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_an_echo_comes_first():
    choice = with_prompt(["", " you", "."], held="..")
    assert whole(completion_answer(echo=True), [choice])["choices"][0]["text"] == "Hé! you..."
    first, *others = streamed(completion_answer(echo=True, stream=True), [choice])
    assert first["choices"][0]["text"] == "Hé!"
    assert joined([first, *others]) == "Hé! you..."


def test_only_the_echo_is_shown_when_no_token_was_asked_for():
    fields = {"echo": True, "max_tokens": 0, "logprobs": 1, "return_token_ids": True}
    choice = with_prompt(["x"], held="y", prompt=PROMPT_WITH_LOGPROBS)
    document = whole(completion_answer(**fields), [choice])
    [written] = document["choices"]
    assert written["text"] == "Hé!"
    assert written["token_ids"] == []
    assert len(written["logprobs"]["tokens"]) == len(PROMPT_WITH_LOGPROBS.token_ids)
    assert (written["finish_reason"], written["stop_reason"]) == ("length", None)
    assert document["usage"]["completion_tokens"] == 0
    assert document["usage"]["total_tokens"] == document["usage"]["prompt_tokens"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = streamed(completion_answer(**fields, **options), [choice])
    assert joined(chunks) == "Hé!"
    assert usage["usage"] == document["usage"]


@pytest.mark.parametrize(
    ("text", "ids", "entries", "tokens", "offsets"),
    [
        # A first token of its own length; one that ends inside of a character.
        ("aHé", [97, 72, 200, 201], [b"H", b"\xc3", b"\xa9"], ["a"], [0, 1, 2, 2]),
        # A first token that is not in the text, as BOS is not.
        ("Hi you", [1, 2, 3], [b"Hi", b" you"], [""], [0, 0, 2]),
        # A tokeniser that puts a space before the first word.
        ("Hi you", [1, 2, 3], [b" Hi", b" you"], [""], [0, 0, 2]),
    ],
)
def test_an_echo_has_logprobs_and_offsets_of_its_own(text, ids, entries, tokens, offsets):
    check_echo(text, ids, b"", entries, tokens, offsets)


@pytest.mark.parametrize(
    ("text", "first", "entries", "tokens", "offsets"),
    [
        # Ids that spell no whole characters.
        ("abc\ufffd", b"a", [b"b", b"c", b"\x80"], ["a"], [0, 1, 2, 3]),
        ("\ufffda\ufffdb", b"\x80", [b"a", b"\x81", b"b"], ["\ufffd"], [0, 1, 2, 3]),
        # A tokenizer that composes characters.
        ("ae\u0301z", b"a", ["é".encode(), b"z"], ["a"], [0, 1, 2]),
        ("ae\u0301z", b"a", [b"\xc3", b"\xa9", b"z"], ["a"], [0, 1, 1, 2]),
    ],
)
def test_offsets_of_a_prompt_that_its_tokens_do_not_spell(text, first, entries, tokens, offsets):
    check_echo(text, list(range(len(entries) + 1)), first, entries, tokens, offsets)


def check_echo(text, ids, first, entries, tokens, offsets):
    known = [logprobs(entry.decode(errors="replace"), -0.5) for entry in entries]
    for each, entry in zip(known, entries, strict=True):
        each.chosen.token_bytes[:] = list(entry)
    report = PromptReport(
        text=text, token_ids=ids, logprobs=[None, *known], first_bytes=list(first)
    )
    tokens_and_end = with_prompt(["x", "yz"], prompt=report)
    for token_, name in zip(tokens_and_end[0], ("x", "yz"), strict=True):
        index = tokens_and_end[0].index(token_)
        tokens_and_end[0][index] = msgspec.structs.replace(token_, logprobs=logprobs(name, -0.25))
    [choice] = whole(completion_answer(echo=True, logprobs=1), [tokens_and_end])["choices"]
    written = choice["logprobs"]
    assert written["tokens"] == [*tokens, *(each.chosen.text for each in known), "x", "yz"]
    assert written["token_logprobs"] == [None, *[-0.5] * len(known), -0.25, -0.25]
    assert written["top_logprobs"][0] is None
    assert all(len(top) == 1 for top in written["top_logprobs"][1:])
    assert written["text_offset"] == [*offsets, len(text), len(text) + 1]
    chunks = streamed(completion_answer(echo=True, logprobs=1, stream=True), [tokens_and_end])
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert parts.pop() is None
    for key, values in written.items():
        assert [value for part in parts for value in part[key]] == values


PROMPT_WITH_LOGPROBS = PromptReport(
    text="Hé!",
    token_ids=[72, 364, 33],
    logprobs=[None, logprobs("é", -0.5, ("B", -1.5)), logprobs("!", -2.0)],
)


def test_a_token_of_the_prompt_that_was_not_likely_has_its_rank():
    unlikely = TokenLogprobs(
        chosen=TokenLogprob("Z", -9.5, [90], 90), top=[TokenLogprob("!", -0.5, [33], 33)], rank=417
    )
    prompt = PromptReport(text="!Z", token_ids=[33, 90], logprobs=[None, unlikely])
    document = whole(chat_answer(prompt_logprobs=1), [with_prompt(["x"], prompt=prompt)])
    assert document["prompt_logprobs"][1] == {
        "90": {"logprob": -9.5, "decoded_token": "Z", "rank": 417},
        "33": {"logprob": -0.5, "decoded_token": "!", "rank": 1},
    }


def test_the_logprobs_of_a_prompt_are_listed_by_token_id():
    expected = [
        None,
        {
            "364": {"logprob": -0.5, "decoded_token": "é", "rank": 1},
            "66": {"logprob": -1.5, "decoded_token": "B", "rank": 2},
        },
        {"33": {"logprob": -2.0, "decoded_token": "!", "rank": 1}},
    ]
    choice = with_prompt(["x"], prompt=PROMPT_WITH_LOGPROBS)
    document = whole(completion_answer(prompt_logprobs=1), [choice])
    assert document["choices"][0]["prompt_logprobs"] == expected
    assert whole(chat_answer(prompt_logprobs=1), [choice])["prompt_logprobs"] == expected


def test_token_ids_are_listed_when_asked_for():
    choice = with_prompt(["a", "", "c"])
    document = whole(completion_answer(return_token_ids=True), [choice])
    assert document["choices"][0]["prompt_token_ids"] == [1, 72, 33]
    assert document["choices"][0]["token_ids"] == [100, 101, 102]
    document = whole(chat_answer(return_token_ids=True), [choice])
    assert document["prompt_token_ids"] == [1, 72, 33]
    assert document["choices"][0]["token_ids"] == [100, 101, 102]
    for answer, where in (
        (completion_answer(return_token_ids=True, stream=True), lambda chunk: chunk["choices"][0]),
        (chat_answer(return_token_ids=True, stream=True), lambda chunk: chunk),
    ):
        chunks = streamed(answer, [choice])
        said = [chunk["choices"][0]["token_ids"] for chunk in chunks]
        assert said == [[100], [101], [102], []]
        prompts = [where(chunk).get("prompt_token_ids") for chunk in chunks]
        assert prompts == [[1, 72, 33], None, None, None]


@pytest.mark.parametrize("make_answer", [chat_answer, completion_answer])
def test_what_was_not_asked_for_is_not_there(make_answer):
    document = whole(make_answer(), [with_prompt(["x"], prompt=PROMPT_WITH_LOGPROBS)])
    absent = {"prompt_logprobs", "prompt_token_ids", "token_ids", "system_fingerprint"}
    assert not absent & (document.keys() | document["choices"][0].keys())


@pytest.mark.parametrize("make_answer", [chat_answer, completion_answer])
def test_usage_so_far_comes_with_every_chunk(make_answer):
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = make_answer(stream=True, stream_options=options)
    chunks = streamed(answer, [with_prompt(["a", "", "c"])])
    so_far = [(3, 1, 4), (3, 2, 5), (3, 3, 6), (3, 3, 6), (3, 3, 6)]
    assert [
        tuple(
            chunk["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        )
        for chunk in chunks
    ] == so_far
    assert chunks[-1]["choices"] == []


def test_usage_so_far_is_of_the_choice_of_the_chunk():
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = completion_answer(prompt=["x", "y"], stream=True, stream_options=options)
    [first], _ = with_prompt(["a"])
    [other], _ = with_prompt(["b"], prompt=PromptReport(text="y", token_ids=[5]))
    chunks = documents(answer.chunk(first, 0) + answer.chunk(other, 1))
    assert [chunk["usage"]["prompt_tokens"] for chunk in chunks] == [3, 1]


@pytest.mark.parametrize("read", [chat, completion])
def test_usage_so_far_needs_to_know_the_prompt(read):
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert read(stream=True, stream_options=options).options.report
    assert not read(stream=True, stream_options={"include_usage": True}).options.report
