"""A static directory beside workers that say by their links how they are."""

import asyncio

import msgspec
import pytest
from scripted_worker import ScriptedWorker

from neuron_di.config import LimitOptions
from neuron_di.wire import PROTOCOL_VERSION
from neuron_di.worker import leg_link_server
from neuron_di_proxy import static_directory
from neuron_di_proxy.directory import AskingDirectory
from neuron_di_proxy.health import Health
from neuron_di_proxy.static_directory import StaticDirectory
from neuron_di_proxy.worker_client import WorkerClient

WAIT_S = 30.0
PATIENT = LimitOptions(freeze_timeout_s=1000.0)


async def until_so(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - until it is so
            await asyncio.sleep(0.005)


@pytest.fixture
async def worker(stack, monkeypatch):
    monkeypatch.setattr(leg_link_server, "ALIVE_INTERVAL_S", 0.02)
    monkeypatch.setattr(static_directory, "ASK_INTERVAL_S", 0.02)
    return await stack.enter_async_context(ScriptedWorker("d1", "decode", talks=True))


@pytest.fixture
async def directory(stack, worker):
    url = f"http://localhost:{worker.record.api_port}"
    directory = await stack.enter_async_context(StaticDirectory((url,)))
    assert isinstance(directory, AskingDirectory)
    await until_so(directory.workers)
    client = await stack.enter_async_context(WorkerClient(PATIENT))
    directory.health = await stack.enter_async_context(Health(client, directory, PATIENT))
    await until_so(lambda: directory.health.last_word(directory.workers()[0]) is not None)
    return directory


async def rounds(directory, number):
    """Let it look that often."""
    looks = 0
    has_heard = directory._has_heard

    def counting(url):
        nonlocal looks
        looks += 1
        return has_heard(url)

    directory._has_heard = counting
    await until_so(lambda: looks >= number)
    directory._has_heard = has_heard


async def test_who_says_by_itself_how_it_is_is_not_asked(worker, directory):
    await rounds(directory, 2)  # a question may have been open
    num_asked, view = worker.num_asked, directory.workers()
    await rounds(directory, 10)
    assert worker.num_asked == num_asked
    assert directory.workers() is view
    worker.record = msgspec.structs.replace(worker.record, state="draining")
    await until_so(lambda: directory.workers()[0].state == "draining")
    assert directory.workers()[0].host == "localhost"  # where the operator said
    assert worker.num_asked == num_asked


async def test_who_is_silent_is_asked(worker, directory):
    (record,) = directory.workers()
    directory.health.note_word(record, None)
    worker._link_server._status = lambda: None
    num_asked = worker.num_asked
    await until_so(lambda: worker.num_asked >= num_asked + 3)
    await worker.stop()
    await until_so(lambda: directory.workers() == ())


async def test_who_restarts_has_a_fresh_record(worker, directory):
    worker.restart()
    life = worker.record.incarnation
    await until_so(lambda: directory.workers()[0].incarnation == life)


async def test_an_address_where_nobody_is_is_named_with_the_reason(stack, worker, caplog):
    nobody = "http://127.0.0.1:1"
    directory = await stack.enter_async_context(StaticDirectory((nobody, worker.record.url())))
    await until_so(directory.workers)
    await until_so(directory.refused)
    assert directory.refused() == [(nobody, "", "it cannot be reached: Connection refused")]
    assert [record.worker_id for record in directory.workers()] == ["d1"]
    await rounds(directory, 20)
    assert [r.message for r in caplog.records].count("worker_unreachable") == 1


@pytest.mark.parametrize("changes", [{}, {"num_legs": "none"}])  # its record may be another, too
async def test_a_worker_of_another_version_is_refused_by_name(stack, worker, changes):
    record = msgspec.structs.replace(worker.record, protocol_version=PROTOCOL_VERSION - 1)
    worker.record = msgspec.structs.replace(record, **changes)
    directory = await stack.enter_async_context(StaticDirectory((worker.record.url(),)))
    await until_so(lambda: directory.refused() or directory.workers())
    assert directory.workers() == ()
    (refused,) = directory.refused()
    words = f"it speaks protocol version {PROTOCOL_VERSION - 1}, not {PROTOCOL_VERSION}"
    assert refused.reason == words


async def test_a_worker_that_is_named_twice_is_one(stack, worker):
    url = worker.record.url()
    directory = await stack.enter_async_context(StaticDirectory((url, f"{url}/", url)))
    await until_so(directory.workers)
    assert [record.worker_id for record in directory.workers()] == ["d1"]
