import json

import pytest

from neuron_di.errors import BadRequest
from neuron_di_proxy.openai_request import read_chat, read_completion

MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields):
    return read_completion(json.dumps({"model": "tiny", "prompt": "hi"} | fields).encode())


def chat(**fields):
    return read_chat(json.dumps({"model": "tiny", "messages": MESSAGES} | fields).encode())


def test_the_defaults_are_openais():
    sampling = completion().sampling
    assert sampling.max_tokens == 16
    assert chat().sampling.max_tokens is None
    assert (sampling.temperature, sampling.top_p, sampling.logprobs) == (1.0, 1.0, None)
    assert not completion().stream


def test_every_sampling_field_arrives():
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
        "logprobs": 3,
        "skip_special_tokens": False,
    }
    sampling = completion(**fields).sampling
    expected = fields | {"stop": ("a", "b"), "stop_token_ids": (1, 2)}
    assert {name: getattr(sampling, name) for name in fields} == expected


def test_a_seed_is_drawn_once_for_both_legs_when_none_is_given():
    seeds = {completion().sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert completion(seed=None).sampling.seed >= 0
    assert completion(seed=-5).sampling.seed == -5


def test_null_means_the_default():
    nulls = dict.fromkeys(
        ["temperature", "top_p", "max_tokens", "stop", "n", "stream", "logprobs", "stream_options"]
    )
    assert completion(**nulls, best_of=None, suffix=None, echo=None).sampling.max_tokens == 16
    assert chat(**nulls, tools=None, response_format=None).sampling.temperature == 1.0


def test_the_prompt_is_passed_on_byte_for_byte():
    raw = b'{"prompt": "caf\\u00e9 \\"x\\"" , "model":"tiny"}'
    assert bytes(read_completion(raw).prompt) == b'"caf\\u00e9 \\"x\\""'
    assert bytes(completion(prompt=[1, 2, 3]).prompt) == b"[1, 2, 3]"
    assert json.loads(bytes(chat().prompt)) == MESSAGES


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 4, "max_completion_tokens": 4}, 4),
    ],
)
def test_a_chats_limit_has_two_names(fields, expected):
    assert chat(**fields).sampling.max_tokens == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
    ],
)
def test_a_chats_logprobs(fields, expected):
    assert chat(**fields).sampling.logprobs == expected


def test_fields_about_the_clients_account_are_taken():
    account = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    assert chat(**account, response_format={"type": "text"}, n=1).model == "tiny"
    assert completion(**account, best_of=1, echo=False).model == "tiny"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("parallel_tool_calls", True),
        ("functions", []),
        ("function_call", "auto"),
        ("response_format.type", {"type": "json_object"}),
        ("logit_bias", {"1": 2}),
        ("n", 9),
        ("n", -1),
        ("n", True),
        ("n", 1.5),
        ("modalities", ["text"]),
        ("audio", {}),
        ("prediction", {}),
        ("reasoning_effort", "low"),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("kv_transfer_params", {}),
        ("guided_json", {}),
        ("top_logprobs", 2),
        ("stream_options", {"include_usage": True}),
        ("temperature", "warm"),
        ("temperature", 3),
        ("top_p", 0),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 10**30),
        ("seed", 1 << 63),
        ("stop", 5),
        ("stop[1]", ["a", 1]),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("presence_penalty", 2.5),
        ("stream", "yes"),
        ("messages", []),
        ("messages", "hi"),
        ("messages", None),
        ("messages", [1]),
        ("model", 3),
        ("model", None),
    ],
)
def test_what_a_chat_does_not_support_is_refused_by_name(field, value):
    with pytest.raises(BadRequest) as error:
        chat(**{field.partition(".")[0].partition("[")[0]: value})
    assert error.value.param == field
    assert field.partition(".")[0].partition("[")[0] in error.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("echo", True),
        ("best_of", 2),
        ("best_of", 0),
        ("n", 0),
        ("n", 9),
        ("logprobs", True),
        ("logprobs", 21),
        ("messages", MESSAGES),
        ("max_completion_tokens", 3),
        ("prompt", ["a", "b"]),
        ("prompt", [[1], [2]]),
        ("prompt", []),
        ("prompt", [None]),
        ("prompt", 5),
        ("prompt", None),
        ("prompt", {}),
        ("prompt_embeds", ""),
    ],
)
def test_what_a_completion_does_not_support_is_refused_by_name(field, value):
    with pytest.raises(BadRequest) as error:
        completion(**{field: value})
    assert error.value.param == field
    assert field in error.value.message


@pytest.mark.parametrize("read", [completion, chat])
def test_up_to_eight_choices(read):
    assert [read(n=n).n for n in (None, 1, 8)] == [1, 1, 8]


def test_best_of_may_only_equal_n():
    assert completion(n=3, best_of=3).n == 3
    assert completion(n=3, best_of=None).n == 3
    for best_of in (1, 2, 4):
        with pytest.raises(BadRequest) as error:
            completion(n=3, best_of=best_of)
        assert error.value.param == "best_of"


def test_every_choice_has_a_seed_of_its_own_and_nothing_else():
    request = completion(n=3, seed=-2, temperature=0.5)
    assert request.choice(0) == request
    choices = [request.choice(index) for index in range(3)]
    assert [choice.sampling.seed for choice in choices] == [-2, -1, 0]
    assert [completion(n=3, seed=seed, temperature=0.5) for seed in (-2, -1, 0)] == choices


def test_seeds_wrap_where_int64_ends():
    last = (1 << 63) - 1
    request = completion(n=3, seed=last - 1)
    seeds = [request.choice(index).sampling.seed for index in range(3)]
    assert seeds == [last - 1, last, -(1 << 63)]


def test_limits_that_differ_are_refused():
    with pytest.raises(BadRequest) as error:
        chat(max_tokens=1, max_completion_tokens=2)
    assert error.value.param == "max_completion_tokens"


def test_unknown_stream_options_are_refused_by_name():
    with pytest.raises(BadRequest) as error:
        chat(stream=True, stream_options={"include_obfuscation": True})
    assert error.value.param == "stream_options.include_obfuscation"


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_field_is_named(missing):
    fields = {"model": "tiny", "messages": MESSAGES}
    del fields[missing]
    with pytest.raises(BadRequest) as error:
        read_chat(json.dumps(fields).encode())
    assert error.value.param == missing


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"null",
        b'{"model": "tiny", "prompt": "hi"} trailing',
        b'{"model": "tiny", "prompt": "hi", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "hi", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "hi", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "\xff", "prompt": "hi"}',
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
)
def test_a_body_that_cannot_be_read_is_a_bad_request(body):
    with pytest.raises(BadRequest):
        read_completion(body)
