import json
import math

import msgspec
import pytest
from scripted_worker import finished, token

from neuron_di.types import RequestId
from neuron_di.wire import TokenLogprob, TokenLogprobs
from neuron_di_proxy.openai_request import read_chat, read_completion
from neuron_di_proxy.openai_response import answer_to

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}


def chat_answer(**fields):
    return answer_to(read_chat(json.dumps(CHAT | fields).encode()), RequestId("r1"))


def completion_answer(**fields):
    return answer_to(read_completion(json.dumps(COMPLETION | fields).encode()), RequestId("r1"))


def documents(events):
    parts = events.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def logprobs(text, logprob, *others):
    def entry(text, logprob):
        return TokenLogprob(text, logprob, list(text.encode()))

    return TokenLogprobs(
        chosen=entry(text, logprob), top=[entry(text, logprob), *(entry(*o) for o in others)]
    )


def test_the_role_comes_with_the_first_chunk_only():
    answer = chat_answer(stream=True)
    chunks = documents(answer.chunk(token(0)) + answer.chunk(token(1)))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "Once"},
        {"content": " upon"},
    ]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_text_that_was_held_back_comes_with_the_finish_reason():
    for answer, text_of in (
        (chat_answer(stream=True), lambda choice: choice["delta"]["content"]),
        (completion_answer(stream=True), lambda choice: choice["text"]),
    ):
        answer.chunk(token(0, ""))
        [last] = documents(answer.last_chunk(msgspec.structs.replace(finished(1), text="held")))
        assert text_of(last["choices"][0]) == "held"
        assert last["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("make_answer", [chat_answer, completion_answer])
def test_usage_has_a_chunk_of_its_own_when_asked_for(make_answer):
    answer = make_answer(stream=True, stream_options={"include_usage": True})
    ends = [finished(1)]
    first, last, usage = documents(
        answer.chunk(token(0)) + answer.last_chunk(*ends) + answer.usage_chunk(ends)
    )
    assert first["usage"] is None
    assert last["usage"] is None
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
    assert first["id"] == last["id"] == usage["id"]


@pytest.mark.parametrize("make_answer", [chat_answer, completion_answer])
def test_no_chunk_speaks_of_usage_when_it_was_not_asked_for(make_answer):
    answer = make_answer(stream=True)
    ends = [finished(1)]
    chunks = documents(answer.chunk(token(0)) + answer.last_chunk(*ends) + answer.usage_chunk(ends))
    assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]


def test_text_with_newlines_stays_one_event():
    answer = completion_answer(stream=True)
    [chunk] = documents(answer.chunk(token(0, "a\n\ndata: [DONE]\n\n")))
    assert chunk["choices"][0]["text"] == "a\n\ndata: [DONE]\n\n"


def test_the_logprobs_of_a_chat():
    tokens = [token(0, "Aé", logprobs("Aé", -0.5, ("B", -1.5)))]
    choice = json.loads(chat_answer(logprobs=True).whole([(tokens, finished(1))]))["choices"][0]
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
    whole = json.loads(completion_answer(logprobs=2).whole([(tokens, finished(3))]))
    expected = {
        "tokens": ["Aé", "C", "D"],
        "token_logprobs": [-0.5, -0.25, -0.125],
        "top_logprobs": [{"Aé": -0.5, "B": -1.5}, {"C": -0.25}, {"D": -0.125}],
        "text_offset": [0, 2, 2],
    }
    assert whole["choices"][0]["logprobs"] == expected
    streamed = completion_answer(logprobs=2, stream=True)
    chunks = [documents(streamed.chunk(t))[0]["choices"][0]["logprobs"] for t in tokens]
    for key, values in expected.items():
        assert [value for chunk in chunks for value in chunk[key]] == values


def test_candidates_of_the_same_text_keep_the_better_one():
    tokens = [token(0, "�", logprobs("�", -0.5, ("�", -2.5)))]
    whole = json.loads(completion_answer(logprobs=2).whole([(tokens, finished(1))]))
    assert whole["choices"][0]["logprobs"]["top_logprobs"] == [{"�": -0.5}]


def test_a_probability_of_zero_is_a_number_in_json():
    tokens = [token(0, "A", logprobs("A", -0.5, ("B", -math.inf)))]
    whole = json.loads(completion_answer(logprobs=2).whole([(tokens, finished(1))]))
    assert whole["choices"][0]["logprobs"]["top_logprobs"] == [{"A": -0.5, "B": -9999.0}]


def test_without_logprobs_the_field_is_null():
    for answer in (chat_answer(), completion_answer()):
        whole = json.loads(answer.whole([([token(0)], finished(1))]))
        assert whole["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("make_answer", [chat_answer, completion_answer])
def test_the_choices_share_the_prompt_and_add_their_tokens_up(make_answer):
    ends = [finished(3), finished(1), finished(2)]
    usage = {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    whole = json.loads(make_answer(n=3).whole([([token(0)], end) for end in ends]))
    assert whole["usage"] == usage
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    streamed = make_answer(n=3, stream=True, stream_options={"include_usage": True})
    [chunk] = documents(streamed.usage_chunk(ends))
    assert (chunk["choices"], chunk["usage"]) == ([], usage)


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
    assert [(choice["index"], choice["delta"].get("role")) for choice in choices] == [
        (1, "assistant"),
        (1, None),
        (0, "assistant"),
        (1, None),
        (0, None),
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 3 + ["length"] * 2


def test_offsets_count_the_text_of_their_own_choice():
    tokens = [token(0, "Aé", logprobs("Aé", -0.5)), token(1, "CDE", logprobs("CDE", -0.5))]
    whole = json.loads(completion_answer(n=2, logprobs=1).whole([(tokens, finished(2))] * 2))
    assert [choice["logprobs"]["text_offset"] for choice in whole["choices"]] == [[0, 2]] * 2
    streamed = completion_answer(n=2, logprobs=1, stream=True)
    chunks = [
        documents(streamed.chunk(token, index))[0]["choices"][0]
        for token in tokens
        for index in (1, 0)
    ]
    assert [(chunk["index"], chunk["logprobs"]["text_offset"]) for chunk in chunks] == [
        (1, [0]),
        (0, [0]),
        (1, [2]),
        (0, [2]),
    ]
