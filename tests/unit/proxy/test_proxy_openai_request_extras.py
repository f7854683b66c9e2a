"""Fields of requests that say more than how to sample: streams, reports, templates, formats."""

import json

import msgspec
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from request_bodies import TRAITS, chat, completion

from neuron_di.errors import BadRequest
from neuron_di.wire import Grammar, PromptOptions
from neuron_di.wire.legs import JSON_NULL
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.request_fields import (
    FIELDS_OF_ANY,
    REFUSALS,
    UNREAD_FIELDS,
    ChatFields,
    CompletionFields,
)

BOTH = pytest.mark.parametrize("read", [completion, chat])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
THINKING = ModelTraits(reasoning=("<think>", "</think>"))


def refused(read, **fields):
    with pytest.raises(BadRequest) as error:
        read(**fields)
    return error.value.param


# Streams.


@BOTH
def test_usage_in_a_stream(read):
    given = read(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert (given.stream, given.include_usage, given.continuous_usage) == (True, True, False)
    options = {"include_usage": True, "continuous_usage_stats": True}
    given = read(stream=True, stream_options=options)
    assert (given.include_usage, given.continuous_usage) == (True, True)
    assert not read(stream=True, stream_options={}).include_usage


@BOTH
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ({"continuous_usage_stats": True}, "stream_options.continuous_usage_stats"),
        ({"include_usage": "yes"}, "stream_options.include_usage"),
        ({"more": 1}, "stream_options.more"),
        ([], "stream_options"),
    ],
)
def test_stream_options_that_cannot_be_are_refused(read, options, param):
    assert refused(read, stream=True, stream_options=options) == param


@BOTH
def test_stream_options_need_a_stream(read):
    assert refused(read, stream_options={"include_usage": True}) == "stream_options"


# What OpenAI's client knows.


@pytest.mark.parametrize(
    ("params", "kind"),
    [(chat_params, ChatFields), (completion_params, CompletionFields)],
    ids=["chat", "completions"],
)
def test_every_parameter_of_openais_client_is_taken_or_refused_by_name(params, kind):
    endpoint = "chat" if kind is ChatFields else "completions"
    known = {*kind.__struct_fields__, *UNREAD_FIELDS[endpoint], *REFUSALS}
    assert set(params.CompletionCreateParamsBase.__annotations__) <= known


@BOTH
@pytest.mark.parametrize("kind", ["text", "json_object"])
def test_a_format_without_a_schema_may_say_so(read, kind):
    """As a client's model of all formats does."""
    said = read(response_format={"type": kind, "json_schema": None}, seed=1)
    assert said == read(response_format={"type": kind}, seed=1)
    schema = {"name": "n", "schema": SCHEMA}
    wrong = {"type": kind, "json_schema": schema}
    assert refused(read, response_format=wrong) == "response_format.json_schema"


@pytest.mark.parametrize("read", [completion, chat])
def test_null_is_taken_of_any_field_that_is_known_somewhere(read):
    own = "prompt" if read is completion else "messages"
    nulls = dict.fromkeys(FIELDS_OF_ANY - {"model", "seed", own})
    assert read(**nulls, seed=1) == read(seed=1)
    assert refused(read, frobnicate=None) == "frobnicate"


def test_a_chat_may_say_that_it_has_no_echo():
    assert chat(echo=False, seed=1) == chat(seed=1)


# What is reported of a prompt.


@pytest.mark.parametrize(
    ("fields", "report", "logprobs"),
    [
        ({}, False, None),
        ({"logprobs": 2}, False, None),
        ({"echo": True}, True, None),
        ({"echo": True, "logprobs": 2}, True, 2),
        ({"prompt_logprobs": 0}, True, 0),
        ({"prompt_logprobs": 3, "logprobs": 1}, True, 3),
        ({"prompt_logprobs": 3, "logprobs": 3, "echo": True}, True, 3),
        ({"return_token_ids": True}, True, None),
    ],
)
def test_a_completions_prompt_is_reported_where_it_is_asked_for(fields, report, logprobs):
    options = completion(**fields).options
    assert (options.report, options.logprobs) == (report, logprobs)


@pytest.mark.parametrize(
    ("fields", "report", "logprobs"),
    [
        ({"logprobs": True, "top_logprobs": 2}, False, None),
        ({"prompt_logprobs": 3}, True, 3),
        ({"return_token_ids": True}, True, None),
    ],
)
def test_a_chats_prompt_is_reported_where_it_is_asked_for(fields, report, logprobs):
    options = chat(**fields).options
    assert (options.report, options.logprobs) == (report, logprobs)


def test_two_numbers_of_prompt_logprobs_are_refused():
    assert refused(completion, echo=True, logprobs=1, prompt_logprobs=2) == "prompt_logprobs"


@BOTH
@pytest.mark.parametrize(
    "fields", [{"stream": True}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}]
)
def test_prompt_logprobs_have_limits(read, fields):
    assert refused(read, **({"prompt_logprobs": 1} | fields)) == "prompt_logprobs"


def test_only_an_echo_may_be_of_nothing_but_the_prompt():
    given = completion(echo=True, max_tokens=0)
    assert (given.echo, given.drop_output, given.sampling.max_tokens) == (True, True, 1)
    given = completion(echo=True)
    assert (given.echo, given.drop_output, given.sampling.max_tokens) == (True, False, 16)
    assert refused(completion, max_tokens=0) == "max_tokens"
    assert refused(completion, max_tokens=0, echo=True, min_tokens=1) == "min_tokens"


@BOTH
def test_tokens_may_be_shown_by_id(read):
    given = read(return_token_ids=True, return_tokens_as_token_ids=True)
    assert given.return_token_ids
    assert given.tokens_as_ids


# How a prompt becomes tokens.


def test_how_much_to_reason_is_passed_on_to_the_template():
    assert chat(reasoning_effort="low").options.reasoning_effort == "low"
    assert chat(reasoning_effort=None).options == chat().options


def test_tools_that_may_not_be_called_are_still_told_of():
    tools = [{"type": "function", "function": {"name": "f"}}]
    for choice, hides in (("none", True), ("required", False)):
        given = chat(tools=tools, tool_choice=choice)
        assert json.loads(bytes(given.options.tools)) == tools
        assert given.options.hides_tools is hides
    assert chat().options == chat(tools=None, tool_choice="none").options
    assert not chat().options.hides_tools


def test_options_of_a_chats_prompt_arrive():
    options = chat(
        add_generation_prompt=False,
        add_special_tokens=True,
        truncate_prompt_tokens=9,
        documents=[{"text": "d"}],
        chat_template_kwargs={"a": 1},
    ).options
    assert json.loads(bytes(options.documents)) == [{"text": "d"}]
    assert json.loads(bytes(options.template_kwargs)) == {"a": 1}
    rest = msgspec.structs.replace(options, documents=JSON_NULL, template_kwargs=JSON_NULL)
    assert rest == PromptOptions(
        add_generation_prompt=False, add_special_tokens=True, keep_last_tokens=9
    )


def test_a_message_that_is_continued_gets_no_generation_prompt():
    for fields in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None}):
        options = chat(continue_final_message=True, **fields).options
        assert (options.continue_final_message, options.add_generation_prompt) == (True, False)
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(chat, **both) == "continue_final_message"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"max_tokens": 12}, 500),
        ({"max_tokens": 600}, 1),
        ({"max_tokens": None}, TRAITS.context_tokens - 1),
    ],
)
def test_a_prompt_can_be_cut_to_what_the_context_holds(fields, kept):
    assert chat(truncate_prompt_tokens=-1, **fields).options.keep_last_tokens == kept


@BOTH
@pytest.mark.parametrize("count", [0, -2, "5", 1.5])
def test_a_prompt_cannot_be_cut_to_nothing(read, count):
    assert refused(read, truncate_prompt_tokens=count) == "truncate_prompt_tokens"


# What an answer must be.


@BOTH
def test_formats_become_grammars(read):
    named = {"name": "n", "schema": SCHEMA, "strict": True, "description": "d"}
    kinds = [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar(kind="json_object")),
        (
            {"type": "json_schema", "json_schema": named},
            Grammar(kind="json_schema", value=json.dumps(SCHEMA)),
        ),
    ]
    for response_format, grammar in kinds:
        assert read(response_format=response_format).sampling.grammar == grammar


@BOTH
@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        ({"json": SCHEMA}, Grammar(kind="json_schema", value=json.dumps(SCHEMA))),
        ({"json": json.dumps(SCHEMA)}, Grammar(kind="json_schema", value=json.dumps(SCHEMA))),
        ({"json_object": True}, Grammar(kind="json_object")),
        ({"choice": ["yes", "no"]}, Grammar(kind="choice", value='["yes","no"]')),
        ({"regex": "a+/b"}, Grammar(kind="regex", value="a+/b")),
    ],
)
def test_vllms_structured_outputs_become_grammars(read, wanted, grammar):
    grammar = msgspec.structs.replace(grammar, param="structured_outputs")
    assert read(structured_outputs=wanted).sampling.grammar == grammar


@BOTH
@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({}, ""),
        ({"json_object": False}, ""),
        ({"json_object": True, "choice": ["a"]}, ""),
        ({"regex": ""}, ".regex"),
        ({"regex": ["a"]}, ".regex"),
        ({"regex": "a", "choice": ["a"]}, ""),
        ({"grammar": "x"}, ".grammar"),
        ({"structural_tag": "x"}, ".structural_tag"),
        ({"whitespace_pattern": "x"}, ".whitespace_pattern"),
        ({"disable_any_whitespace": True}, ".disable_any_whitespace"),
        ({"json": []}, ".json"),
        ({"json": "nothing"}, ".json"),
        ({"choice": []}, ".choice"),
        ({"choice": ["a", ""]}, ".choice"),
        ({"choice": [1]}, ".choice[0]"),
    ],
)
def test_structured_outputs_that_cannot_be_are_refused(read, wanted, param):
    assert refused(read, structured_outputs=wanted) == "structured_outputs" + param


@BOTH
@pytest.mark.parametrize(
    ("named", "param"),
    [
        ({"name": "a b", "schema": {}}, ".name"),
        ({"name": "", "schema": {}}, ".name"),
        ({"schema": {}}, ".name"),
        ({"name": "a"}, ".schema"),
        ({"name": "a", "schema": None}, ".schema"),
        ({"name": "a", "schema": [1]}, ".schema"),
        ({"name": "a", "schema": {}, "more": 1}, ".more"),
    ],
)
def test_a_named_schema_is_checked(read, named, param):
    given = {"type": "json_schema", "json_schema": named}
    assert refused(read, response_format=given) == "response_format.json_schema" + param


@BOTH
def test_what_a_name_must_match_is_said(read):
    named = {"name": "a b", "schema": SCHEMA}
    with pytest.raises(BadRequest, match=r"`.*name` must match \[A-Za-z0-9_-\]\{1,64\}$"):
        read(response_format={"type": "json_schema", "json_schema": named})


@BOTH
def test_only_one_field_says_what_an_answer_is(read):
    fields = {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}}
    assert refused(read, **fields) == "structured_outputs"
    fields["response_format"] = {"type": "text"}
    grammar = Grammar(kind="choice", value='["a"]', param="structured_outputs")
    assert read(**fields).sampling.grammar == grammar


def test_a_format_begins_after_the_models_reasoning():
    fields = {"response_format": {"type": "json_object"}}
    given = chat(THINKING, **fields)
    assert given.sampling.grammar == Grammar(kind="json_object", reasoning=THINKING.reasoning)
    for off in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
    ):
        given = chat(THINKING, **fields, **off)
        assert given.sampling.grammar == Grammar(kind="json_object")
    for on in (
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"continue_final_message": True},  # it may end in the midst of reasoning
    ):
        given = chat(THINKING, **fields, **on)
        assert given.sampling.grammar == Grammar(kind="json_object", reasoning=THINKING.reasoning)
    assert completion(THINKING, **fields).sampling.grammar == Grammar(kind="json_object")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "logprobs": 3}, "logprobs"),
        ({"prompt_logprobs": 3}, "prompt_logprobs"),
        ({"prompt_logprobs": 3, "logprobs": 3}, "prompt_logprobs"),
    ],
)
def test_a_worker_learns_which_field_asks_for_the_prompts_logprobs(fields, param):
    options = completion(**fields).options
    assert (options.logprobs, options.logprobs_param) == (3, param)
    assert chat(prompt_logprobs=3).options.logprobs_param == "prompt_logprobs"


@pytest.mark.parametrize("n", [1, 2])
def test_without_a_seed_no_two_answers_are_drawn_alike_be_their_prompts_equal(n):
    given = completion(prompt=["a"] * 4, n=n)
    seeds = [given.choice(index).sampling.seed for index in range(4 * n)]
    assert len(set(seeds)) == 4 * n
    assert seeds[0] == given.sampling.seed


ADVISED = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}


@BOTH
def test_what_a_request_leaves_open_is_the_models_choice(read):
    """And what it says is its own, also where that is what goes without saying elsewhere."""
    traits = ModelTraits(sampling_defaults=ADVISED)
    nulls = dict.fromkeys(ADVISED)
    for sampling in (read(traits).sampling, read(traits, **nulls).sampling):
        assert {name: getattr(sampling, name) for name in ADVISED} == ADVISED
        assert (sampling.presence_penalty, sampling.min_tokens) == (0.0, 0)
    own = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    for fields in (own, own | {"top_k": -1}):
        sampling = read(traits, **fields).sampling
        assert {name: getattr(sampling, name) for name in own} == own
    few = ModelTraits(sampling_defaults={"top_p": 0.5})
    sampling = read(few, temperature=0).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 0)
