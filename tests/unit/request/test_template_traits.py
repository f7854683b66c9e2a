import pytest
from chat_styles import STYLES

from neuron_di.request import TemplateTraits, is_in_reasoning, template_traits
from neuron_di.testing.checkpoints import TOOL_CHAT_TEMPLATE

THINK = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, TemplateTraits()),
        ("", TemplateTraits()),
        (STYLES["plain"], TemplateTraits()),
        (STYLES["hermes"], TemplateTraits("hermes", THINK)),
        (STYLES["llama"], TemplateTraits("llama3_json")),
        (STYLES["mistral"], TemplateTraits("mistral")),
        (STYLES["r1"], TemplateTraits(None, THINK)),
        # Alike, but another form: what reads the one would read the other wrong.
        ("<tool_call>\n<function=x> </tool_call> \"name\" \"arguments\"", TemplateTraits()),
        ("<tool_call>{{ n }}<arg_key></tool_call> 'name' 'arguments'", TemplateTraits()),
        ("[TOOL_CALLS]{{ n }}[ARGS]{}", TemplateTraits()),
        ("[THINK] [/THINK]", TemplateTraits(None, ("[THINK]", "[/THINK]"))),
        ("<|python_tag|> \"name\" \"parameters\"", TemplateTraits()),
        ("how to <think> about \"name\" and \"parameters\"", TemplateTraits()),
    ],
)  # fmt: skip
def test_traits_come_from_marks_of_one_format(source, expected):
    assert template_traits(source) == expected


@pytest.mark.parametrize(
    "quoted",
    [
        # One format in the quotations that templates and their files use.
        "<tool_call>\n{\"name\": \"x\", \"arguments\": {}}\n</tool_call>",
        r"{{ '<tool_call>\n{\"name\": \"' + n + '\", \"arguments\": ' }}</tool_call>",
        "{{ \"<tool_call>\\n{\\\"name\\\": <n>, \\\"arguments\\\": <a>}</tool_call>\" }}",
    ],
)  # fmt: skip
def test_quotes_may_be_escaped(quoted):
    assert template_traits(quoted).tool_format == "hermes"


def test_the_test_checkpoints_template_has_both():
    assert template_traits(TOOL_CHAT_TEMPLATE) == TemplateTraits("hermes", THINK)


@pytest.mark.parametrize(
    ("text", "continued", "expected"),
    [
        ("<|Assistant|><think>\n", "", True),
        ("<|Assistant|><think>", "", True),
        ("<|Assistant|><think>\n\n</think>\n\n", "", False),
        ("what is <think> for?<|Assistant|>", "", False),
        ("<|Assistant|><think>\nso far", "<think>\nso far", True),
        ("<|Assistant|><think>a</think> so far", "<think>a</think> so far", False),
        ("what is <think>?<|Assistant|>so far", "so far", False),
    ],
)
def test_an_answer_begins_in_reasoning_where_its_prompt_ends_there(text, continued, expected):
    assert is_in_reasoning(text, THINK, continued) is expected
    assert not is_in_reasoning(text, None, continued)
