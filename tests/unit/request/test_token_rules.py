import pytest
from tokenizer_kit import make_tokenizer

from neuron_di.errors import BadRequest
from neuron_di.request import TokenRuleMaker, has_token_rules
from neuron_di.wire import Grammar, SamplingParams


@pytest.fixture(scope="module")
def maker():
    tokenizer = make_tokenizer("byte_level")
    return TokenRuleMaker(tokenizer, num_vocab=tokenizer.num_vocab, eos_token_ids=(0,))


def test_most_requests_have_no_rules(maker):
    params = SamplingParams(temperature=0.5, stop=("x",), min_tokens=3, ignore_eos=True)
    assert not has_token_rules(params)
    assert maker.rules_of(params) is None


@pytest.mark.parametrize(
    ("field", "value", "made"),
    [
        ("logit_bias", ((3, 1.5), (9, -2.0)), "bias"),
        ("allowed_token_ids", (3, 9), "allowed_ids"),
        ("bad_words", ("dog",), "bad_words"),
        ("grammar", Grammar(kind="json_object"), "grammar"),
    ],
)
def test_each_rule_alone(maker, field, value, made):
    params = SamplingParams(**{field: value})
    assert has_token_rules(params)
    rules = maker.rules_of(params)
    names = ("bias", "allowed_ids", "bad_words", "grammar")
    assert [name for name in names if getattr(rules, name) is not None] == [made]


def test_a_bias_is_two_arrays_of_one_length(maker):
    token_ids, biases = maker.rules_of(SamplingParams(logit_bias=((3, 1.5), (9, -2.0)))).bias
    assert (token_ids.tolist(), biases.tolist()) == ([3, 9], [1.5, -2.0])


def test_two_requests_share_no_state(maker):
    params = SamplingParams(grammar=Grammar(kind="choice", value='["a","b"]'))
    one, other = maker.rules_of(params), maker.rules_of(params)
    assert one.grammar is not other.grammar
    (a,) = make_tokenizer("byte_level").encode("a")
    one.grammar.accept(a)
    assert not other.grammar.accept(a)


def test_what_cannot_be_made_is_refused_by_name(maker):
    for params, param in (
        (SamplingParams(grammar=Grammar(kind="json_schema", value="[]")), "response_format"),
        (SamplingParams(bad_words=("\ud800",)), "bad_words"),
    ):
        with pytest.raises(BadRequest) as caught:
            maker.rules_of(params)
        assert caught.value.param == param
