"""Which NeuronCores each worker gets, and what is said when they do not suffice."""

import asyncio
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_di import neuron_cores, serve
from neuron_di.child import Child
from neuron_di.clock import Deadline
from neuron_di.config import EngineOptions, ServeOptions
from neuron_di.errors import ConfigError
from neuron_di.neuron_cores import (
    allowed_cores,
    as_text,
    count_host_cores,
    parse_cores,
    share_cores,
    worker_environment,
)
from neuron_di.obs import LaunchReport
from neuron_di.serve import Fleet
from neuron_di_bindings.nrt.status import error_of

GATE = "NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED"
PORT = "NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT"
VARIABLES = ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "NEURON_LOGICAL_NC_CONFIG")


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("3", (3,)),
        ("0-3", (0, 1, 2, 3)),
        ("8-8", (8,)),
        ("6, 0-2", (0, 1, 2, 6)),
        ("31-32,4", (4, 31, 32)),
    ],
)
def test_cores_are_read_as_the_runtime_writes_them(text, cores):
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", [",", "3-1", "a", "0-", "-1", "1-2-3", "0,", "0x1", "99999", "½"])
def test_what_names_no_cores_is_refused_with_the_mend(text):
    with pytest.raises(ConfigError, match=r"NEURON_RT_VISIBLE_CORES=.* such as 0-3"):
        parse_cores(text)


def test_a_core_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError, match="NEURON_RT_VISIBLE_CORES=0-3,2 names a core twice"):
        parse_cores("0-3,2")


@given(st.sets(st.integers(0, 127), min_size=1))
def test_text_and_cores_say_the_same(cores):
    assert parse_cores(as_text(tuple(sorted(cores)))) == tuple(sorted(cores))


@pytest.mark.parametrize(
    ("environ", "cores"),
    [
        ({}, range(32)),
        ({"NEURON_RT_VISIBLE_CORES": ""}, range(32)),
        ({"NEURON_RT_VISIBLE_CORES": "8-15"}, range(8, 16)),
        ({"NEURON_RT_NUM_CORES": "4"}, range(4)),
        ({"NEURON_RT_NUM_CORES": "0"}, range(32)),
        ({"NEURON_RT_VISIBLE_CORES": "30-31", "NEURON_RT_NUM_CORES": "99"}, range(30, 32)),
    ],
)
def test_the_operator_says_which_cores_may_be_used(environ, cores):
    assert allowed_cores(environ, 32) == tuple(cores)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"NEURON_RT_VISIBLE_CORES": "0-32"},
            "names core 32: this host has 32 NeuronCores, 0 to 31",
        ),
        ({"NEURON_RT_NUM_CORES": "33"}, "NUM_CORES=33: this host has 32 NeuronCores, 0 to 31"),
        ({"NEURON_RT_NUM_CORES": "-1"}, "NUM_CORES=-1 is no number of cores"),
    ],
)
def test_cores_that_the_host_does_not_have_are_refused(environ, words):
    with pytest.raises(ConfigError, match=words):
        allowed_cores(environ, 32)


def test_workers_get_neighbouring_cores_in_their_order():
    shares = share_cores(tuple(range(8)), {"prefill-0": 4, "prefill-1": 2, "decode-0": 2})
    assert {name: as_text(cores) for name, cores in shares.items()} == {
        "prefill-0": "0-3",
        "prefill-1": "4-5",
        "decode-0": "6-7",
    }


@pytest.mark.parametrize(
    ("num_allowed", "sizes", "expected"),
    [
        (32, (2, 8), ["0-1", "8-15"]),
        (32, (8, 16), ["0-7", "16-31"]),
        (4, (1, 2, 1), ["0", "2-3", "1"]),
        (10, (2, 8), ["0-1", "2-9"]),  # there is no other way
    ],
)
def test_cores_begin_at_a_multiple_of_their_number(num_allowed, sizes, expected):
    wanted = {f"worker-{index}": size for index, size in enumerate(sizes)}
    shares = share_cores(tuple(range(num_allowed)), wanted)
    assert [as_text(cores) for cores in shares.values()] == expected


def test_a_worker_gets_no_cores_with_a_gap_between_them():
    shares = share_cores(parse_cores("0-2,8-9,12"), {"prefill-0": 2, "decode-0": 2, "decode-1": 1})
    assert [as_text(cores) for cores in shares.values()] == ["0-1", "8-9", "2"]


def test_too_few_cores_are_told_with_numbers_and_the_mend():
    with pytest.raises(ConfigError) as refused:
        share_cores(parse_cores("0-3,6"), {"prefill-0": 4, "decode-0": 2})
    assert refused.value.message == (
        "the workers need 6 NeuronCores (prefill-0 4, decode-0 2) and may use 5 (0-3,6): "
        "allow more with NEURON_RT_VISIBLE_CORES, or serve with fewer workers or a smaller --tp"
    )


def test_enough_cores_in_stretches_that_are_too_short_are_too_few():
    with pytest.raises(ConfigError, match=r"decode-0 needs 4 NeuronCores beside each other.*0-5,9"):
        share_cores(parse_cores("0-5,9-10"), {"prefill-0": 4, "decode-0": 4})


@given(st.sets(st.integers(0, 40), min_size=1), st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_shares_are_disjoint_and_allowed(allowed, sizes):
    wanted = {f"worker-{index}": size for index, size in enumerate(sizes)}
    try:
        shares = share_cores(tuple(sorted(allowed)), wanted)
    except ConfigError:
        # Not for nothing: no stretch of neighbours holds all of them one after another.
        longest = max((len(part) for part in _stretches(allowed)), default=0)
        assert sum(sizes) > longest
        return
    taken = [core for cores in shares.values() for core in cores]
    assert len(taken) == len(set(taken))
    assert set(taken) <= allowed
    assert [len(cores) for cores in shares.values()] == sizes


def _stretches(cores):
    text = "".join("x" if core in cores else " " for core in range(max(cores) + 1))
    return text.split()


def test_a_worker_may_send_and_receive_on_its_cores():
    environ = worker_environment({"PATH": "p", "NEURON_RT_NUM_CORES": "8"}, range(4, 8))
    assert environ == {
        "PATH": "p",
        "NEURON_RT_VISIBLE_CORES": "4-7",
        GATE: "1",
        PORT: "45645",
        "FI_EFA_ENABLE_SHM_TRANSFER": "0",
    }


def test_what_the_operator_set_stays_but_for_what_would_be_wrong():
    mine = {GATE: "0", PORT: "5000", "FI_EFA_ENABLE_SHM_TRANSFER": "1", "NEURON_RT_LOG_LEVEL": "x"}
    environ = worker_environment(mine | {"NEURON_RT_VISIBLE_CORES": "0-31"}, range(1))
    assert environ == mine | {"NEURON_RT_VISIBLE_CORES": "0", "FI_EFA_ENABLE_SHM_TRANSFER": "0"}


# How many there are.


class Runtime:
    """Answers as told when it is asked for the host's cores."""

    def __init__(self, answer):
        self.answer = answer
        self.is_open = False

    def __enter__(self):
        self.is_open = True
        return self

    def __exit__(self, *_):
        self.is_open = False

    def total_cores(self):
        assert self.is_open
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def runtime(monkeypatch):
    """Takes the answer."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(neuron_cores, "load_nrt", lambda path: path)

    def answers(answer):
        made = Runtime(answer)
        monkeypatch.setattr(neuron_cores, "NrtRuntime", lambda _library: made)
        return made

    return answers


def test_the_runtime_counts_the_hosts_cores(runtime):
    asked = runtime(32)
    assert count_host_cores() == 32
    assert not asked.is_open, "it is given up again"


def test_a_host_without_cores_is_told_what_may_be_missing(runtime):
    runtime(0)
    with pytest.raises(ConfigError, match=r"has no NeuronCores.*aws-neuronx-dkms"):
        count_host_cores()


def test_a_runtime_that_cannot_count_is_quoted_and_the_variable_suspected(runtime, monkeypatch):
    runtime(error_of("nrt_get_total_vnc_count", 2, "NRT_INVALID"))
    with pytest.raises(ConfigError, match=r"cores: nrt_get_total_vnc_count.*NRT_INVALID"):
        count_host_cores()
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "30-33")
    with pytest.raises(ConfigError, match=r"those of NEURON_RT_VISIBLE_CORES=30-33\?\).*INVALID"):
        count_host_cores()


@pytest.mark.parametrize("names", [VARIABLES[:1], VARIABLES[1:2], VARIABLES[2:], VARIABLES])
def test_every_variable_that_is_set_is_suspected(runtime, monkeypatch, names):
    runtime(error_of("nrt_get_total_vnc_count", 2, "NRT_INVALID"))
    for name in names:
        monkeypatch.setenv(name, "99")
    with pytest.raises(ConfigError) as refused:
        count_host_cores()
    values = ", ".join(f"{name}=99" for name in names)
    assert f"this host's cores (does it have those of {values}?): nrt_get" in refused.value.message
    mend = f". Mend: unset {' and '.join(names)}, or set what this host has"
    assert refused.value.message.endswith(mend)


# What `serve` makes of it.


@pytest.fixture
def host(monkeypatch):
    """A host of 8 cores. Nothing of it is set for this process."""
    for name in [*os.environ]:
        if name.startswith(("NEURON_RT_", "FI_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(serve, "count_host_cores", lambda _path: 8)
    return monkeypatch


def fleet_of(tp=1, **options):
    return Fleet(ServeOptions(model="m", engine=EngineOptions(device="neuron", tp=tp), **options))


def cores_of(fleet):
    fleet._share_neuron_cores()
    return {
        worker.name: worker._environment()["NEURON_RT_VISIBLE_CORES"] for worker in fleet._workers
    }


def test_prefill_comes_first_and_roles_may_differ(host):
    fleet = fleet_of(prefill_tp=4, decode_tp=2, decode=2)
    assert cores_of(fleet) == {"prefill-0": "0-3", "decode-0": "4-5", "decode-1": "6-7"}
    assert all("NEURON_RT_VISIBLE_CORES" not in each._environment() for each in [fleet._proxy])


def test_the_set_of_the_parent_is_divided(host):
    host.setenv("NEURON_RT_VISIBLE_CORES", "2-5")
    assert cores_of(fleet_of(tp=2)) == {"prefill-0": "2-3", "decode-0": "4-5"}
    assert cores_of(fleet_of(tp=4, combined=True)) == {"combined-0": "2-5"}


async def test_too_few_cores_start_nothing(host):
    host.setenv("NEURON_RT_VISIBLE_CORES", "0-2")
    fleet = fleet_of(tp=2)
    with pytest.raises(
        ConfigError, match=r"need 4 NeuronCores \(prefill-0 2, decode-0 2\).*3 \(0-2"
    ):
        await fleet.__aenter__()
    assert all(child._process is None for child in (fleet._proxy, *fleet._workers))


@pytest.mark.parametrize(
    ("device", "least_s", "most_s"), [("neuron", 3600.0, 7200.0), ("cpu", 1.0, 600.0)]
)
async def test_a_worker_may_take_as_long_to_start_as_it_gives_its_load(
    host, device, least_s, most_s
):
    """Else it is ended before it can say why it failed. The first time, and every later one."""
    given_s = []

    async def start(_child, deadline, _on_report):
        given_s.append(deadline.remaining_s())
        return LaunchReport(event="ready", url="http://proxy")

    async def keep_up(_child, start_timeout_s, _tell, *, gives_up):
        given_s.append(start_timeout_s)
        return ""

    async def nothing(*_):
        return ""

    async def life(_child):
        await asyncio.Event().wait()

    for name, double in {"start": start, "keep_up": keep_up, "life": life}.items():
        host.setattr(Child, name, double)
    host.setattr(Fleet, "_reachable", nothing)
    fleet = Fleet(ServeOptions(model="m", combined=True, engine=EngineOptions(device=device)))
    async with fleet:
        await fleet.wait_lost()
    _of_proxy, *of_worker = given_s
    assert len(of_worker) == 2
    assert all(least_s < each <= most_s for each in of_worker)


def test_other_devices_know_nothing_of_cores(host):
    fleet = Fleet(ServeOptions(model="m"))
    assert "NEURON_RT_VISIBLE_CORES" not in fleet._workers[0]._environment()


async def test_a_worker_that_is_started_again_has_its_cores(host):
    """Whatever was changed in our own environment meanwhile."""
    fleet = fleet_of()
    fleet._share_neuron_cores()
    say = (
        "import json, os; cores = os.environ['NEURON_RT_VISIBLE_CORES']; "
        "print(json.dumps({'event': 'ready', 'url': cores}), flush=True)"
    )
    child = Child(
        "decode-0",
        lambda: [sys.executable, "-c", say],
        environment=fleet._workers[1]._environment,
    )
    urls = []
    for _ in range(2):
        report = await child.start(Deadline.after(30), lambda _name, _report: None)
        urls.append(report.url)
        await child.gone()
        host.setenv("NEURON_RT_VISIBLE_CORES", "7")
    assert urls == ["1", "1"]
