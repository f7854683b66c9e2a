"""A prompt's report, which its first answer brings, is the same for all its answers."""

from dataclasses import replace

import pytest
from request_bodies import TRAITS, completion
from scripted_worker import finished, parked, released, token

from neuron_di.errors import BadRequest
from neuron_di.wire import PromptReport, TokenLogprob, TokenLogprobs
from neuron_di.wire.legs import REPORTED_LOGPROBS_MAX
from neuron_di_proxy import completion_answer
from neuron_di_proxy.shared_reports import SharedReports

LIKELY = TokenLogprobs(TokenLogprob("b", -0.5, [98], 2), [])
REPORT = PromptReport(text="ab", token_ids=[1, 2], logprobs=[None, LIKELY])


class Sink:
    def __init__(self):
        self.said = []

    def token(self, index, token):
        self.said.append((index, token))

    def finished(self, index, finished):
        self.said.append((index, finished))


def test_other_answers_wait_for_the_report_and_then_have_it():
    sink = Sink()
    shared = SharedReports(sink, 2)
    shared.token(1, token(0))
    shared.token(1, token(1))
    shared.finished(1, finished(2))
    shared.token(3, token(0))  # another prompt's
    assert sink.said == []
    shared.token(0, token(0, prompt=REPORT))
    assert sink.said == [
        (0, token(0, prompt=REPORT)),
        (1, token(0, prompt=REPORT)),
        (1, token(1)),
        (1, finished(2)),
    ]
    del sink.said[:]
    shared.token(0, token(1))
    shared.token(2, token(0, prompt=REPORT))
    assert sink.said == [
        (0, token(1)),
        (2, token(0, prompt=REPORT)),
        (3, token(0, prompt=REPORT)),
    ]


def test_an_answer_that_comes_after_the_report_has_it():
    sink = Sink()
    shared = SharedReports(sink, 2)
    shared.token(0, token(0, prompt=REPORT))
    shared.token(1, token(0))
    shared.finished(1, finished(1))
    assert sink.said[1:] == [(1, token(0, prompt=REPORT)), (1, finished(1))]


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 0}, {"prompt_logprobs": 0}])
async def test_a_report_is_asked_for_and_written_once_per_prompt(cluster, fields, monkeypatch):
    written = []
    whole = completion_answer.prompt_logprobs
    echoed = completion_answer._Logprobs.add_prompt
    monkeypatch.setattr(
        completion_answer, "prompt_logprobs", lambda of: (written.append(of), whole(of))[1]
    )
    monkeypatch.setattr(
        completion_answer._Logprobs,
        "add_prompt",
        lambda self, of: (written.append(of), echoed(self, of))[1],
    )

    async def prefill(leg):
        prompt = REPORT if leg.message.options.report else None
        await leg.send(token(0, logprobs=LIKELY, prompt=prompt), parked(), released())

    async def decode(leg):
        await leg.send(finished(1))

    cluster.prefill.script, cluster.decode.script = prefill, decode
    asked = {"model": "tiny", "prompt": ["ab", "ab"], "n": 3, "max_tokens": 1} | fields
    status, document = await cluster.proxy.post("/v1/completions", **asked)
    assert status == 200
    choices = [{**each, "index": 0} for each in document["choices"]]
    assert choices == [choices[0]] * 6
    if "echo" in fields:
        assert choices[0]["text"].startswith("ab")
        assert choices[0]["logprobs"]["tokens"] == ["a", "b", "b"]
    else:
        assert [each is None for each in choices[0]["prompt_logprobs"]] == [True, False]
    assert sum(leg.message.options.report for leg in cluster.prefill.legs) == 2
    assert len(written) == 2


@pytest.mark.parametrize("prompt", [[7] * 5000, "abcd" * 5000], ids=["ids", "text"])
def test_logprobs_of_all_prompts_are_bounded_together(prompt):
    traits = replace(TRAITS, context_tokens=10_000)
    asked = {"echo": True, "logprobs": REPORTED_LOGPROBS_MAX // 10_000 - 1}
    assert completion(traits, prompt=[prompt] * 2, **asked).options.report
    with pytest.raises(BadRequest) as caught:
        completion(traits, prompt=[prompt] * 3, **asked)
    assert str(REPORTED_LOGPROBS_MAX) in str(caught.value)
