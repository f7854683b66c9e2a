"""How many ranks each worker of `serve` gets, and which cores."""

import os

import pytest

from neuron_di.config import EngineOptions, ServeOptions
from neuron_di.obs import LaunchReport
from neuron_di.serve import Fleet


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def flags(fleet, name):
    """What a worker is told, by flag."""
    index = list(fleet._roles).index(name)
    return dict(
        word.removeprefix("--").split("=", 1)
        for word in fleet._worker_command(index, name)
        if word.startswith("--") and "=" in word
    )


def test_roles_may_differ_in_ranks():
    fleet = Fleet(ServeOptions(model="m", prefill=2, prefill_tp=4, engine=EngineOptions(tp=2)))
    assert [flags(fleet, name)["tp"] for name in fleet._roles] == ["4", "4", "2"]


def test_a_combined_worker_takes_the_common_number():
    options = ServeOptions(model="m", combined=True, engine=EngineOptions(tp=2))
    assert flags(Fleet(options), "combined-0")["tp"] == "2"


def test_a_worker_keeps_its_ranks_whatever_its_role_becomes():
    fleet = Fleet(ServeOptions(model="m", prefill_tp=2))
    fleet._note_role("prefill-0", LaunchReport(event="ready", role="decode"))
    told = flags(fleet, "prefill-0")
    assert (told["role"], told["tp"]) == ("decode", "2")


def test_pinned_workers_get_a_core_for_each_rank():
    fleet = Fleet(ServeOptions(model="m", prefill=2, pin=True, prefill_tp=2, decode_tp=1))
    told = [flags(fleet, name) for name in fleet._roles]
    assert [each["core"] for each in told] == ["0", "2", "4"]
    assert [each["threads"] for each in told] == ["2", "2", "1"]
