"""Several processes of one proxy answer as one."""

import asyncio
import os
import resource
import signal
import socket
import tempfile
from dataclasses import replace

import pytest
from running_proxy import AT_ONCE, ListDirectory
from scripted_worker import finished, make_record

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di.errors import ConfigError
from neuron_di.types import RequestId
from neuron_di_proxy.processes import FurtherProcesses, Meeting, part_of
from neuron_di_proxy.receipts import RequestRecord
from neuron_di_proxy.service import Service
from neuron_di_proxy.siblings import (
    QUESTION_BYTES_MAX,
    SiblingPlace,
    Siblings,
    is_silent,
    join_metrics,
    workers_known_to_others,
)
from neuron_di_proxy.status import StatusReport, report_proxy
from neuron_di_proxy.tenant import Tenant

TEXT = b"""\
# HELP a_total how many
# TYPE a_total counter
a_total{code="x y"} 2.0
# HELP h times
# TYPE h histogram
h_bucket{le="1.0"} 1.0
h_bucket{le="+Inf"} 3.0
h_count 3.0
h_sum 1.5
# HELP g now
# TYPE g gauge
g{worker="w"} 4.0
# HELP n none yet
# TYPE n gauge
"""


def test_each_series_is_kept_once_for_each_process():
    other = TEXT.replace(b'code="x y"', b'code="z"') + b"# HELP b b\n# TYPE b gauge\nb 1.0\n"
    assert join_metrics({0: TEXT, 2: other}).decode().splitlines() == [
        "# HELP a_total how many",
        "# TYPE a_total counter",
        'a_total{code="x y",process="0"} 2.0',
        'a_total{code="z",process="2"} 2.0',
        "# HELP h times",
        "# TYPE h histogram",
        'h_bucket{le="1.0",process="0"} 1.0',
        'h_bucket{le="+Inf",process="0"} 3.0',
        'h_count{process="0"} 3.0',
        'h_sum{process="0"} 1.5',
        'h_bucket{le="1.0",process="2"} 1.0',
        'h_bucket{le="+Inf",process="2"} 3.0',
        'h_count{process="2"} 3.0',
        'h_sum{process="2"} 1.5',
        "# HELP g now",
        "# TYPE g gauge",
        'g{worker="w",process="0"} 4.0',
        'g{worker="w",process="2"} 4.0',
        "# HELP n none yet",
        "# TYPE n gauge",
        "# HELP b b",
        "# TYPE b gauge",
        'b{process="2"} 1.0',
    ]


def test_each_process_has_its_part_of_the_limits():
    front = FrontOptions(processes=3, connections_max=100)
    limits = replace(AT_ONCE, requests_max=2, queue_max=0)
    part = part_of(ProxyOptions(front=front, limits=limits))
    assert part.front == replace(front, connections_max=34)
    assert part.limits == replace(limits, requests_max=1)
    # Both are worked out from the workers' slots.
    assert part_of(ProxyOptions(front=front, limits=AT_ONCE)).limits == AT_ONCE


def test_each_process_has_its_part_of_a_tenants_limits():
    tenant = Tenant(name="t", requests_max=3, tokens_per_minute=10, max_tokens=7)
    assert tenant.part(2) == replace(tenant, requests_max=2, tokens_per_minute=5)
    assert tenant.part(1) == tenant


@pytest.fixture
async def processes(stack, tmp_path):
    """Two processes' services and what they have for each other; a third one is not there."""
    made = []
    for index in range(2):
        service = Service(ProxyOptions(limits=AT_ONCE), ListDirectory([]))
        place = SiblingPlace(folder=str(tmp_path), index=index, num_processes=3)
        made.append((service, await stack.enter_async_context(Siblings(service, place))))
    return made


def receipt_of(answer_id):
    record = RequestRecord(request_id=RequestId(answer_id), model="tiny")
    record.finished = finished(3)
    return record.seal("length")


async def test_a_receipt_is_found_whichever_process_has_it(processes):
    (_, ours), (their_service, theirs) = processes
    their_service.receipts.add(receipt_of("abc"))
    found = await ours.receipt("cmpl-abc")
    assert found == await theirs.receipt("abc")
    assert found.num_generated == 3


@pytest.mark.parametrize("answer_id", ["other", "a\nmetrics", "ä", "x" * QUESTION_BYTES_MAX])
async def test_a_receipt_that_nobody_has(processes, answer_id):
    assert await processes[0][1].receipt(answer_id) is None


async def test_metrics_of_all(processes):
    (our_service, ours), (their_service, _) = processes
    our_service.metrics.count_refused("invalid_request")
    their_service.metrics.count_refused("invalid_request")
    text = (await ours.metrics()).decode()
    counted = {line for line in text.splitlines() if 'code="invalid_request"' in line}
    ends = {line.rpartition(",")[2] for line in counted}
    assert ends == {'process="0"} 1.0', 'process="1"} 1.0'}


async def test_how_the_others_are(processes):
    (_, ours), (their_service, _) = processes
    their_service.admission.drain()
    statuses = await ours.statuses()
    assert [status.is_draining for status in statuses] == [True]


async def test_who_gives_no_answer_is_missed_in_the_report(processes):
    """One that is frozen still gets connections: it must not just be in no list."""
    (our_service, ours), _ = processes

    async def reporting():
        proxy = report_proxy(our_service.admission)
        return StatusReport(proxy=proxy, workers=[], remarks=["first"])

    report = await ours.completed(reporting())
    assert len(report.siblings) == 1
    words = "no answer from 1 of this proxy's 3 processes: frozen, or being started again"
    assert report.remarks == ["first", words]
    async with Siblings(our_service, None) as alone:
        assert await alone.completed(reporting()) == await reporting()


async def test_one_that_was_started_again_learns_whom_the_others_know(processes, tmp_path):
    (_, _), (their_service, _) = processes
    again = SiblingPlace(folder=str(tmp_path), index=2, num_processes=3)
    assert await workers_known_to_others(again) == []
    known = [make_record("p", "prefill", 4001), make_record("d", "decode", 4002)]
    their_service.directory.records += known
    assert await workers_known_to_others(again) == known


async def test_a_process_alone_asks_nobody():
    service = Service(ProxyOptions(limits=AT_ONCE), ListDirectory([]))
    async with Siblings(service, None) as alone:
        assert await alone.statuses() == []
        assert await alone.metrics() == service.metrics.text()


async def test_a_process_that_says_nothing_is_left_out(processes, tmp_path, monkeypatch):
    monkeypatch.setattr("neuron_di_proxy.siblings.ANSWER_TIMEOUT_S", 0.1)

    async def say_nothing(reader, writer):
        await reader.read()
        writer.close()

    silent = await asyncio.start_unix_server(say_nothing, tmp_path / "2.socket")
    async with silent:
        assert len(await processes[0][1].statuses()) == 1


async def test_who_cannot_be_asked_is_not_taken_for_frozen(tmp_path, monkeypatch):
    """A process that lacks a descriptor itself must not end the others."""
    monkeypatch.setattr("neuron_di_proxy.siblings.ANSWER_TIMEOUT_S", 0.1)
    place = SiblingPlace(folder=str(tmp_path), index=0, num_processes=3)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(place.path_of(1)))
        frozen.listen()
        assert await is_silent(place, 1)
        assert not await is_silent(place, 2)  # there is none
        os.close(lowest := os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            assert not await is_silent(place, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_an_answer_that_breaks_off_is_none(processes, tmp_path):
    async def break_off(reader, writer):
        await reader.readline()
        writer.write(b'900\n{"request_id": "x", "num_w')
        await writer.drain()
        writer.transport.abort()

    ours = processes[0][1]
    async with await asyncio.start_unix_server(break_off, tmp_path / "2.socket"):
        assert len(await ours.statuses()) == 1
        assert await ours.receipt("abc") is None
        text = (await ours.metrics()).decode()
    assert 'process="2"' not in text
    assert 'process="1"' in text


async def test_a_process_that_is_frozen_is_started_again(monkeypatch):
    """Or each client that the system gives to it would wait in vain."""
    monkeypatch.setattr("neuron_di_proxy.processes.LOOK_INTERVAL_S", 0.1)
    monkeypatch.setattr("neuron_di_proxy.processes.SILENT_MAX", 2)
    options = ProxyOptions(front=FrontOptions(processes=2), prefill_urls=("http://127.0.0.1:1",))
    options = replace(options, decode_urls=options.prefill_urls, parent_pid=os.getpid())
    async with asyncio.timeout(60), FurtherProcesses(options, 0, Meeting()) as others:
        [child] = others._children
        frozen = child.pid
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        while child.pid in (None, frozen):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_folder_whose_sockets_could_not_be_named_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 80)))
    (tmp_path / ("x" * 80)).mkdir()
    options = ProxyOptions(front=FrontOptions(processes=2))
    with pytest.raises(ConfigError, match="give TMPDIR a shorter one"):
        async with FurtherProcesses(options, 1, Meeting()):
            pass
    assert list((tmp_path / ("x" * 80)).iterdir()) == []


async def test_where_no_folder_can_be_made_is_told_with_the_mend(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc")  # whose files nobody makes
    options = ProxyOptions(front=FrontOptions(processes=2))
    with pytest.raises(ConfigError, match="name one with TMPDIR"):
        async with FurtherProcesses(options, 1, Meeting()):
            pass
