"""What was read before is found again, and means what it would have meant if read anew."""

import json
import sys
from typing import Any

import pytest
from msgspec import structs
from request_bodies import CHOICES_MAX, MESSAGES, TRAITS

from neuron_di.errors import BadRequest
from neuron_di_proxy import json_object, request_reader
from neuron_di_proxy.chat_request import read_chat
from neuron_di_proxy.completion_request import read_completion
from neuron_di_proxy.json_object import members_of
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.request_reader import KNOWN_BYTES_MAX, KNOWN_MAX, RequestReader

pytestmark = pytest.mark.skipif(
    members_of(b"{}") is None, reason="the extension for bodies was not built: nothing is kept"
)

READ = {"completions": read_completion, "chat": read_chat}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {}),
    ("completions", {"stream": True, "stream_options": {"include_usage": True}}),
    ("completions", {"max_tokens": 7, "temperature": 0.5, "stop": ["x", "}"], "n": 3}),
    ("completions", {"echo": True, "logprobs": 2, "max_tokens": 0}),
    ("completions", {"logit_bias": {"3": 1.5}, "user": "prompt", "best_of": 1}),
    ("completions", {"response_format": {"type": "json_object"}}),
    ("chat", {}),
    ("chat", {"tools": TOOLS, "tool_choice": "required"}),
    ("chat", {"logprobs": True, "top_logprobs": 3, "max_completion_tokens": 9}),
    ("chat", {"chat_template_kwargs": {"messages": [{}]}, "metadata": {"a": "b"}}),
]


class Fleet:
    """What is known of every model."""

    def __init__(self, traits: ModelTraits = TRAITS) -> None:
        self.traits = traits
        self.reader = RequestReader(CHOICES_MAX, lambda _: self.traits)

    def read(self, endpoint: Any, body: bytes) -> Any:
        return self.reader.read(endpoint, body)


@pytest.fixture
def num_reads(monkeypatch):
    """How many bodies of each endpoint were taken apart."""
    counts = {"completions": 0, "chat": 0}

    def counting(endpoint, route):
        def read(body, **about):
            counts[endpoint] += 1
            return READ[endpoint](body, **about)

        return route._replace(read=read)

    routes = {name: counting(name, route) for name, route in request_reader._ROUTES.items()}
    monkeypatch.setattr(request_reader, "_ROUTES", routes)
    return counts


def body_of(endpoint: str, fields: dict[str, Any], prompt: Any, *, first: bool = False) -> bytes:
    named = {"prompt" if endpoint == "completions" else "messages": prompt}
    whole = {"model": "tiny"} | fields
    return json.dumps(named | whole if first else whole | named).encode()


def prompts_of(endpoint: str) -> list[Any]:
    if endpoint == "completions":
        return ["one", 'two "}, { \\ ünï', " "]
    return [MESSAGES, [{"role": "user", "content": '"}], "model": "x'}] * 3]


def alike(request: Any) -> Any:
    """Without what is drawn."""
    return structs.replace(request, sampling=structs.replace(request.sampling, seed=0))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("endpoint", "fields"), FIELDS)
def test_a_known_request_is_what_reading_it_gives(endpoint, fields, first, num_reads):
    fleet = Fleet()
    for prompt in prompts_of(endpoint) * 2:
        body = body_of(endpoint, fields, prompt, first=first)
        expected = READ[endpoint](body, choices_max=CHOICES_MAX, traits_of=lambda _: TRAITS)
        given = fleet.read(endpoint, body)
        assert alike(given) == alike(expected)
        assert [bytes(each) for each in given.prompts] == [bytes(each) for each in expected.prompts]
    assert num_reads[endpoint] == 1


@pytest.mark.parametrize(
    ("fields", "is_drawn"), [({}, True), ({"seed": None}, True), ({"seed": 5}, False)]
)
def test_each_request_without_a_seed_draws_its_own(fields, is_drawn):
    fleet = Fleet()
    seeds = {
        fleet.read("completions", body_of("completions", fields, "a" * n)).sampling.seed
        for n in range(1, 9)
    }
    assert len(seeds) == (8 if is_drawn else 1)


def test_a_seed_is_one_however_its_name_is_written():
    fleet = Fleet()
    for seed, prompt in ((5, "one"), (5, "two"), (6, "two")):
        body = b'{"model": "tiny", "se\\u0065d": %d, "prompt": "%b"}' % (seed, prompt.encode())
        assert fleet.read("completions", body).sampling.seed == seed


@pytest.mark.parametrize(
    ("endpoint", "fields", "prompt"),
    [
        ("completions", {}, ["a", "b"]),
        ("completions", {}, [1, 2, 3]),
        ("chat", {"documents": [{"text": "d"}]}, MESSAGES),
        ("completions", {"user": "u" * KNOWN_BYTES_MAX}, "a"),
    ],
)
def test_what_is_not_plain_is_read_each_time(endpoint, fields, prompt, num_reads):
    fleet = Fleet()
    for _ in range(3):
        fleet.read(endpoint, body_of(endpoint, fields, prompt))
    assert num_reads[endpoint] == 3


@pytest.mark.parametrize(
    ("endpoint", "prompt"),
    [
        ("completions", ""),
        ("completions", 5),
        ("completions", None),
        ("completions", []),
        ("completions", [1] * 600),
        ("chat", []),
        ("chat", ["text"]),
        ("chat", "text"),
    ],
)
def test_a_bad_prompt_is_refused_in_a_known_request_as_well(endpoint, prompt):
    fleet = Fleet()
    fleet.read(endpoint, body_of(endpoint, {}, prompts_of(endpoint)[0]))
    with pytest.raises(BadRequest) as refused:
        fleet.read(endpoint, body_of(endpoint, {}, prompt))
    assert refused.value.param == ("prompt" if endpoint == "completions" else "messages")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "tiny", "prompt": "a", "prompt": "b"}',
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "a"',
        b'{"model": "tiny", "prompt": "\\ud800"}',
    ],
)
def test_a_broken_body_is_never_taken_for_a_known_one(body):
    fleet = Fleet()
    fleet.read("completions", b'{"model": "tiny", "prompt": "a"}')
    for _ in range(2):
        with pytest.raises(BadRequest):
            fleet.read("completions", body)


def deep_schema(depth: int) -> str:
    return '{"type": "object", "x": ' + "[" * depth + "]" * depth + "}"


def in_tools(schema: str) -> str:
    tools = json.dumps(TOOLS).replace('{"type": "object"}', schema)
    return f'"tool_choice": "required", "tools": {tools}'


def in_a_text(schema: str) -> str:
    return f'"structured_outputs": {{"json": {json.dumps(schema)}}}'


@pytest.mark.parametrize("field", [in_tools, in_a_text])
def test_what_no_reader_of_a_part_can_take_is_too_deep(field):
    """At any depth: each of them can take another one."""
    reasons = set()
    for depth in range(1, 2 * sys.getrecursionlimit(), 20):
        body = (
            f'{{"model": "tiny", "messages": {json.dumps(MESSAGES)}, {field(deep_schema(depth))}}}'
        )
        try:
            Fleet().read("chat", body.encode())
        except BadRequest as error:
            reasons.add(error.message)
    assert reasons == {"the body is nested too deeply"}


def test_an_endpoint_does_not_know_the_others_requests():
    fleet = Fleet()
    body = b'{"model": "tiny", "prompt": "a", "messages": [{"role": "user"}]}'
    for endpoint in ("completions", "chat", "completions"):
        with pytest.raises(BadRequest):
            fleet.read(endpoint, body)


def test_what_a_model_can_do_is_asked_each_time():
    fleet = Fleet()
    body = body_of("completions", {"logit_bias": {"900": 1.0}}, "a")
    fleet.read("completions", body)
    fleet.traits = ModelTraits(num_vocab=100, context_tokens=512)
    with pytest.raises(BadRequest, match="logit_bias"):
        fleet.read("completions", body)
    fleet.traits = TRAITS
    fleet.read("completions", body)


def test_few_requests_are_kept(num_reads):
    fleet = Fleet()
    for number in [*range(KNOWN_MAX + 1), KNOWN_MAX, 0]:
        fleet.read("completions", body_of("completions", {"user": str(number)}, "a"))
    assert num_reads["completions"] == KNOWN_MAX + 2  # the first had made room for the last
    assert len(fleet.reader._known) == KNOWN_MAX


@pytest.mark.parametrize(("endpoint", "fields"), FIELDS)
def test_no_body_is_kept(endpoint, fields):
    """Nor any part of one: its prompt would stay in memory with it."""
    fleet = Fleet()
    bodies = [body_of(endpoint, fields, prompt) for prompt in prompts_of(endpoint)]
    before = [sys.getrefcount(body) for body in bodies]
    for index in range(len(bodies)):
        fleet.read(endpoint, bodies[index])
    assert [sys.getrefcount(body) for body in bodies] == before


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3]])
def test_a_body_is_passed_over_once(monkeypatch, prompt):
    bodies = []

    def counted(body):
        bodies.append(body)
        return members_of(body)

    for module in (request_reader, json_object):
        monkeypatch.setattr(module, "members_of", counted)
    fleet = Fleet()
    for num in 1, 2:
        fleet.read("completions", body_of("completions", {}, prompt))
        assert len(bodies) == num
