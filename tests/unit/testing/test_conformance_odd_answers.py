"""Answers whose members have odd types are findings; they end nothing."""

import copy
import itertools
import json
import time

import pytest
from answering_endpoint import AnsweringEndpoint, stream, whole

from neuron_di.errors import PeerError
from neuron_di.testing.conformance import Heard, Probe, Rules, choose, learn, run_case, run_cases
from neuron_di.testing.conformance.report import report_document, report_lines

PROBE = Probe(token_0=" a", text=" a b", token_ids=(5, 6), context_tokens=64, long_prompt_chars=100)
RULES = Rules(), Rules(is_strict=True), Rules(text="shape")
ODD = None, 7, -1.5, "x", True, [], [None], [7], {}, {"x": None}, 10**400, "\ud800"

HEAD = {"id": "i", "created": int(time.time()), "model": "m"}
USAGE = {
    "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 0},
}  # fmt: skip
CALL = {"index": 0, "id": "t", "type": "function",
        "function": {"name": "tell_tale", "arguments": "{}"}}  # fmt: skip
LOGPROB = {"token": "a", "logprob": -1.0, "bytes": [97],
           "top_logprobs": [{"token": "a", "logprob": -1.0, "bytes": [97]}]}  # fmt: skip


def chat_answers(ask):
    choice = {"index": 0, "finish_reason": "length", "logprobs": {"content": [LOGPROB, LOGPROB]}}
    said = {"role": "assistant", "content": "a b", "tool_calls": [CALL]}
    if not ask.body.get("stream"):
        choices = [{**choice, "message": said}]
        return whole({**HEAD, "object": "chat.completion", "choices": choices, "usage": USAGE})
    head = {**HEAD, "object": "chat.completion.chunk"}
    return stream([{**head, "choices": [{**choice, "delta": said}]},
                   {**head, "choices": [], "usage": USAGE}])  # fmt: skip


def completion_answers(ask):
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "text_offset": [0, 1],
                "top_logprobs": [{"a": -1.0}, {"b": -2.0}]}  # fmt: skip
    choice = {"index": 0, "text": " a b", "finish_reason": "length", "token_ids": [5, 6],
              "logprobs": logprobs}  # fmt: skip
    head = {**HEAD, "object": "text_completion"}
    if not ask.body.get("stream"):
        return whole({**head, "choices": [choice], "usage": USAGE})
    return stream([{**head, "choices": [choice]}, {**head, "choices": [], "usage": USAGE}])


def refusals(ask):
    error = {"message": "no", "type": "x", "param": "n", "code": "y"}
    return whole({"error": error}, status=400)


@pytest.mark.parametrize(
    ("message", "param", "outcome"),
    [("`n` is not supported", None, "refused"), ("not supported", "n", "refused"),
     ("the upstream is not there", None, "broken"), ("an invalid value", "prompts", "broken")],
)  # fmt: skip
async def test_a_field_is_refused_by_its_name_and_not_by_letters_of_it(message, param, outcome):
    error = {"message": message, "type": "x", "param": param, "code": None}
    answer = whole({"error": error}, status=400)
    sides = [AnsweringEndpoint(side, lambda _: answer) for side in "AB"]
    (case,) = choose(["n-3"])
    assert (await run_case(case, sides, [PROBE] * 2, Rules())).outcome == outcome
    (case,) = choose(["refuse-n-0"])
    named = (await run_case(case, sides, [PROBE] * 2, Rules())).outcome == "same"
    assert named == (outcome == "refused")


@pytest.mark.parametrize("side", "AB")
async def test_what_was_not_answered_is_not_said_to_be_equal(side):
    def gone(_):
        raise PeerError("gone")

    answers = {"A": completion_answers, "B": completion_answers}
    equal = [AnsweringEndpoint(each, answers[each]) for each in "AB"]
    one_gone = [AnsweringEndpoint(each, (answers | {side: gone})[each]) for each in "AB"]
    for sides, word in ((equal, "yes"), (one_gone, "-")):
        results = await run_cases(choose(["length-2"]), sides, [PROBE] * 2, Rules())
        (line,) = (line for line in report_lines(results, sides, Rules()) if "two tokens" in line)
        assert line.split()[3] == word


def places(value, path=()):
    """Where a document has a value, itself included."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed(document, path, odd):
    """The document with something odd at one place."""
    if not path:
        return odd
    document = copy.deepcopy(document)
    *before, last = path
    inner = document
    for key in before:
        inner = inner[key]
    inner[last] = odd
    return document


def spoilt(heard):
    """Every way to put one odd value into a response."""
    if heard.headers["content-type"] == "application/json":
        document = json.loads(heard.body)
        for path, odd in itertools.product(places(document), ODD):
            yield whole(changed(document, path, odd), status=heard.status)
        return
    events = heard.body.decode().removesuffix("\n\n").split("\n\n")[:-1]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for path, odd in itertools.product(places(chunks), ODD):
        if path:
            yield stream(changed(chunks, path, odd))


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("logprobs-5", completion_answers), ("stop-later", completion_answers),
        ("stream-usage-continuous", completion_answers),
        ("allowed-token-ids", completion_answers),
        ("chat-top-logprobs", chat_answers), ("tools-named", chat_answers),
        ("format-json-schema", chat_answers), ("refuse-n-0", refusals), ("suffix", refusals),
    ],
)  # fmt: skip
async def test_no_odd_value_ends_the_run(name, answers):
    (case,) = choose([name])
    for mode in case.modes:
        good = answers(case.ask(PROBE, "m", mode))
        for number, bad in enumerate(spoilt(good)):
            first = AnsweringEndpoint("A", answers)
            second = AnsweringEndpoint(
                "B", lambda ask, mode=mode, bad=bad: bad if _is(mode, ask) else answers(ask)
            )
            rules = RULES[number % len(RULES)]
            result = await run_case(case, (first, second), (PROBE, PROBE), rules)
            "\n".join(report_lines([result], (first, second), rules)).encode()
            json.dumps(report_document([result], (first, second), rules))


def _is(mode, ask):
    return bool(ask.body.get("stream")) == (mode == "stream")


async def test_an_odd_answer_is_a_fault_and_the_others_are_kept():
    def answers(ask):
        heard = chat_answers(ask)
        if ask.body.get("top_logprobs"):
            return whole(heard.body.replace(b'"top_logprobs": [{', b'"top_logprobs": 7, "x": [{'))
        return heard

    endpoints = AnsweringEndpoint("A", answers), AnsweringEndpoint("B", chat_answers)
    cases = choose(["chat-top-logprobs", "chat-logprobs"])
    results = await run_cases(cases, endpoints, (PROBE, PROBE), Rules())
    assert len(results) == len(cases)
    faults = [(label, *fault) for result in results for label, fault in result.faults]
    assert [fault for fault in faults if fault[:2] == ("A whole", "response")], faults
    assert not [fault for fault in faults if fault[:2] == ("B whole", "response")]


async def test_what_cannot_be_compared_differs():
    """It is nested deeper than a comparison goes."""
    deep = b'{"a": ' * 600 + b"1" + b"}" * 600
    (case,) = choose(["length-1"])

    def answers(ask):
        heard = completion_answers(ask)
        return whole(heard.body[:-1] + b', "deep": ' + deep + b"}") if _is("whole", ask) else heard

    endpoints = AnsweringEndpoint("A", answers), AnsweringEndpoint("B", answers)
    result = await run_case(case, endpoints, (PROBE, PROBE), Rules())
    assert [found.path for *_, found in result.differences] == ["$, which cannot be compared"]


def with_ids(answers):
    """A new id for each answer."""
    numbers = itertools.count()

    def numbered(ask):
        heard = answers(ask)
        body = heard.body.replace(b'"id": "i"', b'"id": "i-%d"' % next(numbers))
        return Heard(status=heard.status, headers=heard.headers, body=body)

    return numbered


async def faults_of(answers, *names):
    """What is found of B in runs of these cases; A's answers are good."""
    endpoints = AnsweringEndpoint("A", with_ids(chat_answers)), AnsweringEndpoint("B", answers)
    results = await run_cases(choose(list(names)), endpoints, (PROBE, PROBE), Rules(), at_once=1)
    faults = [(label, *fault) for result in results for label, fault in result.faults]
    assert not [fault for fault in faults if fault[0][0] == "A" and fault[1] in ("$.id", "$")]
    return [fault for fault in faults if fault[0][0] == "B"]


async def test_an_id_that_comes_twice_is_a_fault():
    names = "chat", "chat-logprobs"
    faults = [fault for fault in await faults_of(chat_answers, *names) if fault[1] == "$.id"]
    assert faults == [
        ("B stream", "$.id", "is that of B whole of chat, too"),
        ("B whole", "$.id", "is that of B whole of chat, too"),
        ("B stream", "$.id", "is that of B whole of chat, too"),
    ]


async def test_an_id_may_follow_from_what_the_client_calls_its_request():
    assert not [f for f in await faults_of(chat_answers, "chat-request-id") if f[1] == "$.id"]


@pytest.mark.parametrize(
    ("after_s", "is_right"),
    [(-3600, True), (3600, True), (-2 * 86_400, False), (2 * 86_400, False)],
)
async def test_a_time_is_near_now(after_s, is_right):
    def answers(ask):
        heard = with_ids(chat_answers)(ask)
        now = str(HEAD["created"]).encode()
        then = str(HEAD["created"] + after_s).encode()
        return Heard(status=200, headers=heard.headers, body=heard.body.replace(now, then))

    wrong = [fault for fault in await faults_of(answers, "chat") if fault[1] == "$.created"]
    assert [fault[0] for fault in wrong] == ([] if is_right else ["B whole", "B stream"])


async def test_a_key_that_an_object_has_twice_is_a_fault():
    def answers(ask):
        heard = chat_answers(ask)
        body = heard.body.replace(b'"role": "assistant"', b'"role": "user", "role": "assistant"')
        return Heard(status=200, headers=heard.headers, body=body)

    faults = await faults_of(answers, "chat")
    assert ("B whole", "$", "has 'role' twice in one object") in faults
    assert ("B stream", "event[0]", "has 'role' twice in one object") in faults


@pytest.mark.parametrize("data", [7, "m", {"id": "m"}, None, [7], []])
async def test_a_list_of_models_is_a_list(data):
    endpoint = AnsweringEndpoint("A", lambda _: whole({"data": data}))
    with pytest.raises(PeerError, match="lists no model"):
        await endpoint.find_model()


@pytest.mark.parametrize("odd", [7, "x", [None], ["x"], {"x": 1}, True])
async def test_nothing_is_learnt_from_odd_members(odd):
    def answers(ask):
        if ask.path == "/v1/models":
            return whole({"data": [{"id": "m", "max_model_len": odd}]})
        return whole({"choices": [{"text": "a b", "token_ids": odd}]})

    probe = await learn(AnsweringEndpoint("A", answers), long_prompt_chars=100)
    assert probe.token_ids == ()
    assert probe.context_tokens == (7 if odd == 7 else None)
