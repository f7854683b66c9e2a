import json
import math

import msgspec
import pytest
from answer_documents import (
    assembled,
    chat_answer,
    completion_answer,
    documents,
    ended,
    logprobs,
    streamed,
    whole,
)
from hypothesis import given
from hypothesis import strategies as st
from scripted_worker import finished, token

from neuron_di_proxy.receipts import Continued

BOTH = pytest.mark.parametrize("make_answer", [chat_answer, completion_answer])
USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}


def counts(usage):
    return {name: value for name, value in usage.items() if not name.endswith("details")}


def test_the_role_comes_with_the_first_chunk_only():
    answer = chat_answer(stream=True)
    chunks = documents(answer.chunk(token(0)) + answer.chunk(token(1)))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "Once"},
        {"content": " upon"},
    ]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_a_token_without_text_has_nothing_to_say_but_the_role():
    answer = chat_answer(stream=True)
    [first] = documents(answer.chunk(token(0, "")))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert answer.chunk(token(1, "")) == b""
    assert answer.chunk(token(2)) != b""
    answer = completion_answer(stream=True)
    assert answer.chunk(token(0, "")) == b""
    [second] = documents(answer.chunk(token(1)))
    assert second["choices"][0]["text"] == " upon"


@BOTH
def test_the_end_of_a_choice_says_why(make_answer):
    for reason, stop in (("stop", "\n"), ("stop", 7), ("stop", None), ("length", None)):
        choice = ended(["a"], reason=reason, stop=stop)
        *others, last = streamed(make_answer(stream=True), [choice])
        assert all("stop_reason" not in chunk["choices"][0] for chunk in others)
        for end in (last["choices"][0], whole(make_answer(), [choice])["choices"][0]):
            assert (end["finish_reason"], end["stop_reason"]) == (reason, stop)


def test_text_that_was_held_back_comes_with_the_finish_reason():
    for answer, text_of in (
        (chat_answer(stream=True), lambda choice: choice["delta"]["content"]),
        (completion_answer(stream=True), lambda choice: choice["text"]),
    ):
        answer.chunk(token(0, ""))
        [last] = documents(answer.last_chunk(msgspec.structs.replace(finished(1), text="held")))
        assert text_of(last["choices"][0]) == "held"
        assert last["choices"][0]["finish_reason"] == "length"


@BOTH
def test_usage_has_a_chunk_of_its_own_when_asked_for(make_answer):
    answer = make_answer(stream=True, stream_options={"include_usage": True})
    first, last, usage = streamed(answer, [ended(["a"])])
    assert first["usage"] is None
    assert last["usage"] is None
    assert usage["choices"] == []
    assert counts(usage["usage"]) == USAGE
    assert first["id"] == last["id"] == usage["id"]


@BOTH
def test_no_chunk_speaks_of_usage_when_it_was_not_asked_for(make_answer):
    chunks = streamed(make_answer(stream=True), [ended(["a"])])
    assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]


@BOTH
def test_cached_tokens_are_a_detail_of_the_prompt(make_answer):
    choice = ended(["a"], num_cached=3)
    usage = whole(make_answer(), [choice])["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    options = {"include_usage": True}
    assert (
        streamed(make_answer(stream=True, stream_options=options), [choice])[-1]["usage"] == usage
    )


@BOTH
def test_an_answer_says_that_it_was_continued(make_answer):
    continued = Continued(continued=2, grade="exact")
    expected = {"continued": 2, "grade": "exact"}
    tokens, end = ended(["a"])
    [last] = documents(make_answer(stream=True).last_chunk(end, continued))
    assert last["neuron_di"] == expected
    assert json.loads(make_answer().whole([(tokens, end)], continued))["neuron_di"] == expected
    assert "neuron_di" not in whole(make_answer(), [(tokens, end)])


def test_text_with_newlines_stays_one_event():
    answer = completion_answer(stream=True)
    for index in range(2):
        [chunk] = documents(answer.chunk(token(index, "a\n\ndata: [DONE]\n\n")))
        assert chunk["choices"][0]["text"] == "a\n\ndata: [DONE]\n\n"


@given(
    st.sampled_from([chat_answer, completion_answer]),
    st.lists(st.text(), max_size=6),
    st.sampled_from(["tiny", '"\0', '","\\u0000', "é\n"]),
    st.booleans(),
)
def test_the_short_way_writes_the_same_bytes(make_answer, texts, model, include_usage):
    fields = {"stream": True, "model": model, "stream_options": {"include_usage": include_usage}}
    short, general = make_answer(**fields), make_answer(**fields)
    general._head = short._head  # both begun in the same second
    for index, text in enumerate(texts):
        assert short.chunk(token(index, text)) == general._chunk(token(index, text), 0)


def test_the_short_way_is_taken():
    for answer in (chat_answer(stream=True), completion_answer(stream=True)):
        answer.chunk(token(0))
        answer._writers = ()  # the general way needs one
        assert answer.chunk(token(1)) != b""


def test_the_logprobs_of_a_chat():
    tokens = [token(0, "Aé", logprobs("Aé", -0.5, ("B", -1.5)))]
    choice = whole(chat_answer(logprobs=True), [(tokens, finished(1))])["choices"][0]
    top = [
        {"token": "Aé", "logprob": -0.5, "bytes": [65, 195, 169]},
        {"token": "B", "logprob": -1.5, "bytes": [66]},
    ]
    assert choice["logprobs"] == {"content": [top[0] | {"top_logprobs": top}], "refusal": None}


def test_the_logprobs_of_a_completion():
    tokens = [
        token(0, "Aé", logprobs("Aé", -0.5, ("B", -1.5))),
        token(1, "", logprobs("C", -0.25)),
        token(2, "CD", logprobs("D", -0.125)),
    ]
    expected = {
        "tokens": ["Aé", "C", "D"],
        "token_logprobs": [-0.5, -0.25, -0.125],
        "top_logprobs": [{"Aé": -0.5, "B": -1.5}, {"C": -0.25}, {"D": -0.125}],
        "text_offset": [0, 2, 2],
    }
    document = whole(completion_answer(logprobs=2), [(tokens, finished(3))])
    assert document["choices"][0]["logprobs"] == expected
    answer = completion_answer(logprobs=2, stream=True)
    chunks = [documents(answer.chunk(each))[0]["choices"][0]["logprobs"] for each in tokens]
    for key, values in expected.items():
        assert [value for chunk in chunks for value in chunk[key]] == values


def test_an_offset_counts_what_a_stop_string_may_begin_with():
    tokens = [
        token(0, "A", logprobs("AB", -0.5)),
        token(1, "", msgspec.structs.replace(logprobs("C", -0.25), num_held=1)),
        token(2, "BCD", msgspec.structs.replace(logprobs("D", -0.125), num_held=2)),
        token(3, "E", logprobs("E", -0.125)),
    ]
    document = whole(completion_answer(logprobs=1), [(tokens, finished(4))])
    assert document["choices"][0]["text"] == "ABCDE"
    assert document["choices"][0]["logprobs"]["text_offset"] == [0, 2, 3, 4]


def test_tokens_may_be_named_by_their_ids():
    tokens = [token(0, "A", logprobs("A", -0.5, ("B", -1.5)))]
    asked = {"return_tokens_as_token_ids": True}
    document = whole(completion_answer(logprobs=2, **asked), [(tokens, finished(1))])
    names = document["choices"][0]["logprobs"]
    assert names["tokens"] == ["token_id:65"]
    assert names["top_logprobs"] == [{"token_id:65": -0.5, "token_id:66": -1.5}]
    document = whole(chat_answer(logprobs=True, top_logprobs=2, **asked), [(tokens, finished(1))])
    [entry] = document["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "token_id:65"
    assert [item["token"] for item in entry["top_logprobs"]] == ["token_id:65", "token_id:66"]


def test_candidates_of_the_same_text_keep_the_better_one():
    tokens = [token(0, "�", logprobs("�", -0.5, ("�", -2.5)))]
    document = whole(completion_answer(logprobs=2), [(tokens, finished(1))])
    assert document["choices"][0]["logprobs"]["top_logprobs"] == [{"�": -0.5}]


def test_a_probability_of_zero_is_a_number_in_json():
    tokens = [token(0, "A", logprobs("A", -0.5, ("B", -math.inf)))]
    document = whole(completion_answer(logprobs=2), [(tokens, finished(1))])
    assert document["choices"][0]["logprobs"]["top_logprobs"] == [{"A": -0.5, "B": -9999.0}]


def test_without_logprobs_the_field_is_null():
    for answer in (chat_answer(), completion_answer()):
        assert whole(answer, [([token(0)], finished(1))])["choices"][0]["logprobs"] is None


@BOTH
def test_the_choices_share_the_prompt_and_add_their_tokens_up(make_answer):
    choices = [ended(["a"] * num) for num in (3, 1, 2)]
    usage = {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    document = whole(make_answer(n=3), choices)
    assert counts(document["usage"]) == usage
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2]
    answer = make_answer(n=3, stream=True, stream_options={"include_usage": True})
    assert counts(streamed(answer, choices)[-1]["usage"]) == usage


def test_each_prompt_of_a_list_counts_once():
    choices = [ended(["a"], num_prompt=num, num_cached=num - 1) for num in (2, 2, 7, 7)]
    document = whole(completion_answer(prompt=["x", "yz"], n=2), choices)
    assert document["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 7},
    }
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2, 3]


def test_every_choice_of_a_chat_has_its_role_once():
    answer = chat_answer(stream=True, n=2)
    chunks = documents(
        answer.chunk(token(0), 1)
        + answer.chunk(token(1), 1)
        + answer.chunk(token(0), 0)
        + answer.last_chunk(finished(2), None, 1)
        + answer.last_chunk(finished(1), None, 0)
    )
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["index"] for choice in choices] == [1, 1, 0, 1, 0]
    assert [choice["finish_reason"] for choice in choices] == [None] * 3 + ["length"] * 2
    assert [choice["content"] for choice in assembled(chunks)] == ["Once", "Once upon"]


def test_offsets_count_the_text_of_their_own_choice():
    tokens = [token(0, "Aé", logprobs("Aé", -0.5)), token(1, "CDE", logprobs("CDE", -0.5))]
    document = whole(completion_answer(n=2, logprobs=1), [(tokens, finished(2))] * 2)
    assert [choice["logprobs"]["text_offset"] for choice in document["choices"]] == [[0, 2]] * 2
    answer = completion_answer(n=2, logprobs=1, stream=True)
    chunks = [
        documents(answer.chunk(each, index))[0]["choices"][0] for each in tokens for index in (1, 0)
    ]
    assert [(chunk["index"], chunk["logprobs"]["text_offset"]) for chunk in chunks] == [
        (1, [0]),
        (0, [0]),
        (1, [2]),
        (0, [2]),
    ]
