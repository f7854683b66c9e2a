import math

import msgspec
import pytest

from neuron_di.errors import BadRequest
from neuron_di.wire import CallGrammar, Grammar, SamplingParams
from neuron_di.wire.sampling_rules import check_sampling


def test_the_defaults_and_the_ends_of_every_range_are_allowed():
    check_sampling(SamplingParams())
    lowest = SamplingParams(
        max_tokens=1, temperature=0, top_p=1e-9, seed=-(2**63), presence_penalty=-2,
        frequency_penalty=-2, repetition_penalty=0.01, stop=("x",), stop_token_ids=(0,), logprobs=0,
        logit_bias=((0, -100.0),), allowed_token_ids=(0,), bad_words=("x",),
    )  # fmt: skip
    highest = SamplingParams(
        max_tokens=None, min_tokens=10**9, temperature=2, top_k=10**9, top_p=1, min_p=1,
        seed=2**63 - 1, presence_penalty=2, frequency_penalty=2, repetition_penalty=2,
        stop=("x" * 1024,) * 16, stop_token_ids=(99,) * 128, logprobs=20,
        logit_bias=tuple((i % 100, 100.0) for i in range(1024)), bad_words=("x" * 256,) * 128,
        allowed_token_ids=tuple(range(100)),
        grammar=Grammar(
            kind="json_schema",
            value=" " * (64 << 10),
            calls=CallGrammar(format="hermes", call_schema=" " * (64 << 10)),
        ),
    )  # fmt: skip
    check_sampling(lowest, num_vocab=100)
    check_sampling(highest, num_vocab=100)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 2.1, math.inf]),
        ("top_p", [0.0, -0.1, 1.1]),
        ("min_p", [-0.1, 1.1]),
        ("top_k", [-1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0.0, 1e-38, 0.0099, -1.0, 2.1]),
        ("seed", [2**63, -(2**63) - 1]),
        ("logprobs", [-1, 21]),
        ("max_tokens", [0, -5]),
        ("min_tokens", [-1, 17]),
        ("stop", [("",), ("x" * 1025,), ("x",) * 17]),
        ("stop_token_ids", [(-1,), (100,), (0,) * 129]),
        ("logit_bias", [((-1, 0.0),), ((100, 0.0),), ((1, 100.1),), ((1, -100.1),)]),
        ("logit_bias", [((1, math.nan),), ((1, math.inf),), ((1, 0.0),) * 1025]),
        ("allowed_token_ids", [(), (-1,), (100,), (0,) * 101]),
        ("bad_words", [("",), ("x" * 257,), ("x",) * 129]),
    ],
)
def test_each_field_is_refused_by_name(field, values):
    for value in values:
        params = msgspec.structs.replace(SamplingParams(), **{field: value})
        with pytest.raises(BadRequest, match=field) as caught:
            check_sampling(params, num_vocab=100)
        assert caught.value.param == field


@pytest.mark.parametrize("param", ["response_format", "structured_outputs", "tools"])
def test_a_grammar_is_limited_in_size_and_named_as_the_api_does(param):
    for grammar in (
        Grammar(kind="choice", value="x" * ((64 << 10) + 1), param=param),
        Grammar(kind="json_object", reasoning=("<think>", "x" * 1025), param=param),
        Grammar(kind="json_object", reasoning=("", "x"), param=param),
    ):
        with pytest.raises(BadRequest, match=param) as caught:
            check_sampling(SamplingParams(grammar=grammar))
        assert caught.value.param == param


def test_of_calls_or_text_the_one_that_is_too_long_is_named():
    calls = CallGrammar(format="mistral", call_schema="x" * ((64 << 10) + 1))
    with pytest.raises(BadRequest, match="tools is longer") as caught:
        check_sampling(SamplingParams(grammar=Grammar(kind="json_object", calls=calls)))
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "field",
    [
        "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty",
    ],
)  # fmt: skip
def test_nan_is_refused(field):
    params = msgspec.structs.replace(SamplingParams(), **{field: math.nan})
    with pytest.raises(BadRequest):
        check_sampling(params)


def test_the_message_names_the_range():
    with pytest.raises(BadRequest, match="temperature must be between 0 and 2"):
        check_sampling(SamplingParams(temperature=3))
    with pytest.raises(BadRequest, match="top_p must be more than 0 and at most 1"):
        check_sampling(SamplingParams(top_p=0))
