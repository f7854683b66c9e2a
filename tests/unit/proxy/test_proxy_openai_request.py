import json
import tracemalloc

import pytest
from request_bodies import MESSAGES, TRAITS, chat, completion, read_chat_body, read_completion_body

from neuron_di.errors import BadRequest
from neuron_di.wire import PromptOptions
from neuron_di_proxy.chat_request import read_chat
from neuron_di_proxy.completion_request import read_completion
from neuron_di_proxy.failure import error_body, failure_of
from neuron_di_proxy.json_object import read_body
from neuron_di_proxy.model_traits import ModelTraits

BOTH = pytest.mark.parametrize("read", [completion, chat])


def test_the_defaults_are_openais():
    sampling = completion().sampling
    assert (sampling.max_tokens, chat().sampling.max_tokens) == (16, None)
    assert (sampling.temperature, sampling.top_p, sampling.logprobs) == (1.0, 1.0, None)
    assert sampling.grammar is None
    assert not completion().stream
    assert chat().options.add_generation_prompt


@BOTH
def test_every_sampling_field_arrives(read):
    fields = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 11,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.5,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logit_bias": {"17": -100, "3": 2.5},
        "allowed_token_ids": [3, 17, 4],
        "bad_words": ["x", "y z"],
    }
    sampling = read(**fields).sampling
    expected = fields | {
        "stop": ("a", "b"),
        "stop_token_ids": (1, 2),
        "logit_bias": ((3, 2.5), (17, -100.0)),
        "allowed_token_ids": (3, 17, 4),
        "bad_words": ("x", "y z"),
    }
    assert {name: getattr(sampling, name) for name in fields} == expected


@BOTH
def test_fields_that_are_off_say_so_in_several_ways(read):
    assert read(top_k=-1).sampling.top_k == 0
    assert read(logit_bias={}).sampling.logit_bias == ()
    given = read(
        stop="end",
        spaces_between_special_tokens=True,
        use_beam_search=False,
        length_penalty=1,
        priority=0,
    )
    assert given.sampling.stop == ("end",)


def test_a_seed_is_drawn_once_for_both_legs_when_none_is_given():
    seeds = {completion().sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert completion(seed=None).sampling.seed >= 0
    assert completion(seed=-5).sampling.seed == -5


def test_null_means_the_default():
    nulls = dict.fromkeys(
        [
            "temperature",
            "top_p",
            "max_tokens",
            "stop",
            "n",
            "stream",
            "logprobs",
            "stream_options",
            "logit_bias",
            "kv_transfer_params",
            "response_format",
            "structured_outputs",
            "prompt_logprobs",
        ]
    )
    assert completion(**nulls, best_of=None, suffix=None, echo=None).sampling.max_tokens == 16
    given = chat(**nulls, tools=None, tool_choice=None, documents=None, chat_template_kwargs=None)
    assert given.sampling.temperature == 1.0
    assert given.options == PromptOptions()


def test_the_prompt_is_passed_on_byte_for_byte():
    raw = b'{"prompt": "caf\\u00e9 \\"x\\"" , "model":"tiny"}'
    assert [bytes(each) for each in read_completion_body(raw).prompts] == [b'"caf\\u00e9 \\"x\\""']
    assert [bytes(each) for each in completion(prompt=[1, 2, 3]).prompts] == [b"[1, 2, 3]"]
    assert [json.loads(bytes(each)) for each in chat().prompts] == [MESSAGES]


@pytest.mark.parametrize(
    ("fields", "expected", "name"),
    [
        ({}, None, "max_tokens"),
        ({"max_tokens": 3}, 3, "max_tokens"),
        ({"max_completion_tokens": 4}, 4, "max_completion_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 4}, 4, "max_completion_tokens"),
    ],
)
def test_a_chats_limit_has_two_names(fields, expected, name):
    sampling = chat(**fields).sampling
    assert (sampling.max_tokens, sampling.max_tokens_param) == (expected, name)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
        ({"top_logprobs": 0}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
def test_a_chats_logprobs(fields, expected):
    assert chat(**fields).sampling.logprobs == expected


@BOTH
def test_fields_about_the_clients_account_are_taken(read):
    account = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
        "session_id": "s",
    }
    given = read(**account, response_format={"type": "text"}, n=1, seed=1)
    assert given == read(seed=1), "they change nothing"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", []),
        ("function_call", "auto"),
        ("response_format.type", {"type": "xml"}),
        ("response_format.type", {}),
        ("response_format.json_schema", {"type": "json_schema"}),
        ("n", 9),
        ("n", -1),
        ("n", True),
        ("n", 1.5),
        ("modalities[0]", ["audio"]),
        ("audio", {}),
        ("prediction", {}),
        ("reasoning_effort", 1),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("top_logprobs", 2),
        ("temperature", "warm"),
        ("temperature", 3),
        ("top_p", 0),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_completion_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 10**30),
        ("seed", 1 << 63),
        ("stop", 5),
        ("stop[1]", ["a", 1]),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1000]),
        ("presence_penalty", 2.5),
        ("stream", "yes"),
        ("messages", []),
        ("messages", "hi"),
        ("messages", None),
        ("messages", [1]),
        ("documents", {}),
        ("documents", [1]),
        ("chat_template_kwargs", []),
        ("chat_template", "x"),
        ("echo", True),
        ("prompt", "hi"),
        ("model", 3),
        ("model", None),
        ("model", ""),
    ],
)
def test_what_a_chat_does_not_support_is_refused_by_name(field, value):
    name = field.partition(".")[0].partition("[")[0]
    with pytest.raises(BadRequest) as error:
        chat(**{name: value})
    assert error.value.param == field
    assert name in error.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reasoning_effort", "low"),
        ("suffix", "x"),
        ("suffix", ""),
        ("best_of", 2),
        ("best_of", 0),
        ("n", 0),
        ("n", 9),
        ("logprobs", True),
        ("logprobs", 21),
        ("logprobs", -1),
        ("max_tokens", 0),
        ("messages", MESSAGES),
        ("max_completion_tokens", 3),
        ("tools", []),
        ("top_logprobs", 1),
        ("prompt", ""),
        ("prompt", [""]),
        ("prompt", ["a", ""]),
        ("prompt", []),
        ("prompt", [None]),
        ("prompt", [True]),
        ("prompt", [{}]),
        ("prompt", [[]]),
        ("prompt", [["a"]]),
        ("prompt", [[[1]]]),
        ("prompt", ["a", [1]]),
        ("prompt", [[1], "a"]),
        ("prompt", ["a", 1]),
        ("prompt", ["a", None]),
        ("prompt", ["a"] * 9),
        ("prompt", 5),
        ("prompt", None),
        ("prompt", {}),
        ("prompt", True),
        ("prompt_embeds", ""),
    ],
)
def test_what_a_completion_does_not_support_is_refused_by_name(field, value):
    with pytest.raises(BadRequest) as error:
        completion(**{field: value})
    assert error.value.param == field
    assert field in error.value.message


def test_a_field_that_the_client_names_is_named_to_it_in_a_plain_string():
    for body in (b'{"mine": 1}', b'{"n": 1, "n": 1}', b'{"suffix": "x"}'):
        with pytest.raises(BadRequest) as error:
            read_completion_body(body)
        assert type(error.value.param) is str
        document = json.loads(error_body(failure_of(error.value)))
        assert document["error"]["param"] == error.value.param
    fields = read_body(b'{"n": 1, "m": {}}')
    assert {type(name) for name in fields} == {str}


@BOTH
def test_up_to_eight_choices(read):
    assert [read(n=n).num_choices for n in (None, 1, 8)] == [1, 1, 8]


def test_best_of_may_only_equal_n():
    assert completion(n=3, best_of=3).n == 3
    assert completion(n=3, best_of=None).n == 3
    for best_of in (1, 2, 4):
        with pytest.raises(BadRequest) as error:
            completion(n=3, best_of=best_of)
        assert error.value.param == "best_of"


@pytest.mark.parametrize(
    ("prompt", "items"),
    [
        (["a", "b"], [b'"a"', b'"b"']),
        (["a"], [b'"a"']),
        ([[1, 2], [3]], [b"[1, 2]", b"[3]"]),
        ([[1]], [b"[1]"]),
    ],
)
def test_a_list_of_prompts_is_several_prompts(prompt, items):
    given = completion(prompt=prompt, n=2)
    assert [bytes(each) for each in given.prompts] == items
    assert given.num_choices == 2 * len(items)


def test_a_choice_has_its_prompt_and_its_seed():
    given = completion(prompt=["a", "b"], n=3, seed=-2, temperature=0.5)
    choices = [given.choice(index) for index in range(6)]
    assert [bytes(each.prompt) for each in choices] == [b'"a"'] * 3 + [b'"b"'] * 3
    assert [each.sampling.seed for each in choices] == [-2, -1, 0] * 2
    alone = [completion(prompt="b", seed=seed, temperature=0.5).choice(0) for seed in (-2, -1, 0)]
    assert [each.sampling for each in choices[3:]] == [each.sampling for each in alone]


def test_prompts_count_as_choices():
    assert completion(prompt=["a"] * 4, n=2).num_choices == 8
    with pytest.raises(BadRequest) as error:
        completion(prompt=["a"] * 3, n=3)
    assert error.value.param == "prompt"
    assert "3 prompts with `n` 3 make 9 choices" in error.value.message


def test_seeds_wrap_where_int64_ends():
    last = (1 << 63) - 1
    request = completion(n=3, seed=last - 1)
    seeds = [request.choice(index).sampling.seed for index in range(3)]
    assert seeds == [last - 1, last, -(1 << 63)]


def test_limits_that_differ_are_refused():
    with pytest.raises(BadRequest) as error:
        chat(max_tokens=1, max_completion_tokens=2)
    assert error.value.param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("read", "body", "missing"),
    [
        (read_completion_body, {"model": "tiny"}, "prompt"),
        (read_completion_body, {"prompt": "hi"}, "model"),
        (read_chat_body, {"model": "tiny"}, "messages"),
        (read_chat_body, {"messages": MESSAGES}, "model"),
    ],
)
def test_a_missing_field_is_named(read, body, missing):
    with pytest.raises(BadRequest) as error:
        read(json.dumps(body).encode())
    assert error.value.param == missing


def test_token_ids_beyond_every_context_reach_no_worker():
    longest = TRAITS.context_tokens - 1
    assert completion(prompt=[1] * longest).num_choices == 1
    for prompt in ([1] * (longest + 1), [[1], [1] * (longest + 1)]):
        with pytest.raises(BadRequest, match="length is 512 tokens: the prompt has 512,") as error:
            completion(prompt=prompt)
        assert error.value.param == "prompt"
    assert completion(prompt=[1] * 9999, truncate_prompt_tokens=5).options.keep_last_tokens == 5
    assert completion(ModelTraits(), prompt=[1] * 9999).num_choices == 1, "nobody said how many"


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (read_completion_body, {"prompt": list(range(100_000, 200_000))}),
        (read_completion_body, {"prompt": ['"one" two\n' * 50_000] * 2}),
        (read_chat_body, {"messages": [{"role": "user", "content": "hi"}] * 20_000}),
    ],
)
def test_a_long_prompt_is_not_parsed(read, body):
    """Its objects would take several times as much as its bytes, which are looked at as bytes."""
    data = json.dumps({"model": "tiny"} | body).encode()
    read(data, ModelTraits())
    tracemalloc.start()
    try:
        given = read(data, ModelTraits())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert given.model == "tiny"
    assert peak_bytes < 1.2 * len(data) + 50_000


@pytest.mark.parametrize("read", [read_completion, read_chat])
def test_a_model_that_nobody_has_is_refused_as_the_fleet_says(read):
    class Unknown(Exception):
        pass

    asked = []

    def traits_of(model):
        asked.append(model)
        raise Unknown

    body = json.dumps(
        {"model": "m", "prompt": "hi"}
        if read is read_completion
        else {"model": "m", "messages": MESSAGES}
    ).encode()
    with pytest.raises(Unknown):
        read(body, choices_max=1, traits_of=traits_of)
    assert asked == ["m"]
