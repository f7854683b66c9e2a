"""What the differential suite holds to be equal, whole and well framed."""

import json

import pytest

from neuron_di.testing.conformance import CASES, Comparison, Probe, Rules
from neuron_di.testing.conformance.answer_rules import num_choices_of
from neuron_di.testing.conformance.finding import shorten
from neuron_di.testing.conformance.joined import join, read_events

PROBE = Probe(
    token_0=" a", text=" a time, there was", token_ids=(5, 6, 7), context_tokens=64,
    long_prompt_chars=100,
)  # fmt: skip


def paths(left, right, rules=None, **more):
    comparison = Comparison(rules=rules or Rules(), **more)
    return [found.path for found in comparison.differences(left, right)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_can_be_sent_and_read(case):
    for mode in case.modes:
        ask = case.ask(PROBE, "m", mode)
        if case.raw is None and case.method == "POST":
            json.dumps(ask.body)
    assert len(case.name) < 29, "it has a column of 29"
    assert case.why
    assert not case.why.endswith(".")


def test_every_case_has_a_name_of_its_own():
    assert len({case.name for case in CASES}) == len(CASES) > 150


def test_ids_and_times_may_differ():
    left = {"id": "a", "created": 1, "choices": [{"message": {"tool_calls": [{"id": "x"}]}}]}
    right = {"id": "b", "created": 2, "choices": [{"message": {"tool_calls": [{"id": "y"}]}}]}
    assert paths(left, right, Rules(is_strict=True)) == []


def test_what_differs_is_named_by_its_path():
    left = {"choices": [{"text": "a", "n": [1, 2]}], "usage": {"total_tokens": 3}}
    right = {"choices": [{"text": "b", "n": [1, 2, 3]}], "usage": {"total_tokens": 4}}
    assert paths(left, right) == [
        "$.choices[0].text", "$.choices[0].n.length", "$.usage.total_tokens"
    ]  # fmt: skip


def test_null_is_absent_unless_strict():
    assert paths({"stop_reason": None}, {}) == []
    assert paths({"stop_reason": None}, {}, Rules(is_strict=True)) == ["$.stop_reason"]
    assert paths({"stop_reason": 0}, {}) == ["$.stop_reason"]


def test_true_is_not_one():
    assert paths({"a": True}, {"a": 1}) == ["$.a"]
    assert paths({"a": 1}, {"a": 1.0}) == []


def test_only_logprobs_have_a_tolerance():
    left = {"logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{" a": -1.0}], "offset": 1}}
    near = {"logprobs": {"token_logprobs": [-1.00001], "top_logprobs": [{" a": -1.0001}],
                         "offset": 1.00001}}  # fmt: skip
    assert paths(left, near, Rules(logprob_tolerance=1e-3)) == ["$.logprobs.offset"]
    assert len(paths(left, near, Rules(logprob_tolerance=0))) == 3


def test_a_token_may_be_called_as_an_ignored_field_is():
    left = {"top_logprobs": [{"id": -1.0, "created": -2.0}]}
    right = {"top_logprobs": [{"id": -3.0, "created": -2.0}]}
    assert paths(left, right) == ["$.top_logprobs[0].id"]


def test_another_model_need_only_answer_alike():
    left = {"choices": [{"text": "a", "finish_reason": "stop", "index": 0}]}
    right = {"choices": [{"text": "b", "finish_reason": "length", "index": 0}]}
    assert paths(left, right, with_text=False) == []
    assert paths(left, {"choices": [{"text": 7, "index": 1}]}, with_text=False) == [
        "$.choices[0].text", "$.choices[0].index"
    ]  # fmt: skip


def test_seeds_are_compared_where_they_mean_the_same():
    assert Rules(text="exact").compares_text(is_sampled=True)
    assert Rules(text="greedy").compares_text(is_sampled=False)
    assert not Rules(text="greedy").compares_text(is_sampled=True)
    assert not Rules(text="shape").compares_text(is_sampled=False)


def test_a_stream_adds_up():
    chunks = [
        {"id": "c", "object": "chat.completion.chunk", "usage": None, "choices": [
            {"index": 1, "delta": {"role": "assistant", "content": "x"}, "finish_reason": None}]},
        {"id": "c", "object": "chat.completion.chunk", "choices": [
            {"index": 0, "delta": {"role": "assistant", "tool_calls": [
                {"index": 0, "id": "t", "type": "function",
                 "function": {"name": "f", "arguments": "{"}}]}}]},
        {"id": "c", "object": "chat.completion.chunk", "choices": [
            {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
             "finish_reason": "tool_calls"},
            {"index": 1, "delta": {"content": "y"}, "finish_reason": "stop",
             "logprobs": {"content": [1]}}]},
        {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": {"total_tokens": 2}},
    ]  # fmt: skip
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert join(chunks) == {
        "id": "c",
        "object": "chat.completion",
        "usage": {"total_tokens": 2},
        "choices": [
            {
                "index": 0, "pieces": [], "finish_reason": "tool_calls",
                "message": {"role": "assistant", "content": None, "tool_calls": [call]},
            },
            {
                "index": 1, "pieces": ["x", "y"], "finish_reason": "stop",
                "message": {"role": "assistant", "content": "xy"}, "logprobs": {"content": [1]},
            },
        ],
    }  # fmt: skip


def test_comments_and_other_line_ends_are_part_of_a_stream():
    body = b': ping\n\ndata: {"a": 1}\r\n\r\n: ping\ndata: {"a": 2}\n\ndata: [DONE]\n\n'
    assert read_events(body) == ([{"a": 1}, {"a": 2}], [])


@pytest.mark.parametrize("count", [1, 2, 6])
def test_how_many_choices_a_request_asks_for(count):
    prompts = {1: "a", 2: [[1, 2], [3]], 6: ["a", "b"]}
    n = {1: None, 2: 1, 6: 3}
    assert num_choices_of({"prompt": prompts[count], "n": n[count]}) == count
    assert num_choices_of({"prompt": [1, 2, 3], "n": count}) == count
    assert num_choices_of({"messages": [], "n": count}) == count


def test_values_are_shown_short_and_without_control_characters():
    assert len(shorten("x" * 1000)) <= 120
    assert "\x1b" not in shorten("\x1b[2J")
