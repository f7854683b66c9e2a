"""Answers that match a regular expression, over the small tokenizers."""

import pytest
from grammar_kit import EOS, Kit
from tokenizer_kit import KINDS

from neuron_di.errors import BadRequest
from neuron_di.wire import Grammar


@pytest.fixture(scope="module")
def kit():
    return Kit()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("expression", "texts"),
    [
        ("[0-9]{3}-[a-c]+", ["123-abc", "000-a"]),
        ("^yes|no$", ["yes", "no"]),
        ("a/b", ["a/b"]),
        (r"a\/b\\", ["a/b\\"]),
        ('"[^"]*"', ['"a b"', '""']),
        ("(é|你)*好", ["好", "é你好"]),
        ("a\nb", ["a\nb"]),
        ("(?i)abc", ["abc", "ABC"]),
        (r"[a\[b]-&&[!-\-]", ["[-&&-", "a-&&!"]),
        ("[[:digit:]a]", ["1", "a"]),
    ],
)
def test_all_of_an_answer_matches_an_expression(kind, expression, texts):
    kit = Kit(kind)
    for text in texts:
        state = kit.compiler.state_of(Grammar(kind="regex", value=expression))
        kit.write(state, text)
        assert EOS in kit.allowed(state)
        assert state.accept(EOS)


def test_an_answer_goes_no_further_than_its_expression(kit):
    state = kit.compiler.state_of(Grammar(kind="regex", value="ab"))
    kit.write(state, "a")
    assert EOS not in kit.allowed(state)
    kit.write(state, "b")
    assert kit.allowed(state) == {EOS}


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("(", "not a regular expression"),
        ("(?=a)b", "look-around"),
        (r"\bfoo\b", "look-around"),
        (r"(a)\1", "not a regular expression"),
        ("(a{1,1000}){1,1000}", "repeats something more than"),
        ("[^\\s\\S]", "not a regular expression"),
        ("[a[b]]", "put a backslash before"),
        ("[]a[b]]", "put a backslash before"),
        ("[^[]", "put a backslash before"),
        ("[a-z&&b]", "put a backslash before"),
        ("x[ --]", "put a backslash before"),
        ("[a~~b]", "put a backslash before"),
        ("(a*)*" * 900, "longer than"),
    ],
)
def test_an_expression_that_cannot_be_followed_is_refused_without_repeating_it(
    kit, expression, words
):
    grammar = Grammar(kind="regex", value=expression, param="structured_outputs")
    with pytest.raises(BadRequest, match=words) as error:
        kit.compiler.state_of(grammar)
    assert expression not in error.value.message
    assert error.value.param == "structured_outputs"


def test_an_expression_that_is_much_work_ends_its_answer_and_no_worker(kit):
    """Each token doubles what could be meant: the library's limits end it."""
    state = kit.compiler.state_of(Grammar(kind="regex", value="(.*a.{400}){2}"))
    letter = kit.ids("a")[0]

    def go_on():
        for _ in range(500):
            state.masked(kit.raw_V)
            state.accept(letter)

    with pytest.raises(BadRequest, match="too complex"):
        go_on()
