"""What each worker of `serve` is told: its ranks, its cores, where it and its peers may be."""

import os

import pytest

from neuron_di.config import EngineOptions, ServeOptions, WorkerAddressOptions
from neuron_di.errors import ConfigError
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
    fleet._note_report("prefill-0", LaunchReport(event="ready", role="decode"))
    told = flags(fleet, "prefill-0")
    assert (told["role"], told["tp"]) == ("decode", "2")


def test_pinned_workers_get_a_core_for_each_rank():
    fleet = Fleet(ServeOptions(model="m", prefill=2, pin=True, prefill_tp=2, decode_tp=1))
    told = [flags(fleet, name) for name in fleet._roles]
    assert [each["core"] for each in told] == ["0", "2", "4"]
    assert [each["threads"] for each in told] == ["2", "2", "1"]


def test_its_own_workers_are_among_the_networks_that_are_allowed():
    allowed = WorkerAddressOptions(worker_networks=("10.1.0.0/16",))
    fleet = Fleet(ServeOptions(model="m", addresses=allowed))
    proxys = [word for word in fleet._proxy_command() if word.startswith("--worker-networks=")]
    assert proxys == ["--worker-networks=10.1.0.0/16,127.0.0.0/8"]
    assert flags(fleet, "decode-0")["worker-networks"] == "10.1.0.0/16,127.0.0.0/8"
    anywhere = Fleet(ServeOptions(model="m"))
    assert flags(anywhere, "decode-0")["worker-networks"] == ""


@pytest.mark.parametrize("ports", ["1024-20000", "20000-29999", "50000-60999"])
async def test_ports_that_its_own_workers_may_not_have_are_refused_at_once(tmp_path, ports):
    fleet = Fleet(
        ServeOptions(model=str(tmp_path), addresses=WorkerAddressOptions(worker_ports=ports))
    )
    with pytest.raises(ConfigError, match=f"--worker-ports {ports} leaves out .* any free port"):
        await fleet.__aenter__()
    assert fleet.pids() == {}


@pytest.mark.parametrize("picked", ["32768 60999", "1024 65535", "1 65535", None])
def test_ports_that_the_system_picks_are_allowed_unless_told_otherwise(picked):
    WorkerAddressOptions().require_free_ports(lambda _: picked)
