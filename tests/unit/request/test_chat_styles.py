"""Prompts of chats with tools, reasoning and unfinished answers, equal to transformers'."""

import copy
import json

import pytest
from chat_styles import R1, STYLES
from tokenizer_kit import write_folder
from transformers import AutoTokenizer

from neuron_di.errors import BadRequest
from neuron_di.request import ChatExtras, ChatTemplate, Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a <city> & \"more\": naïve",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]  # fmt: skip
ARGUMENTS = {"city": "Zürich", "days": 2}
SYSTEM = {"role": "system", "content": " Be brief. "}
ASK = {"role": "user", "content": "weather?  "}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather"}}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"c": 21}'}
THOUGHT = {
    "role": "assistant",
    "content": "<think>\nlet me see</think>\nIt is 21 °C.",
    "reasoning_content": "I looked",
}


def call(arguments: object, content: object = None) -> dict[str, object]:
    function = {**CALL["function"], "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{**CALL, "function": function}]}


CHATS = {
    "question": [SYSTEM, ASK],
    "called": [SYSTEM, ASK, call(ARGUMENTS), RESULT],
    "thought": [ASK, THOUGHT, {"role": "user", "content": "thanks <think>"}],
    "named": [{"role": "user", "name": "ann", "content": "hi"}],
}
# Templates that know no calls make transformers fail on one.
SHOWN = [
    (name, chat)
    for name in STYLES
    for chat in CHATS
    if chat != "called" or "tool_calls" in STYLES[name]
]
# What a template has no place for is refused here, and dropped by transformers.
TOLD = [
    (name, chat, tools)
    for name, chat in SHOWN
    for tools in (TOOLS, None)
    if tools is None or "tools" in STYLES[name]
]


def both(folder, name):
    write_folder(folder, "byte_level", chat_template=STYLES[name])
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(("name", "chat", "tools"), TOLD)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_every_style_equals_transformers(tmp_path, name, chat, add_generation_prompt, tools):
    ours, theirs = both(tmp_path, name)
    extras = ChatExtras(tools=tools, add_generation_prompt=add_generation_prompt)
    expected = theirs.apply_chat_template(
        CHATS[chat], tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    before = copy.deepcopy(CHATS[chat])
    text = ours.render_chat(CHATS[chat], extras)
    assert text == expected
    assert before == CHATS[chat], "a client's messages are not changed"
    ids = theirs(expected, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("name", ["hermes", "r1"])
@pytest.mark.parametrize("kwargs", [{"enable_thinking": True}, {"enable_thinking": False}])
def test_a_templates_own_variables_reach_it(tmp_path, name, kwargs):
    if name == "r1":
        kwargs = {"keep_thinking": kwargs["enable_thinking"]}
    ours, theirs = both(tmp_path, name)
    chat = CHATS["thought"]
    expected = theirs.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False, **kwargs
    )
    assert ours.render_chat(chat, ChatExtras(template_kwargs=kwargs)) == expected
    if "enable_thinking" in kwargs:
        assert ours.render_chat(chat) != expected


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("content", ["It is", "It is ", "\n It is\n\n", "a</think> b", "weather?"])
def test_a_continued_message_equals_transformers(tmp_path, name, content):
    ours, theirs = both(tmp_path, name)
    chat = [ASK, {"role": "assistant", "content": content}]
    extras = ChatExtras(add_generation_prompt=False, continue_final_message=True)
    try:
        expected = theirs.apply_chat_template(chat, continue_final_message=True, tokenize=False)
    except ValueError:
        with pytest.raises(BadRequest) as caught:
            ours.render_chat(chat, extras)
        assert caught.value.param == "continue_final_message"
    else:
        assert ours.render_chat(chat, extras) == expected
        assert expected.rstrip().endswith(content.split("</think>")[-1].strip())


def test_a_message_that_the_template_cuts_cannot_be_continued():
    chat = [ASK, {"role": "assistant", "content": "<think>a</think>b"}]
    with pytest.raises(BadRequest, match="cannot be continued"):
        ChatTemplate(R1, {"bos_token": "", "eos_token": ""}).render(
            chat, ChatExtras(add_generation_prompt=False, continue_final_message=True)
        )


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
@pytest.mark.parametrize("arguments", [json.dumps(ARGUMENTS), ARGUMENTS])
def test_arguments_may_be_the_text_that_the_api_gave(tmp_path, name, arguments):
    ours, theirs = both(tmp_path, name)
    expected = theirs.apply_chat_template(CHATS["called"], tokenize=False)
    chat = [SYSTEM, ASK, call(arguments), RESULT]
    extras = ChatExtras(add_generation_prompt=False)
    assert ours.render_chat(chat, extras) == expected


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_a_call_may_have_no_arguments(arguments):
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert ChatTemplate(source, {}).render([call(arguments)]) == "{}"


DROPS_OTHERS = (
    "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "messages", "extras", "param"),
    [
        (STYLES["plain"], [ASK, call(ARGUMENTS)], {}, "messages[1].tool_calls"),
        (STYLES["plain"], [ASK], {"tools": TOOLS}, "tools"),
        (DROPS_OTHERS, [ASK, RESULT], {}, "messages[1].role"),
    ],
)
def test_what_a_template_would_drop_in_silence_is_refused(source, messages, extras, param):
    with pytest.raises(BadRequest, match="chat template takes no") as caught:
        ChatTemplate(source, {}).render(messages, ChatExtras(**extras))
    assert caught.value.param == param


def test_a_template_that_shows_every_role_shows_a_tools_results():
    text = ChatTemplate(STYLES["plain"], {}).render([ASK, RESULT])
    assert '<|im_start|>tool\n{"c": 21}<|im_end|>' in text


def test_a_template_that_refuses_results_says_why_itself():
    source = "{% for m in messages if m.role not in ['user', 'assistant'] %}"
    source += "{{ raise_exception('no ' + m.role) }}{% endfor %}"
    with pytest.raises(BadRequest, match="no tool"):
        ChatTemplate(source, {}).render([ASK, RESULT])


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
def test_templates_with_tools_take_tools_calls_and_results(name):
    template = ChatTemplate(STYLES[name], {"bos_token": "", "eos_token": ""})
    text = template.render(
        [
            ASK,
            call(ARGUMENTS),
            RESULT,
        ],
        ChatExtras(tools=TOOLS),
    )
    assert text.count("weather") >= 2


def test_the_templates_rules_are_the_clients_to_keep():
    bad_id = call(ARGUMENTS)
    bad_id["tool_calls"][0]["id"] = "short"
    with pytest.raises(BadRequest, match="9 characters"):
        ChatTemplate(STYLES["mistral"], {"bos_token": "", "eos_token": ""}).render([ASK, bad_id])


def test_a_developer_is_the_system_where_the_template_does_not_know_one():
    messages = [{"role": "developer", "content": "x"}]
    source = "{{ messages[0].role }}: {{ messages[0].content }}"
    assert ChatTemplate(source, {}).render(messages) == "system: x"
    assert messages == [{"role": "developer", "content": "x"}]  # the client's stay what they are
    source = (
        "{% if messages[0].role == 'developer' %}developer: {{ messages[0].content }}{% endif %}"
    )
    assert ChatTemplate(source, {}).render(messages) == "developer: x"


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_has_several_names(name):
    source = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    message = {"role": "assistant", "content": "x", name: "because"}
    assert ChatTemplate(source, {}).render([message]) == "because because"


@pytest.mark.parametrize("style", ["hermes", "llama"])
@pytest.mark.parametrize("text", ['{"city": "Z', "{", r'{"city": "\ud83d"}', '{"a": 1}}'])
def test_a_call_that_was_cut_or_broke_can_be_sent_back(style, text):
    assert json.dumps(text) in ChatTemplate(STYLES[style], {}).render([ASK, call(text), RESULT])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({**call({}), "tool_calls": {}}, "tool_calls must be a list"),
        ({**call({}), "tool_calls": {"a": 1}}, "tool_calls must be a list"),
        ({**call({}), "tool_calls": ["x"]}, r"tool_calls\[0\] must have a function"),
        ({**call({}), "tool_calls": [{"function": {}}]}, "a function with a name"),
        *((call(text), "must be a JSON object") for text in ("[]", "0", "false", '""', "[1]")),
        (call("\ud800"), r"tool_calls\[0\]\.function\.arguments is no text"),
        (call("[" * 100_000), "nested too deeply"),
        (call("[1]"), "must be a JSON object"),
        (call(7), "must be a JSON object"),
        ({**call({}), "content": 7}, "content must be a string"),
        ({"role": "assistant", "content": []}, "content must be"),
        ({"role": "tool", "content": None}, "content must be"),
        ({"role": "user", "content": "x", "name": 7}, r"name must be a string"),
        ({"role": "assistant", "content": "x", "reasoning": [1]}, "reasoning must be a string"),
    ],
)
def test_bad_calls_are_refused_by_name(message, words):
    with pytest.raises(BadRequest, match=words) as caught:
        ChatTemplate(STYLES["hermes"], {}).render([message])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "martian", "content": "x"}, "role"),
        ({"role": [], "content": "x"}, "role"),
        ({"content": "x"}, "role"),
        ({**ASK, "foo": None}, "foo"),
        ({**ASK, "x" * 99: 1}, "x" * 64),
        ({**ASK, "tool_calls": [CALL]}, "tool_calls"),
        ({**ASK, "tool_call_id": "a"}, "tool_call_id"),
        ({**ASK, "reasoning": "a"}, "reasoning"),
        ({**ASK, "audio": {"id": "a"}}, "audio"),
        ({**ASK, "refusal": "no"}, "refusal"),
        ({**call({}), "refusal": "no"}, "refusal"),
        ({**call({}), "function_call": {"name": "f", "arguments": "{}"}}, "function_call"),
        ({**call({}), "annotations": [{}]}, "annotations"),
    ],
)
def test_what_no_template_would_see_is_refused_by_its_place(message, param):
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(STYLES["hermes"], {}).render([ASK, message])
    assert caught.value.param == f"messages[1].{param}"
    assert "martian" not in str(caught.value)


def test_an_answer_can_be_sent_back_as_it_came():
    """OpenAI's have keys that say nothing."""
    nothing = {"refusal": None, "audio": None, "function_call": None, "annotations": []}
    plain = {"role": "assistant", "content": "x"}
    template = ChatTemplate(STYLES["hermes"], {})
    for bare, key in ((plain, {"tool_calls": []}), (call({}), {"reasoning": None})):
        assert template.render([ASK, {**bare, **nothing, **key}]) == template.render([ASK, bare])


def test_an_answer_can_be_sent_back_as_a_library_has_it():
    template = ChatTemplate(
        "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endfor %}", {}
    )  # fmt: skip
    # OpenAI's `parse`, and LiteLLM with a reasoning or none.
    function = {"arguments": '{"city": "a"}', "name": "weather", "parsed_arguments": {"city": "a"}}
    answer = {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}
    shown = '{"name": "weather", "arguments": {"city": "a"}}'
    assert template.render([{**answer, "content": None, "parsed": {"a": 1}}]) == shown
    for apart, reasoning in (({"reasoning": "so"}, "so"), ({"reasoning": None}, ""), (None, "")):
        message = {**answer, "refusal": None, "provider_specific_fields": apart}
        assert template.render([message]) == reasoning + shown
    for more, param in (
        ({"provider_specific_fields": {"signature": "x"}}, "signature"),
        ({"provider_specific_fields": "x"}, "provider_specific_fields"),
    ):
        with pytest.raises(BadRequest) as caught:
            template.render([{**answer, **more}])
        assert caught.value.param == f"messages[0].{param}"


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("more", [{}, {"reasoning": "because"}, {"tool_calls": []}], ids=str)
def test_an_answer_without_content_is_an_empty_one(name, more):
    template = ChatTemplate(STYLES[name], {"bos_token": "", "eos_token": ""})
    empty = template.render([ASK, {"role": "assistant", **more, "content": ""}, ASK])
    for content in ({"content": None}, {}):
        assert template.render([ASK, {"role": "assistant", **more, **content}, ASK]) == empty


# Qwen3's way, which takes every content for a text, and DeepSeek-R1's.
CONTENT_IS_TEXT = (
    "{% if '</think>' in message.content %}?{% endif %}{{ '>' + message.content }}"
    "{% for call in message.tool_calls or [] %}<{{ call.function.name }}>{% endfor %}"
)
NO_CONTENT_IS_CALLS = (
    "{% if message['content'] is none %}><{{ message['tool_calls'][0]['function']['name'] }}>"
    "{% else %}{{ '>' + message['content'] }}{% endif %}"
)


@pytest.mark.parametrize("shown", [CONTENT_IS_TEXT, NO_CONTENT_IS_CALLS])
@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}], ids=str)
def test_a_call_that_comes_without_content_is_shown(shown, content):
    """As OpenAI's answers with calls come, and go back to the model with the results."""
    source = "{% for message in messages %}" + shown + "{% endfor %}"
    message = {"role": "assistant", "tool_calls": call(ARGUMENTS)["tool_calls"], **content}
    assert ChatTemplate(source, {}).render([ASK, message, RESULT]) == (
        f">{ASK['content']}><weather>>{RESULT['content']}"
    )


def test_calls_that_a_template_shows_only_without_content_are_refused_with_one():
    source = "{% for message in messages %}" + NO_CONTENT_IS_CALLS + "{% endfor %}"
    with pytest.raises(BadRequest, match="takes no tool calls beside a content") as caught:
        ChatTemplate(source, {}).render([ASK, call(ARGUMENTS, "I look"), RESULT])
    assert caught.value.param == "messages[1].tool_calls"


@pytest.mark.parametrize(
    ("extras", "param", "words"),
    [
        ({"tools": {}}, "tools", "list of objects"),
        ({"tools": ["x"]}, "tools", "list of objects"),
        ({"documents": "x"}, "documents", "list of objects"),
        ({"documents": [{"text": "x"}]}, "documents", "takes no documents"),
        ({"template_kwargs": []}, "chat_template_kwargs", "must be an object"),
        ({"template_kwargs": {"messages": []}}, "chat_template_kwargs", "may not set 'messages'"),
        ({"template_kwargs": {"tools": []}}, "chat_template_kwargs", "may not set"),
        ({"template_kwargs": {"add_generation_prompt": 0}}, "chat_template_kwargs", "may not set"),
        ({"template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs", "may not set"),
        ({"template_kwargs": {"raise_exception": 1}}, "chat_template_kwargs", "takes no"),
        ({"template_kwargs": {"namespace": 1}}, "chat_template_kwargs", "takes no"),
        ({"template_kwargs": {"self": 1}}, "chat_template_kwargs", "takes no"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "takes no reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message", "exclude each other"),
    ],
)
def test_bad_extras_are_refused_by_name(extras, param, words):
    template = ChatTemplate(STYLES["hermes"], {"bos_token": "<s>"})
    with pytest.raises(BadRequest, match=words) as caught:
        template.render([ASK], ChatExtras(**extras))
    assert caught.value.param == param


def test_how_much_to_reason_reaches_a_template_that_knows_it():
    template = ChatTemplate("{{ reasoning_effort | default('medium') }}", {})
    assert template.render([ASK]) == "medium"
    assert template.render([ASK], ChatExtras(reasoning_effort="low")) == "low"
    assert template.render([ASK], ChatExtras(template_kwargs={"reasoning_effort": "a"})) == "a"


def test_how_much_to_reason_is_said_once():
    template = ChatTemplate("{{ reasoning_effort }}", {})
    extras = ChatExtras(reasoning_effort="low", template_kwargs={"reasoning_effort": "high"})
    with pytest.raises(BadRequest, match="send one") as caught:
        template.render([ASK], extras)
    assert caught.value.param == "reasoning_effort"


def test_documents_reach_a_template_that_takes_them(tmp_path):
    source = (
        "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}\n{% endfor %}{{ bos_token }}"
    )
    write_folder(tmp_path, "byte_level", chat_template=source)
    documents = [{"title": "one", "text": "1"}, {"title": "two", "text": "2"}]
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [ASK], documents=documents, tokenize=False
    )
    ours = Tokenizer.load(tmp_path)
    assert ours.render_chat([ASK], ChatExtras(documents=documents)) == expected
    assert expected.startswith("one: 1\ntwo: 2\n")


@pytest.mark.parametrize("content", [None, "", "so"])
def test_a_message_with_calls_cannot_be_continued(content):
    extras = ChatExtras(add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(BadRequest, match="cannot be continued") as caught:
        ChatTemplate(STYLES["hermes"], {}).render([ASK, call(ARGUMENTS, content)], extras)
    assert caught.value.param == "messages"
