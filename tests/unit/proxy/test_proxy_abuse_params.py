"""What reaches the proxy inside a body and means harm: B10 to B21 of the abuse matrix.

Each is refused by the reader, before any worker hears of it, unless a test says otherwise.
"""

import json

import msgspec
import pytest
from request_bodies import MESSAGES, chat, completion, read_chat_body, read_completion_body

from neuron_di.errors import BadRequest, NeuronDiError, TooLarge
from neuron_di.wire.sampling_rules import GRAMMAR_CHARS_MAX
from neuron_di_proxy import field_rules
from neuron_di_proxy.json_object import FIELDS_MAX, read_body
from neuron_di_proxy.request_fields import REFUSALS

BOTH = pytest.mark.parametrize("read", [completion, chat])
DEEP = 100_000


def body_with(member: bytes) -> bytes:
    return b'{"model": "tiny", "prompt": "hi", %b}' % member


def refusal_of(body: bytes) -> NeuronDiError:
    with pytest.raises(BadRequest) as error:
        read_completion_body(body)
    return error.value


@pytest.mark.parametrize("name", [b"prompt", b"stop", b"logit_bias", b"metadata", b"nobody_knows"])
@pytest.mark.parametrize(("opens", "closes"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_b10_deep_nesting(name, opens, closes):
    deep = opens * DEEP + b"1" + closes * DEEP
    refusal_of(b'{"model": "tiny", "%b": %b}' % (name, deep))
    refusal_of(b'{"model": "tiny", "%b": %b' % (name, opens * DEEP))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model": "a", "prompt": "x", "model": "b"}', "model"),
        (b'{"model": "a", "prompt": "x", "prompt": "x"}', "prompt"),
        (b'{"model": "a", "n": 1, "prompt": "x", "\\u006e": 8}', "n"),
        (b'{"model": "a", "prompt": "x", "user": null, "user": "u"}', "user"),
        (b'{"model": "a", "prompt": "x", "logit_bias": {"5": 1, "5": -100}}', "logit_bias"),
        (
            body_with(b'"stream_options": {"include_usage": true, "include_usage": false}'),
            "stream_options",
        ),
        (
            body_with(
                b'"response_format": {"type": "json_schema", "json_schema": {"a": 1, "a": 2}}'
            ),
            "response_format",
        ),
    ],
)
def test_b10_duplicate_keys(body, param):
    error = refusal_of(body)
    assert error.param == param
    assert "twice" in error.message


@BOTH
def test_b10_duplicate_keys_of_a_schema_in_a_text(read):
    for text in ('{"a": 1, "a": 2}', '{"p": [{"a": 1, "\\u0061": 2}]}'):
        with pytest.raises(BadRequest, match="twice") as error:
            read(structured_outputs={"json": text})
        assert error.value.param == "structured_outputs.json"


def test_b10_a_duplicate_key_is_repeated_only_so_far():
    name = b"x" * (1 << 20)
    error = refusal_of(b'{"%b": 1, "%b": 2}' % (name, name))
    assert (len(error.param), "twice" in error.message) == (64, True)
    assert len(error.message) < 100


def test_b10_duplicate_keys_of_a_chat():
    for body in (
        b'{"model": "a", "messages": [{}], "messages": [{}]}',
        b'{"model": "a", "messages": [{}], "chat_template_kwargs": {"a": 1, "a": 2}}',
    ):
        with pytest.raises(BadRequest, match="twice"):
            read_chat_body(body)


def test_b10_the_same_text_as_key_and_in_values_is_no_duplicate():
    assert completion(prompt='"n": 1, "n": 2', metadata={"n": "n", "prompt": "p"}).n == 1


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"nan", b"1e400", b"-1e400"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "max_tokens", "seed"])
def test_b10_numbers_that_are_none(field, number):
    refusal_of(body_with(b'"%b": %b' % (field.encode(), number)))


@pytest.mark.parametrize("field", ["max_tokens", "seed", "n", "top_k", "temperature", "logprobs"])
def test_b10_a_number_of_four_hundred_digits(field):
    assert refusal_of(body_with(b'"%b": 1%b' % (field.encode(), b"0" * 400))).param == field


def test_b10_a_hundred_thousand_fields_are_not_read_to_the_end():
    many = b",".join(b'"f%d":1' % number for number in range(100_000))
    assert str(FIELDS_MAX) in refusal_of(body_with(many)).message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"null",
        b'"text"',
        b'{"model": "tiny", "prompt": "hi"} trailing',
        b"{'model': 'tiny'}",
        b'{"model": "tiny", "prompt": "hi",}',
        b'{"model": "tiny", "prompt": "hi"}{"model": "tiny", "prompt": "hi"}',
        b"\xef\xbb\xbf{}",
        b"\x00" * 64,
        b'{"model": "tiny", "prompt": 01}',
    ],
)
def test_b10_what_is_no_object_of_json(body):
    refusal_of(body)


@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b"\xc0\xaf",  # an overlong slash
        b"\xed\xa0\x80",  # a surrogate as if it were a character
        b"\xf4\x90\x80\x80",  # beyond Unicode
        b"abc\xe2\x82",  # cut
        b"\\ud800",
        b"\\udfff text",
        b"\\ud800\\ud800",
        b"\x00",
        b"\n",
        b"\\x41",
    ],
)
def test_b11_text_that_is_no_text(text):
    refusal_of(b'{"model": "tiny", "prompt": "%b"}' % text)
    refusal_of(b'{"model": "tiny", "prompt": ["a", "%b"]}' % text)
    refusal_of(b'{"model": "%b", "prompt": "hi"}' % text)
    refusal_of(b'{"model": "tiny", "prompt": "hi", "stop": "%b"}' % text)
    refusal_of(b'{"model": "tiny", "prompt": "hi", "%b": 1}' % text)
    with pytest.raises(BadRequest):
        read_chat_body(b'{"model": "tiny", "messages": [{"content": "%b"}]}' % text)


@pytest.mark.parametrize(
    "text", [rb"\ud800", rb"a\uDC00b", rb"\udbff x", rb"\ud83d\ude00\ud83d", rb"\ud800\ud800"]
)
def test_b11_half_a_character_is_told_as_what_it_is(text):
    with pytest.raises(BadRequest, match="holds half of a character"):
        read_body(b'{"prompt": "%b"}' % text)
    assert "prompt" in read_body(rb'{"prompt": "\ud83d\ude00"}')
    with pytest.raises(BadRequest, match="truncated"):
        read_body(rb'{"prompt": "\ud83d\ude00"')


def test_b11_an_escaped_nul_is_a_character_as_json_has_it():
    assert bytes(completion(prompt="a\x00b").prompts[0]) == b'"a\\u0000b"'


@BOTH
@pytest.mark.parametrize("count", [-1, 1.5, "x", True, [], {}, 10**30])
def test_b12_max_tokens(read, count):
    with pytest.raises(BadRequest) as error:
        read(max_tokens=count)
    assert error.value.param == "max_tokens"


@BOTH
def test_b12_a_billion_tokens_are_for_the_context_to_refuse(read):
    assert read(max_tokens=10**9).sampling.max_tokens == 10**9
    assert read(max_tokens=None).sampling.max_tokens in (16, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 16_384}, "n"),
        ({"best_of": 16_384}, "best_of"),
        ({"n": 16_384, "best_of": 16_384}, "n"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
        ({"stop": ["x"] * 10**5}, "stop"),
        ({"stop": "x" * 10**5}, "stop"),
        ({"stop_token_ids": [1] * 10**5}, "stop_token_ids"),
        ({"bad_words": ["x"] * 10**5}, "bad_words"),
        ({"logit_bias": {str(number): 1 for number in range(10**4)}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": -100.5}}, "logit_bias"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"01": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "2"}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {"1": None}}, "logit_bias"),
        ({"logit_bias": [[1, 2]]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1000]}, "allowed_token_ids"),
        ({"prompt": ["x"] * 10**5}, "prompt"),
        ({"prompt": [[1]] * 10**5}, "prompt"),
    ],
)
def test_b13_too_much_of_everything(fields, param):
    with pytest.raises(BadRequest) as error:
        completion(**fields)
    assert error.value.param == param


def test_b13_a_chats_top_logprobs():
    with pytest.raises(BadRequest) as error:
        chat(logprobs=True, top_logprobs=10**6)
    assert error.value.param == "top_logprobs"


@BOTH
@pytest.mark.parametrize("field", ["user", "metadata", "stop", "logit_bias"])
def test_b13_a_megabyte_beside_the_prompt(read, field):
    value = {"metadata": {"a": "x" * 2**20}, "logit_bias": {"1": 1, "x" * 2**20: 1}}
    with pytest.raises(TooLarge) as error:
        read(**{field: value.get(field, "x" * 2**20)})
    assert error.value.param == field


@BOTH
def test_b13_a_schema_that_is_too_long_is_not_taken_apart(read, monkeypatch):
    monkeypatch.setattr(field_rules, "read_members", None)
    schema = {"enum": ["\u20ac" * GRAMMAR_CHARS_MAX]}
    by_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for fields in (
        {"response_format": by_format},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema, ensure_ascii=False)}},
    ):
        with pytest.raises(BadRequest, match=f"longer than {GRAMMAR_CHARS_MAX}") as error:
            read(**fields)
        assert error.value.param.startswith(next(iter(fields)))


def test_b14_prompts_that_cannot_be():
    for prompt in ([], [[]], [None], ["a", 1], [[1], []], {}, 7, [1] * 512, [[1] * 512]):
        with pytest.raises(BadRequest) as error:
            completion(prompt=prompt)
        assert error.value.param == "prompt"


def test_b15_token_ids():
    """A first id that is none is seen here; all others are for the worker, which reads them."""
    for prompt in ([-1], [-1, 2], [None, 1], [[-1]], [["1"]]):
        with pytest.raises(BadRequest) as error:
            completion(prompt=prompt)
        assert error.value.param == "prompt"
    assert bytes(completion(prompt=[2, -1]).prompts[0]) == b"[2, -1]"


@BOTH
@pytest.mark.parametrize(
    "name",
    [
        "kv_transfer_params",
        "ec_transfer_params",
        "disaggregated_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "prefill_host_port",
        "nvext",
    ],
)
def test_b16_fields_between_workers_are_never_taken(read, name):
    for value in ({}, {"remote_host": "169.254.169.254"}, "10.0.0.1:1", 0, False, []):
        with pytest.raises(BadRequest, match="never taken from a client") as error:
            read(**{name: value})
        assert error.value.param == name


@BOTH
@pytest.mark.parametrize("name", ["request_id", "rid"])
def test_b18_an_id_is_never_taken_from_a_body(read, name):
    with pytest.raises(BadRequest, match="X-Request-Id") as error:
        read(**{name: "other"})
    assert error.value.param == name


@BOTH
@pytest.mark.parametrize("salt", ["other tenant", "", 1, {}, []])
def test_b19_a_cache_salt_is_never_taken(read, salt):
    with pytest.raises(BadRequest, match="derived by the server") as error:
        read(cache_salt=salt)
    assert error.value.param == "cache_salt"


@BOTH
@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_b20_every_refused_field_is_named(read, name):
    for value in ("x", {}, [], 0, False):
        with pytest.raises(BadRequest) as error:
            read(**{name: value})
        assert error.value.param == name
        assert name in error.value.message
    assert read(**{name: None}).n == 1


@BOTH
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("priority", 1),
        ("priority", -1),
        ("spaces_between_special_tokens", False),
    ],
)
def test_b20_values_that_would_change_an_answer_are_refused(read, name, value):
    with pytest.raises(BadRequest) as error:
        read(**{name: value})
    assert error.value.param == name


@BOTH
def test_b20_formats_that_run_a_foreign_engine(read):
    for wanted in (
        {"whitespace_pattern": "(a+)+$"},
        {"grammar": "root ::= root"},
        {"structural_tag": "{}"},
    ):
        with pytest.raises(BadRequest) as error:
            read(structured_outputs=wanted)
        assert error.value.param == f"structured_outputs.{next(iter(wanted))}"


@pytest.mark.parametrize("read", [read_completion_body, read_chat_body])
def test_b21_an_error_does_not_repeat_what_a_client_wrote(read):
    canary = "canary\n\ndata: [DONE]"
    bodies = [
        {"model": "m", "prompt": {canary: 1}, "messages": canary},
        {"model": "m", "service_tier": [canary], "prompt": [canary, [canary]]},
        {"model": "m", "response_format": {"type": canary}},
        {"model": "m", "stop": [1, canary], "priority": canary, "stream": canary},
        {"model": "m", "tool_choice": canary, "modalities": [canary]},
        {"model": "m", "logit_bias": {canary: 1}, "metadata": {canary: 1}},
        {"model": "m", "structured_outputs": {"json": canary}},
    ]
    for fields in bodies:
        name = "prompt" if read is read_completion_body else "messages"
        body = {name: "hi" if name == "prompt" else MESSAGES} | fields
        body.pop("messages" if name == "prompt" else "prompt", None)
        for each in (json.dumps(body).encode(), json.dumps(body).encode()[:-1]):
            with pytest.raises(BadRequest) as error:
                read(each)
            assert "canary" not in error.value.message
            assert "canary" not in (error.value.param or "")


def test_b21_an_unknown_fields_name_is_cut_and_stays_one_json_string():
    name = "x" * 5000 + "\n\ndata: [DONE]"
    with pytest.raises(BadRequest) as error:
        completion(**{name: 1})
    assert len(error.value.param) == 64
    with pytest.raises(BadRequest) as error:
        completion(**{"a\n\nb": 1})
    assert b"\n" not in msgspec.json.encode(error.value.message)
