"""Requests that `neuron-di conformance --random` draws."""

import json

import pytest

from neuron_di.cli import main
from neuron_di.testing.conformance import Probe, random_cases
from neuron_di.testing.conformance.case import PATHS
from neuron_di.testing.conformance.random_cases import SEED_MAX
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.request_reader import RequestReader

PROBE = Probe(token_0="a", text="a b", token_ids=(), context_tokens=None, long_prompt_chars=9)
URL = "http://127.0.0.1:9"


def test_a_number_is_the_same_request_in_each_run():
    some = list(random_cases(40, 10))
    assert list(random_cases(43, 4)) == some[3:7]
    assert [case.name for case in some] == [f"random-{number}" for number in range(40, 50)]
    assert len({case.why for case in some}) == 10
    for case in some:
        assert {"model": "m", **json.loads(case.why)} == case.body(PROBE, "m", "whole")


def test_each_is_one_that_a_server_may_be_asked():
    """Our own reader takes them all: what is refused is for a worker or a template to refuse."""
    reader = RequestReader(128, lambda _: ModelTraits())
    endpoints = {path: endpoint for endpoint, path in PATHS.items()}
    seen = set()
    for case in random_cases(0, 500):
        for mode in case.modes:
            body = case.body(PROBE, "m", mode)
            seen |= set(body)
            read = reader.read(endpoints[case.path], json.dumps(body).encode())
            assert read.num_choices >= 1
            if case.is_sampled:
                assert read.sampling.seed == body["seed"]
    assert {"tools", "structured_outputs", "response_format", "echo", "logprobs", "stop"} <= seen


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--random=0",), "--random must be a whole number, at least 1, not 0"),
        (("--random=3", "--seed=-1"), f"--seed must be between 0 and {SEED_MAX}, not -1"),
        (("--random=3", "--case=stop-*"), "--random draws others: one of them"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, words, capsys):
    assert main(["conformance", URL, URL, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_they_are_listed_with_all_that_they_ask_for(capsys):
    assert main(["conformance", "--list", "--random=2", "--seed=7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["random-7", "random-8"]
    for line, case in zip(lines, random_cases(7, 2), strict=True):
        assert json.loads(line.split(maxsplit=1)[1]) == json.loads(case.why)
