import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_pieces import cuts

from neuron_di_proxy.message_parts import MessageParts
from neuron_di_proxy.reasoning import ReasoningSplitter

TAGS = ("<think>", "</think>")


def split(*pieces, begins_inside=False):
    """All reasoning, all of the answer, and how many pieces were reasoning."""
    splitter = ReasoningSplitter(TAGS, begins_inside=begins_inside)
    parts = MessageParts()
    answer = "".join(splitter.feed(piece, parts) for piece in pieces) + splitter.end(parts)
    return parts.reasoning, answer, splitter.num_tokens


@pytest.mark.parametrize("begins_inside", [False, True])
@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>why\n</think>\n\nso", "why\n", "\n\nso"),
        ("\n <think>why", "why", ""),
        ("<think></think>so", "", "so"),
        ("<think>a <think> b</think>c</think>d", "a <think> b", "c</think>d"),
        ("<think>half </thi", "half </thi", ""),
        ("<think>", "", ""),
    ],
)
def test_the_tags_part_reasoning_from_the_answer(text, reasoning, answer, begins_inside):
    assert split(text, begins_inside=begins_inside)[:2] == (reasoning, answer)
    assert split(*text, begins_inside=begins_inside)[:2] == (reasoning, answer)


@pytest.mark.parametrize("text", ["so", " so", "", "  ", "<thi", "<b>", "so <think>why</think>"])
def test_an_answer_that_does_not_begin_with_the_tag_has_no_reasoning(text):
    assert split(text) == ("", text, 0)
    assert split(*text) == ("", text, 0)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("why</think>so", "why", "so"),
        ("</think>so", "", "so"),
        ("\n\n", "\n\n", ""),
        ("<thi", "<thi", ""),
        ("why", "why", ""),
    ],
)
def test_a_prompt_may_have_opened_the_reasoning(text, reasoning, answer):
    assert split(text, begins_inside=True)[:2] == (reasoning, answer)
    assert split(*text, begins_inside=True)[:2] == (reasoning, answer)


def test_tokens_of_reasoning_are_counted_with_their_tags():
    assert split("<think>", "a", "b", "</think>", "\n", "so")[2] == 4
    assert split("a", "b</th", "ink>so", "on", begins_inside=True)[2] == 3
    assert split("<", "thi", "s")[2] == 0


fragments = ["<think>", "</think>", "<thi", "</", "nk>", " ", "\n", "text", "é😀"]
any_text = st.lists(st.sampled_from(fragments), max_size=8).map("".join)


@given(cuts(any_text), st.booleans())
def test_how_the_text_is_split_changes_nothing(cut, begins_inside):
    text, pieces = cut
    reasoning, answer, _ = split(text, begins_inside=begins_inside)
    assert split(*pieces, begins_inside=begins_inside)[:2] == (reasoning, answer)
    assert reasoning in text
    assert text.endswith(answer)
