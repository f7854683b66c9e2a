"""Answers that keep a grammar, whatever the model's logits say."""

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_continuation import check_every_split, run

from neuron_di.engine import Broken
from neuron_di.engine.sampler import sample
from neuron_di.errors import BadRequest, RemoteProtocolError, WorkerFailed
from neuron_di.request import OutputText, Request, Tokenizer, TokenRuleMaker, accept_token
from neuron_di.types import RequestId
from neuron_di.wire import Grammar, SamplingParams

EOS = (2, 0)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
IN_SCHEMA = Grammar(kind="json_schema", value=json.dumps(SCHEMA))


def is_valid(value, schema):
    """JSON Schema's meaning, for the keywords that `schemas` uses."""
    if "anyOf" in schema:
        return any(is_valid(value, branch) for branch in schema["anyOf"])
    if "enum" in schema:
        return any(value == each and type(value) is type(each) for each in schema["enum"])
    kind = schema["type"]
    if kind == "object":
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(is_valid(value[key], schema["properties"][key]) for key in value)
        )
    if kind == "array":
        return (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(is_valid(each, schema["items"]) for each in value)
        )
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "integer":
        number = isinstance(value, int) and not isinstance(value, bool)
        return number and schema["minimum"] <= value <= schema["maximum"]
    assert kind == "null"
    return value is None


def extended(inner):
    def object_of(properties, required):
        return {
            "type": "object",
            "properties": properties,
            "required": sorted(key for key in required if key in properties),
            "additionalProperties": False,
        }

    names = st.sampled_from(["a", "b", 'say "hi"', "naïve", "x y"])
    return st.one_of(
        st.builds(object_of, st.dictionaries(names, inner, max_size=3), st.sets(names)),
        st.builds(
            lambda items, low, more: {
                "type": "array", "items": items, "minItems": low, "maxItems": low + more,
            },
            inner, st.integers(0, 1), st.integers(0, 2),
        ),
        st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, min_size=1, max_size=3)),
    )  # fmt: skip


# Some control characters are refused: test_grammar.py.
texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x7f").filter(
        lambda one: one >= " " or one in "\n\t\r\b\f"
    ),
    max_size=3,
)
schemas = st.recursive(
    st.one_of(
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
        st.builds(
            lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
            st.integers(-50, 50), st.integers(0, 200),
        ),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
        st.builds(
            lambda values: {"enum": values},
            st.lists(
                st.one_of(texts, st.integers(-9, 99), st.booleans(), st.none()),
                min_size=1, max_size=4,
            ),
        ),
    ),
    extended,
    max_leaves=5,
)  # fmt: skip


class RandomModel:
    """Logits from a seed, one row per token index; ends, spaces and all are equally likely."""

    def __init__(self, folder):
        self.tokenizer = Tokenizer.load(folder)
        self.num_vocab = self.tokenizer.num_vocab
        self.rules = TokenRuleMaker(self.tokenizer, num_vocab=self.num_vocab, eos_token_ids=EOS)

    def answer(self, seed, *, max_tokens=3000, in_reasoning=False, **fields):
        """(text, finish, ids) of one answer."""
        params = SamplingParams(**{"seed": seed, "max_tokens": max_tokens, **fields})
        output = OutputText(
            self.tokenizer,
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        request = Request(
            RequestId("r"), 0, prompt_ids=[300], sampling=params, max_tokens=max_tokens,
            output=output, rules=self.rules.rules_of(params), begins_in_reasoning=in_reasoning,
        )  # fmt: skip
        random = np.random.default_rng(seed % 2**32)
        text = ""
        while True:
            row = torch.from_numpy(random.normal(0, 4, (1, self.num_vocab)).astype(np.float32))
            (token,) = sample(row, [request], EOS)
            outcome = accept_token(request, token.token_id, EOS)
            text += outcome.text
            if outcome.finish is not None:
                return text + outcome.finish.text, outcome.finish, request.generated


@pytest.fixture(scope="module")
def model(llama_folder):
    return RandomModel(llama_folder)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    schema=schemas,
    seed=st.integers(0, 2**40),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.just(3),
            "top_p": st.just(0.5),
            "min_tokens": st.sampled_from([1, 40]),
            "ignore_eos": st.booleans(),
            "repetition_penalty": st.sampled_from([0.2, 2.0]),
            "logit_bias": st.just(((2, 100.0), (70, 100.0), (5, -100.0))),
            "skip_special_tokens": st.just(False),
        },
    ),
)
def test_every_answer_is_what_its_schema_says(model, schema, seed, temperature, fields):
    grammar = Grammar(kind="json_schema", value=json.dumps(schema))
    text, finish, _ = model.answer(seed, temperature=temperature, grammar=grammar, **fields)
    assert (finish.reason, finish.stop) == ("stop", None)
    assert is_valid(json.loads(text), schema), text


def test_the_validator_of_this_file_says_no():
    assert not is_valid({"name": "long name", "n": 1}, SCHEMA)
    assert not is_valid({"name": ""}, SCHEMA)
    assert not is_valid({"name": "", "n": True}, SCHEMA)
    assert not is_valid({"name": "", "n": 1, "m": 1}, SCHEMA)
    assert not is_valid(1, {"enum": [True]})


def test_without_a_grammar_the_same_model_writes_no_json(model):
    text, _, _ = model.answer(3, max_tokens=50, ignore_eos=True)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


def test_a_complete_answer_ends_in_spite_of_min_tokens_and_ignore_eos(model):
    for fields in ({"min_tokens": 2000}, {"ignore_eos": True}):
        text, finish, ids = model.answer(1, grammar=IN_SCHEMA, **fields)
        assert is_valid(json.loads(text), SCHEMA)
        assert (finish.reason, len(ids) < 1000, ids[-1] in EOS) == ("stop", True, True)


def test_a_stop_token_ends_a_complete_answer_and_is_named(model):
    # No text of the answer's: the grammar itself never lets it come.
    (stop,) = (n for n in range(model.num_vocab) if model.tokenizer.token_text(n) == "\x01")
    bias = {"logit_bias": ((stop, 100.0), (2, -100.0), (0, -100.0))}
    text, finish, ids = model.answer(1, grammar=IN_SCHEMA, stop_token_ids=(stop,), **bias)
    assert is_valid(json.loads(text), SCHEMA)
    assert (finish.reason, finish.stop, ids[-1]) == ("stop", stop, stop)


def test_reasoning_comes_first_and_is_free(model):
    end = model.tokenizer.token_text(500)
    grammar = Grammar(kind="json_schema", value=json.dumps(SCHEMA), reasoning=("<think>", end))
    text, finish, ids = model.answer(
        5, grammar=grammar, temperature=2.0, max_tokens=9000, in_reasoning=True
    )
    _, found, answer = text.partition(end)
    assert found
    assert is_valid(json.loads(answer), SCHEMA)
    assert finish.reason == "stop"
    assert not set(ids[:-1]) & set(EOS)


def test_a_model_that_reasons_only_where_it_likes_keeps_the_grammar_anyhow(model):
    start, end = model.tokenizer.token_text(400), model.tokenizer.token_text(500)
    grammar = Grammar(kind="json_schema", value=json.dumps(SCHEMA), reasoning=(start, end))
    has_reasoned = set()
    for seed in range(8):
        text, finish, _ = model.answer(seed, grammar=grammar, temperature=2.0, max_tokens=9000)
        begun, found, answer = text.partition(end)
        has_reasoned.add(bool(found))
        assert begun.startswith(start) if found else not answer
        assert is_valid(json.loads(answer if found else text), SCHEMA)
        assert finish.reason == "stop"
    assert has_reasoned == {True, False}


def choices(**fields):
    return {"grammar": Grammar(kind="choice", value='["yes","no","perhaps so"]'), **fields}


def test_an_interrupted_answer_goes_on_in_its_grammar(make_rig):
    """On one worker or two, from every token on: the state is that of the ids."""

    def make(role, **options):
        return make_rig(role, eos_token_ids=EOS, **options)

    fields = {"grammar": IN_SCHEMA, "temperature": 1.0, "seed": 5, "max_tokens": 60}
    tokens, end = check_every_split(make, {**fields, "logit_bias": ((2, 9.0),), "logprobs": 1})
    text = "".join(token.text for token in tokens) + end[2]
    assert end[0] == "stop"
    assert is_valid(json.loads(text), SCHEMA)


def test_the_reasoning_of_an_interrupted_answer_is_over_only_once(make_rig):
    def make(role, **options):
        return make_rig(role, eos_token_ids=EOS, **options)

    rig = make("both")
    free, _ = run(rig, temperature=1.0, seed=1)
    likely = free[0].token_id, free[9].token_id
    first, last = map(rig.tokenizer.token_text, likely)
    for in_reasoning, start in ((True, "<think>"), (False, first)):
        grammar = Grammar(kind="choice", value='["yes","no"]', reasoning=(start, last))
        fields = {"grammar": grammar, "temperature": 1.0, "seed": 1, "max_tokens": 40}
        bias = tuple(zip(likely, (9.0, 7.0), strict=True))
        fields |= {"in_reasoning": in_reasoning, "logit_bias": bias}
        tokens, end = check_every_split(make, fields)
        text = "".join(token.text for token in tokens)
        assert end[0] == "stop"
        assert text.partition(last)[2] in {"yes", "no"}
        assert 3 < len(tokens) < 40


def broken(events, name):
    (error,) = [e.error for e in events if isinstance(e, Broken) and e.key[0] == name]
    return error


def test_an_answer_that_cannot_go_on_ends_alone(make_rig):
    rig = make_rig("both", eos_token_ids=EOS)
    loop = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}
    grammar = Grammar(kind="json_schema", value=json.dumps(loop))
    rig.engine.submit(rig.request("dead end", grammar=grammar, max_tokens=60))
    rig.engine.submit(rig.request("none", **choices(allowed_token_ids=(7,))))
    rig.engine.submit(rig.request("fine", max_tokens=20))
    events = rig.turn_until_idle()
    for name, param in (("dead end", "response_format"), ("none", "allowed_token_ids")):
        error = broken(events, name)
        assert isinstance(error, BadRequest)
        assert (error.param, error.retryable) == (param, False)
    assert events[-1].key[0] == "fine"
    assert events[-1].reason == "length"


def test_given_ids_that_break_the_grammar_are_refused(make_rig):
    rig = make_rig("both", eos_token_ids=EOS)
    rig.engine.submit(rig.request("a", given=[300, 301], **choices()))
    assert isinstance(broken(rig.turn_until_idle(), "a"), RemoteProtocolError)


def test_a_bug_in_a_step_is_not_the_clients(make_rig):
    rig = make_rig("both", eos_token_ids=EOS)
    rig.backend.spoilt_rows = [0]
    rig.engine.submit(rig.request("a", max_tokens=3, bad_words=("x",)))
    assert isinstance(broken(rig.turn_until_idle(), "a"), WorkerFailed)
