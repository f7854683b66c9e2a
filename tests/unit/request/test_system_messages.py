"""A system's message is in the prompt, or refused: none is passed over in silence."""

import pytest
from chat_styles import STYLES

from neuron_di.errors import BadRequest
from neuron_di.request import ChatTemplate

ASK = {"role": "user", "content": "weather?"}
ANSWER = {"role": "assistant", "content": "rain"}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# As the first templates of Mistral 7B v0.3: other roles are passed over.
OTHERS_DROPPED = """
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}
"""
# The first message may be a system's; one that comes later is passed over.
LATER_DROPPED = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
LATER_DROPPED += OTHERS_DROPPED
# The last one counts. As R1's, and those of others that keep it in a variable.
LAST_COUNTS = "{% for m in messages if m.role == 'system' %}{% set n.s = m.content %}{% endfor %}"
LAST_COUNTS = "{% set n = namespace(s='') %}" + LAST_COUNTS + "{{ n.s }}" + OTHERS_DROPPED


def system(content, role="system"):
    return {"role": role, "content": content}


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize(
    ("source", "messages", "place"),
    [
        (OTHERS_DROPPED, [system("a"), ASK], 0),
        (OTHERS_DROPPED, [ASK, ANSWER, system("a"), ASK], 2),
        (LATER_DROPPED, [system("a"), system("b"), ASK], 1),
        (LATER_DROPPED, [ASK, system("a")], 1),
        (LAST_COUNTS, [system("a"), ASK, system("b"), ASK], 0),
    ],
)
def test_one_that_the_template_passes_over_is_refused(source, messages, place, role):
    messages = [each | {"role": role} if each["role"] == "system" else each for each in messages]
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(source, TOKENS).render(messages)
    assert caught.value.param == f"messages[{place}].role"
    assert "system's message" in caught.value.message


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (OTHERS_DROPPED, [ASK]),
        (LATER_DROPPED, [system("a"), ASK]),
        (LAST_COUNTS, [ASK, ANSWER, system("b"), ASK]),
        (STYLES["plain"], [system("a"), system("b"), ASK, system("c")]),
        (STYLES["mistral"], [system("a"), ASK]),
        # Its system is shown in the last question, and not behind a tool's result.
        (STYLES["mistral"], [system("a"), ASK, ANSWER]),
    ],
)
def test_others_are_rendered(source, messages):
    assert ASK["content"] in ChatTemplate(source, TOKENS).render(messages)


def test_a_template_that_refuses_one_says_why_itself():
    source = "{% for m in messages if m.role == 'system' %}{{ raise_exception('no!') }}{% endfor %}"
    for messages in ([system("a"), ASK], [ASK, system("a")]):
        with pytest.raises(BadRequest, match="no!"):
            ChatTemplate(source, TOKENS).render(messages)


def test_a_template_that_only_names_a_developer_is_shown_a_system():
    source = "{# the developer #}{{ messages[0].content if messages[0].role == 'system' }}"
    assert ChatTemplate(source, TOKENS).render([system("a", "developer")]) == "a"
