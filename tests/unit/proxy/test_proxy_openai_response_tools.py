"""Chats whose answers have tool calls or reasoning."""

import json

import msgspec
import pytest
from answer_documents import assembled, chat_answer, ended, logprobs, streamed, whole
from hypothesis import given
from hypothesis import strategies as st
from scripted_worker import token

from neuron_di_proxy.model_traits import ModelTraits

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOLS = {"tools": [TOOL]}
NAMED = {"type": "function", "function": {"name": "f"}}
TAGS = ("<think>", "</think>")
HERMES = ModelTraits(tool_format="hermes")
THINKING = ModelTraits(reasoning=TAGS)
BOTH = ModelTraits(tool_format="hermes", reasoning=TAGS)
CALL = '{"name": "f", "arguments": {"a":  1}}'


def message_of(traits, choice, **fields):
    return whole(chat_answer(traits, **fields), [choice])["choices"][0]["message"]


def pieces(text, size=5):
    return [text[at : at + size] for at in range(0, len(text), size)]


def in_reasoning(choice):
    tokens, end = choice
    return [msgspec.structs.replace(tokens[0], in_reasoning=True), *tokens[1:]], end


def test_a_message_that_is_a_call():
    choice = ended(pieces(f"\n<tool_call>\n{CALL}\n</tool_call>"))
    document = whole(chat_answer(HERMES, **TOOLS), [choice])["choices"][0]
    message = document["message"]
    [call] = message["tool_calls"]
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "f", "arguments": '{"a":  1}'},
    }
    assert call["id"].startswith("call_")
    assert message["content"] is None
    assert (document["finish_reason"], document["stop_reason"]) == ("tool_calls", None)


def test_a_streamed_call_says_its_id_and_name_once():
    choice = ended(["<tool_call>", '{"name": "f", "arguments": {', '"a":', "  1}}", "</tool_call>"])
    chunks = streamed(chat_answer(HERMES, stream=True, **TOOLS), [choice])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant"}
    assert all("content" not in delta for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    first = calls[0]
    assert first.keys() == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "f", "arguments": "{"}
    assert calls[1:] == [
        {"index": 0, "function": {"arguments": '"a":'}},
        {"index": 0, "function": {"arguments": "  1}"}},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "text", "reason", "expected"),
    [
        ({}, f"<tool_call>{CALL}", "stop", "tool_calls"),
        ({}, f"<tool_call>{CALL}", "length", "length"),
        ({}, "no call", "stop", "stop"),
        ({}, '<tool_call>{"name": "f", "arguments": {"a": b', "stop", "stop"),
        ({"tool_choice": "required"}, f"[{CALL}]", "stop", "tool_calls"),
        ({"tool_choice": NAMED}, f"[{CALL}]", "stop", "stop"),
    ],
)
def test_the_finish_reason_tells_of_calls_that_can_be_acted_on(fields, text, reason, expected):
    choice = ended(pieces(text), reason=reason)
    answer = chat_answer(HERMES, **TOOLS, **fields)
    assert whole(answer, [choice])["choices"][0]["finish_reason"] == expected
    chunks = streamed(chat_answer(HERMES, stream=True, **TOOLS, **fields), [choice])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert [each for each in reasons if each is not None] == [expected]


def test_without_tools_nothing_is_a_call():
    text = f"<tool_call>{CALL}</tool_call>"
    for fields in ({}, TOOLS | {"tool_choice": "none"}):
        message = message_of(HERMES, ended(pieces(text)), **fields)
        assert message["content"] == text
        assert "tool_calls" not in message


def test_reasoning_is_a_field_of_its_own():
    choice = ended(["<think>", "why", "</think>", "\n", "so"])
    document = whole(chat_answer(THINKING), [choice])
    message = document["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("why", "\nso")
    assert document["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    chunks = streamed(chat_answer(THINKING, stream=True), [choice])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant"},
        {"reasoning": "why"},
        {"content": "\n"},
        {"content": "so"},
        {},
    ]


def test_reasoning_that_the_prompt_opened():
    choice = ended(["why", "</think>", "so"])
    assert message_of(THINKING, choice)["reasoning"] is None
    message = message_of(THINKING, in_reasoning(choice))
    assert (message["reasoning"], message["content"]) == ("why", "so")


def test_an_answer_that_never_ends_its_reasoning_has_no_content():
    choice = ended(["<think>", "why"], held=" not", reason="length")
    document = whole(chat_answer(THINKING), [choice])
    message = document["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("why not", None)
    assert document["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_a_model_that_knows_no_reasoning_has_no_such_field():
    message = message_of(HERMES, ended(["<think>", "why"]))
    assert message == {"role": "assistant", "content": "<think>why", "refusal": None}


def test_a_call_within_reasoning_is_only_thought_of():
    thought = f"<tool_call>{CALL}</tool_call>"
    choice = ended(pieces(f"<think>{thought}</think>\n\n{thought}"))
    message = message_of(BOTH, choice, **TOOLS)
    assert message["reasoning"] == thought
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


def test_forced_calls_may_follow_reasoning():
    choice = in_reasoning(ended(pieces(f"why</think>\n[{CALL},{CALL}]")))
    message = message_of(BOTH, choice, tool_choice="required", **TOOLS)
    assert (message["reasoning"], message["content"]) == ("why", None)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "f"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_plain_text_after_reasoning_goes_the_short_way():
    answer = chat_answer(THINKING, stream=True)
    for index, text in enumerate(("<think>", "why", "</think>")):
        answer.chunk(token(index, text))
    answer._writers = ()  # the general way needs one
    chunk = json.loads(answer.chunk(token(3, "so")).removeprefix(b"data: "))
    assert chunk["choices"][0]["delta"] == {"content": "so"}


def test_every_token_has_its_logprobs_whatever_becomes_of_its_text():
    tokens, end = ended(["<think>", "why", "</think>", "<tool", f"_call>{CALL}", "</tool_call>"])
    tokens = [msgspec.structs.replace(each, logprobs=logprobs(each.text, -0.5)) for each in tokens]
    fields = {"logprobs": True, **TOOLS}
    chunks = streamed(chat_answer(BOTH, stream=True, **fields), [(tokens, end)])
    [choice] = assembled(chunks)
    assert [entry["token"] for entry in choice["logprobs"]] == [each.text for each in tokens]
    [document] = whole(chat_answer(BOTH, **fields), [(tokens, end)])["choices"]
    assert document["logprobs"]["content"] == choice["logprobs"]


fragments = st.sampled_from(
    [
        "", " ", "\n", "text", "é😀", "<think>", "</think>", "<thi", "nk>", "</", "<tool", "_call>",
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", ",", "{", "}",
        CALL, '{"name": "f", "arg', 'uments": {"k": "', '"}}',
    ]
)  # fmt: skip
choices_of_texts = st.builds(
    ended,
    st.lists(fragments, max_size=8),
    held=fragments,
    reason=st.sampled_from(["stop", "length"]),
    stop=st.sampled_from([None, "\n"]),
)
any_traits = st.builds(
    ModelTraits,
    tool_format=st.sampled_from(["hermes", "mistral", "llama3_json"]),
    reasoning=st.sampled_from([None, TAGS]),
)
any_tools = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {
            "tools": st.just([TOOL]),
            "tool_choice": st.sampled_from(["auto", "required", "none", NAMED]),
            "parallel_tool_calls": st.booleans(),
        }
    ),
)
any_extras = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.just(True),
        "return_token_ids": st.just(True),
        "return_tokens_as_token_ids": st.just(True),
    },
)


@given(
    st.lists(st.tuples(choices_of_texts, st.booleans()), min_size=1, max_size=2),
    any_traits,
    any_tools,
    any_extras,
)
def test_a_streamed_answer_is_the_whole_one(drawn, traits, tools, extras):
    choices = []
    for (tokens, end), begins_inside in drawn:
        if extras.get("logprobs"):
            tokens = [
                msgspec.structs.replace(each, logprobs=logprobs(each.text, -0.5)) for each in tokens
            ]
        choice = (tokens, end)
        choices.append(in_reasoning(choice) if tokens and begins_inside else choice)
    fields = {"n": len(choices), **tools, **extras}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    document = whole(chat_answer(traits, **fields), choices)
    *chunks, usage = streamed(chat_answer(traits, **fields, **options), choices)
    assert usage["usage"] == document["usage"]
    for joined, expected in zip(assembled(chunks), document["choices"], strict=True):
        message = expected["message"]
        assert joined["content"] == (message["content"] or "")
        assert joined["reasoning"] == (message.get("reasoning") or "")
        assert joined["calls"] == message.get("tool_calls", [])
        assert joined["finish_reason"] == expected["finish_reason"]
        assert joined["stop_reason"] == expected["stop_reason"]
        assert joined["logprobs"] == (expected["logprobs"] or {"content": []})["content"]
        assert joined["token_ids"] == expected.get("token_ids", [])


@pytest.mark.parametrize("text", ["", "[", "[\n  ", '[{"name": "f", "argu'])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_that_is_cut_before_it_begins_is_no_content(choice, text):
    fields = {**TOOLS, "tool_choice": choice}
    cut = ended(pieces(text), reason="length")
    assert message_of(HERMES, cut, **fields) == {
        "role": "assistant",
        "content": None,
        "refusal": None,
    }
    chunks = streamed(chat_answer(HERMES, stream=True, **fields), [cut])
    assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)
