"""Answers that are tool calls, or text that keeps a format, of models that write anything."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_continuation import check_every_split, run, run_split
from test_structured_answers import EOS, SCHEMA, RandomModel, is_valid, schemas

from neuron_di.wire import CallGrammar, Grammar

FORMATS = ["hermes", "mistral", "llama3_json"]
OPEN = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": ""}
ARGUMENTS = {"hermes": "arguments", "mistral": "arguments", "llama3_json": "parameters"}


@pytest.fixture(scope="module")
def model(llama_folder):
    return RandomModel(llama_folder)


def call_grammar(call_format, arguments, **fields):
    key = ARGUMENTS[call_format]
    call = {
        "type": "object",
        "properties": {"name": {"const": "f"}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return CallGrammar(format=call_format, call_schema=json.dumps(call), **fields)


def either(call_format, text, arguments, **fields):
    calls = call_grammar(call_format, arguments)
    return Grammar(kind="json_schema", value=json.dumps(text), calls=calls, **fields)


def calls_of(call_format, text):
    """The arguments of the calls that a text is, white space aside. None: it is none."""
    if not text.startswith(OPEN[call_format]):
        return None
    text = text.removeprefix(OPEN[call_format]).removeprefix("<|python_tag|>").lstrip()
    if call_format == "mistral":
        calls = json.loads(text)
    elif call_format == "hermes":
        parts = [part.strip() for part in text.strip().split("<tool_call>")]
        assert all(part.endswith("</tool_call>") for part in parts)
        calls = [json.loads(part.removesuffix("</tool_call>")) for part in parts]
    else:
        calls, decoder = [], json.JSONDecoder()
        while text:
            call, end = decoder.raw_decode(text)
            calls.append(call)
            text = text[end:].lstrip(" \t\r\n;")
    key = ARGUMENTS[call_format]
    assert all(call.keys() == {"name", key} and call["name"] == "f" for call in calls)
    return [call[key] for call in calls]


def biased(tokenizer, begin):
    """A logit_bias for tokens that begin so."""
    ids = [i for i in range(tokenizer.num_vocab) if tokenizer.token_bytes(i)[:1] == begin]
    return tuple((token_id, 50.0) for token_id in ids)


# Else a model that likes what it has said, or does not care, would call on and on.
ENDS = tuple((token_id, 100.0) for token_id in EOS)
SMALL = {"type": "integer", "minimum": 0, "maximum": 9}


def side_of(call_format, text, arguments, text_schema):
    """Which side an answer is of. Neither can be taken for the other."""
    calls = None
    if call_format != "llama3_json" or text.startswith("<") or "parameters" in first_object(text):
        calls = calls_of(call_format, text)
    if calls is None:
        assert is_valid(json.loads(text), text_schema), text
        return "text"
    assert calls
    assert all(is_valid(each, arguments) for each in calls), text
    return "calls"


def first_object(text):
    return json.JSONDecoder().raw_decode(text)[0]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    call_format=st.sampled_from(FORMATS),
    schema=schemas,
    arguments=schemas,
    seed=st.integers(0, 2**40),
    temperature=st.sampled_from([0.0, 1.0, 2.0]),
    begin=st.sampled_from([b"<", b"[", b"{"]),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.just(3),
            "min_tokens": st.sampled_from([1, 40]),
            "repetition_penalty": st.just(2.0),
        },
    ),
)
def test_every_answer_is_one_or_the_other(
    model, call_format, schema, arguments, seed, temperature, begin, fields
):
    text_schema = {
        "type": "object",
        "properties": {"text": schema},
        "required": ["text"],
        "additionalProperties": False,
    }
    text, finish, _ = model.answer(
        seed,
        temperature=temperature,
        grammar=either(call_format, text_schema, arguments),
        logit_bias=(*biased(model.tokenizer, begin), *ENDS),
        **fields,
    )
    assert (finish.reason, finish.stop) == ("stop", None)
    assert side_of(call_format, text, arguments, text_schema) in ("calls", "text")


@pytest.mark.parametrize("call_format", FORMATS)
def test_either_side_can_be_chosen(model, call_format):
    """By the first token that only one can take, which the model may like for itself."""
    chosen = set()
    for seed in range(24):
        grammar = either(call_format, SCHEMA, SMALL)
        text, finish, _ = model.answer(seed, grammar=grammar, logit_bias=ENDS)
        assert finish.reason == "stop"
        chosen.add(side_of(call_format, text, SMALL, SCHEMA))
    assert chosen == {"text", "calls"}


@pytest.mark.parametrize("in_reasoning", [True, False])
@pytest.mark.parametrize("call_format", FORMATS)
def test_reasoning_comes_first_and_is_free(model, call_format, in_reasoning):
    start, end = model.tokenizer.token_text(400), model.tokenizer.token_text(500)
    grammar = either(call_format, SCHEMA, SMALL, reasoning=(start, end))
    chosen = set()
    for seed in range(16):
        text, finish, ids = model.answer(
            seed, grammar=grammar, temperature=2.0, max_tokens=9000, in_reasoning=in_reasoning,
            logit_bias=ENDS,
        )  # fmt: skip
        assert finish.reason == "stop"
        begun, found, answer = text.partition(end)
        assert begun.startswith(start) or not found or in_reasoning
        assert found or not in_reasoning
        assert not set(ids[:-1]) & set(EOS)
        answer = (answer if found else begun).lstrip()
        chosen.add((side_of(call_format, answer, SMALL, SCHEMA), bool(found)))
    assert {side for side, has_reasoned in chosen if has_reasoned} == {"text", "calls"}


@pytest.mark.parametrize(
    ("call_format", "begin"),
    [
        ("hermes", b"{"), ("hermes", b"<"), ("mistral", b"{"), ("mistral", b"["),
        ("llama3_json", b"{"), ("llama3_json", b"<"),
    ],
)  # fmt: skip
def test_an_interrupted_answer_goes_on_on_its_side(make_rig, call_format, begin):
    """On one worker or two, from every token on: the state is that of the ids."""

    def make(role, **options):
        return make_rig(role, eos_token_ids=EOS, **options)

    bias = (*biased(make("both").tokenizer, begin), *ENDS)
    grammar = either(call_format, SCHEMA, SMALL)
    fields = {"grammar": grammar, "temperature": 1.0, "seed": 5, "max_tokens": 60}
    tokens, end = check_every_split(make, {**fields, "logprobs": 1, "logit_bias": bias})
    text = "".join(token.text for token in tokens) + end[2]
    assert end[0] == "stop"
    side = side_of(call_format, text, SMALL, SCHEMA)
    if begin == b"{" and call_format == "llama3_json":
        return  # which may begin either
    assert side == ("text" if begin == b"{" else "calls")


def within_text(call_format, arguments, **fields):
    calls = call_grammar(call_format, arguments, **fields)
    return Grammar(kind="text", calls=calls, param="tools")


def test_text_that_may_have_calls_keeps_min_tokens_and_may_go_on(model):
    """It could end at any token: neither is what the grammar wants, as in other answers."""
    grammar = within_text("hermes", SMALL)
    _, finish, ids = model.answer(1, grammar=grammar, logit_bias=ENDS, min_tokens=9)
    assert (finish.reason, len(ids)) == ("stop", 10)
    _, finish, ids = model.answer(
        1, grammar=grammar, logit_bias=ENDS, ignore_eos=True, max_tokens=30
    )
    assert (finish.reason, len(ids)) == ("length", 30)
    free = model.answer(2, temperature=1.0, max_tokens=40)
    assert model.answer(2, temperature=1.0, max_tokens=40, grammar=grammar) == free


@pytest.mark.parametrize("call_format", FORMATS)
def test_text_with_a_call_goes_on_wherever_it_was_interrupted(make_rig, call_format):
    """From the tag on, as the model that wrote it would not do by chance."""

    def make(role, **options):
        return make_rig(role, eos_token_ids=EOS, **options)

    both, prefill, decode = make("both"), make("prefill"), make("decode")
    tokenizer = both.tokenizer
    before = OPEN[call_format] or " \n"
    begun = tokenizer.encode("Yes. " * bool(OPEN[call_format]) + before, add_special_tokens=False)
    spaces = (i for i in range(tokenizer.num_vocab) if not tokenizer.token_bytes(i).strip())
    likes = ENDS if OPEN[call_format] else biased(tokenizer, b"{")
    bias = dict.fromkeys(spaces, -100.0) | dict(likes)
    fields = {
        "grammar": within_text(call_format, SMALL, is_parallel=False),
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 60,
        "logit_bias": tuple(bias.items()),
    }
    tokens, end = run(both, given=begun, **fields)
    ids = [*begun, *(token.token_id for token in tokens)]
    assert end[0] == "stop"
    text = "".join(token.text for token in tokens) + end[2]
    (arguments,) = calls_of(call_format, OPEN[call_format] + text.strip())
    assert is_valid(arguments, SMALL)
    for num_given in range(len(begun), len(ids) + 1):
        expected = tokens[num_given - len(begun) :], end
        assert run(both, given=ids[:num_given], **fields) == expected, num_given
        assert run_split(prefill, decode, given=ids[:num_given], **fields) == expected, num_given
