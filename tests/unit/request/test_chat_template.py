import json
from datetime import UTC, datetime

import jinja2
import pytest
from chat_styles import STYLES
from tokenizer_kit import CHAT_TEMPLATE, KINDS, write_folder
from transformers import AutoTokenizer

from neuron_di.errors import BadRequest, TooLarge
from neuron_di.request import ChatTemplate, Tokenizer
from neuron_di.request.chat_messages import KEY_CHARS_MAX, MESSAGES_MAX
from neuron_di.request.chat_template import RENDERED_CHARS_MAX, ChatExtras
from neuron_di.request.template_traits import template_traits

CHATS = [
    [{"role": "user", "content": "hello"}],
    [
        {"role": "system", "content": "Be <b>brief</b> & \"kind\"."},
        {"role": "user", "content": "naïve 你好\n\n"},
        {"role": "assistant", "content": "", "name": None},
        {"role": "user", "content": "<|end|> inside", "name": "ann"},
    ],
]  # fmt: skip

# What published templates use: white space control, loops, filters, namespaces, dates.
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "blocks": """
{%- set ns = namespace(count=0) %}
{{- bos_token }}
{% for m in messages %}
    {% if m.role == 'system' %}
({{ m.content }})
    {% continue %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
    {% generation %}
[{{ loop.index }}] {{ m | tojson }} {{ m.content | trim }}{{ m.name if m.name is defined }}
    {% endgeneration %}
{% endfor %}
{{ ns.count }} {{ dict(a=1) }} {{ strftime_now("%Y-%m-%d") }} {{ tools is none }}
{% if add_generation_prompt %}answer:{% endif %}
""",
    "indented_json": "{{ messages | tojson(indent=2, sort_keys=true) }}{{ eos_token }}",
}


def test_a_template_says_the_time_that_it_is_given():
    """And no other: an answer that goes on elsewhere has the prompt that it began with."""
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}{{ strftime_now is defined }}", {})
    chat = [{"role": "user", "content": "a"}]
    day = datetime(2020, 2, 29, 12, tzinfo=UTC).timestamp()
    assert template.render(chat, ChatExtras(now_unix_s=day)) == "2020-02-29True"
    assert template.render(chat) == f"{datetime.now():%Y-%m-%d}True"  # noqa: DTZ005 - as users do
    with pytest.raises(BadRequest, match="takes no 'strftime_now'"):
        template.render(chat, ChatExtras(template_kwargs={"strftime_now": "x"}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("in_a_file", [True, False])
def test_chats_equal_transformers(kind, name, in_a_file, tmp_path):
    if in_a_file:  # which wins over the config's
        write_folder(tmp_path, kind, chat_template="not this one")
        (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name], "utf-8")
    else:
        write_folder(tmp_path, kind, chat_template=TEMPLATES[name])
    ours = Tokenizer.load(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for messages in CHATS:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.encode(ours.render_chat(messages), add_special_tokens=False) == expected


@pytest.mark.parametrize("in_files", [True, False])
def test_of_several_templates_tools_have_their_own(in_files, tmp_path):
    plain = "{{ messages[0].content }} <think>"
    tools = (
        '{{ tools | length }} {{ messages[0].content }} <tool_call>"name" "arguments"</tool_call>'
    )
    if in_files:
        write_folder(tmp_path, "byte_level")
        (tmp_path / "chat_template.jinja").write_text(plain, "utf-8")
        more = tmp_path / "additional_chat_templates"
        more.mkdir()
        (more / "tool_use.jinja").write_text(tools, "utf-8")
    else:
        named = {"rag": "wrong", "tool_use": tools, "default": plain}
        listed = [{"name": name, "template": text} for name, text in named.items()]
        write_folder(tmp_path, "byte_level", chat_template=listed)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for given in (None, [tool]):
        expected = theirs.apply_chat_template(CHATS[0], tools=given, tokenize=False)
        assert ours.render_chat(CHATS[0], ChatExtras(tools=given)) == expected
    assert ours.render_chat(CHATS[0], ChatExtras(tools=[])) == "hello <think>"
    assert template_traits(ours.chat_template_source).tool_format == "hermes"


def test_special_tokens_may_stand_in_a_file_of_their_own(tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    write_folder(tmp_path, "byte_level", chat_template=template)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = {name: config.pop(name) for name in list(config) if name.endswith("_token")}
    path.write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(CHATS[0], tokenize=False)
    assert len(expected) > len("hello")
    assert ours.render_chat(CHATS[0]) == expected
    assert ours.eos_id == theirs.eos_token_id


def test_text_parts_are_joined():
    template = ChatTemplate("{{ messages[0].content }}", {})
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"


def test_what_a_part_says_of_caches_changes_nothing():
    template = ChatTemplate("{{ messages[0].content }}", {})
    hints = (
        {"cache_control": {"type": "ephemeral"}},
        {"prompt_cache_breakpoint": {"ttl": "30m"}, "cache_control": None},
    )
    parts = [{"type": "text", "text": "one", **hint} for hint in hints]
    assert template.render([{"role": "user", "content": parts}]) == "one\none"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("value", [1, None, [], {}])
def test_a_key_of_a_part_that_is_not_known_is_refused_by_name(role, value):
    plain = {"type": "text", "text": "x"}
    messages = [
        {"role": "user", "content": "x"},
        {"role": role, "content": [plain, plain | {"foo": value}]},
    ]
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(CHAT_TEMPLATE, {"eos_token": "x"}).render(messages)
    assert caught.value.param == "messages[1].content[1].foo"
    assert caught.value.message == "messages[1].content[1].foo is not a known key"
    messages[1]["content"][1] = plain | {"y" * 1000: value}
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(CHAT_TEMPLATE, {"eos_token": "x"}).render(messages)
    assert caught.value.param == "messages[1].content[1]." + "y" * KEY_CHARS_MAX


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "must be a list"),
        ("hello", "must be a list"),
        ([], "at least one"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"messages\[1\]\.content"),
        ([{"role": "user", "content": None}], "content must be"),
        ([{"role": "user", "content": []}], "content must be"),
        ([{"role": "user", "content": {"a": 1}}], "content must be"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'"),
        ([{"role": "user", "content": ["x"]}], "part of type None"),
        ([{"role": "user", "content": [{"type": "text"}]}], "without a text"),
    ],
)
def test_bad_messages_are_refused_by_name(messages, words):
    with pytest.raises(BadRequest, match=words) as caught:
        ChatTemplate(CHAT_TEMPLATE, {"eos_token": "x"}).render(messages)
    assert caught.value.param in ("messages", "messages[0].role")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
        "{{ messages[0].content.__class__.__mro__ }}",  # out of the sandbox
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_fails_is_a_bad_request(source):
    with pytest.raises(BadRequest, match="chat template") as caught:
        ChatTemplate(source, {}).render(CHATS[0])
    assert caught.value.param == "messages"


def test_a_templates_own_words_reach_the_client():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(BadRequest, match="roles must alternate"):
        template.render(CHATS[0])


def test_too_many_messages_are_refused():
    messages = [{"role": "user", "content": ""}] * (MESSAGES_MAX + 1)
    with pytest.raises(TooLarge, match=f"{MESSAGES_MAX}"):
        ChatTemplate("", {}).render(messages)


def test_a_text_that_grows_without_end_is_refused():
    source = "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "x" * (RENDERED_CHARS_MAX // 50)}] * 10
    with pytest.raises(TooLarge, match="longer than"):
        ChatTemplate(source, {}).render(messages)


def test_a_lone_surrogate_in_a_chat_is_the_clients_mistake(tmp_path):
    tokenizer = Tokenizer.load(write_folder(tmp_path, "byte_level"))
    with pytest.raises(BadRequest, match="Unicode") as caught:
        tokenizer.encode(
            tokenizer.render_chat([{"role": "user", "content": "\ud800"}]), param="messages"
        )
    assert caught.value.param == "messages"


def test_what_is_no_template_is_refused_at_once():
    with pytest.raises(jinja2.TemplateError):
        ChatTemplate("{% for %}", {})


def test_calls_that_are_shown_where_there_are_tools_may_stand_beside_a_content():
    source = (
        "{% for message in messages %}{{ message.content }}{% if tools and message.tool_calls %}"
        "{{ message.tool_calls[0].function.name }}{% endif %}{% endfor %}"
    )
    made = {"id": "callcall2", "type": "function", "function": {"name": "weather"}}
    message = {"role": "assistant", "content": "I see: ", "tool_calls": [made]}
    extras = ChatExtras(tools=[{"type": "function", "function": {"name": "weather"}}])
    assert ChatTemplate(source, {}).render([message], extras) == "I see: weather"


@pytest.mark.parametrize("content", [" is none", " is not none", ""])
def test_arguments_are_text_for_a_template_that_joins_them_to_text(content):
    """As DeepSeek-R1's does, which shows calls only where there is no content."""
    source = (
        "{% for message in messages if message['tool_calls']"
        + (content and f" and message['content']{content}")
        + " %}{{ '>' + message['tool_calls'][0]['function']['arguments'] }}{% endfor %}"
    )
    shown = '{"place": "Åre"}'
    for arguments, text in (({"place": "Åre"}, shown), ('{"place":"Åre"}', shown), ("{", "{")):
        made = {"id": "callcall2", "type": "function"}
        made["function"] = {"name": "weather", "arguments": arguments}
        message = {"role": "assistant", "content": None, "tool_calls": [made]}
        assert ChatTemplate(source, {}).render([message]) == ">" + text


def test_a_call_that_broke_is_named_where_the_template_cannot_show_it():
    source = (
        "{% for call in messages[0].tool_calls %}"
        "{% for name in call.function.arguments.keys() %}{{ name }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    function = {"name": "weather", "arguments": '{"place": "Åre"}'}
    assert (
        template.render([{"role": "assistant", "tool_calls": [{"function": function}]}]) == "place"
    )
    function["arguments"] = "{"
    words = r"no attribute 'keys'; the arguments in messages\[0\].tool_calls are no JSON"
    with pytest.raises(BadRequest, match=words):
        template.render([{"role": "assistant", "tool_calls": [{"function": function}]}])


@pytest.mark.parametrize(
    ("key", "words"),
    [("refusal", "supported$"), ("tool_call_id", "supported in a message of this role$")],
)
def test_a_key_that_no_role_has_is_not_said_to_be_anothers(key, words):
    with pytest.raises(BadRequest, match=rf"messages\[0\]\.{key} is not {words}"):
        ChatTemplate("", {}).render([{"role": "assistant", "content": "x", key: "no"}])


# As Hermes 2 Pro's, which names each field of `properties`, and puts the description in words.
SIGNATURES = (
    "{% for tool in tools %}{{ tool.function.name }}("
    "{% for name, field in tool.function.parameters.properties.items() %}"
    "{{ name }}: {{ field.type }}{% endfor %})"
    "{{ ' - ' + tool.function.description + '\n' }}{% endfor %}{{ messages[0].content }}"
)
TAKING_TOOLS = {"signatures": SIGNATURES, **{n: s for n, s in STYLES.items() if "tools" in s}}
NO_PARAMETERS = {"type": "object", "properties": {}}


@pytest.mark.parametrize("style", TAKING_TOOLS)
@pytest.mark.parametrize("said", [{}, {"parameters": None}, {"parameters": {}}], ids=str)
def test_a_tool_without_parameters_is_shown_as_one_that_takes_none(tmp_path, style, said):
    write_folder(tmp_path, "byte_level", chat_template=TAKING_TOOLS[style])
    function = {"name": "now", "description": "The time."}
    whole = {"type": "function", "function": {**function, "parameters": NO_PARAMETERS}}
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        CHATS[0], tools=[whole], tokenize=False, add_generation_prompt=True
    )
    tools = [{"type": "function", "function": function | said}]
    before = json.dumps(tools)
    assert Tokenizer.load(tmp_path).render_chat(CHATS[0], ChatExtras(tools=tools)) == expected
    assert before == json.dumps(tools), "a client's tools are not changed"


@pytest.mark.parametrize("said", [{}, {"description": None}], ids=str)
def test_a_tool_without_description_has_an_empty_one_only_where_a_template_needs_it(said):
    tools = [{"type": "function", "function": {"name": "now", **said}}]
    shown = {
        source: ChatTemplate(source, {}).render(CHATS[0], ChatExtras(tools=tools))
        for source in (SIGNATURES, "{{ tools | tojson }}")
    }
    function = {"name": "now", "parameters": NO_PARAMETERS}
    assert list(shown.values()) == [
        "now() - \nhello",
        json.dumps([{"type": "function", "function": function}]),
    ]
