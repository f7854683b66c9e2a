"""What /health says of workers that the operator named: one is gone, the asking itself failed."""

import asyncio

from scripted_worker import ScriptedWorker, play_decode, play_prefill

from neuron_di.config import ProxyOptions
from neuron_di_proxy.service import Service
from neuron_di_proxy.static_directory import StaticDirectory
from neuron_di_proxy.status import report_health


async def test_a_failure_of_our_own_is_owned(stack, monkeypatch):
    monkeypatch.setattr("neuron_di_proxy.static_directory.ASK_INTERVAL_S", 0.05)
    workers = [
        await stack.enter_async_context(ScriptedWorker("p1", "prefill")),
        await stack.enter_async_context(ScriptedWorker("d1", "decode")),
    ]
    workers[0].script, workers[1].script = play_prefill, play_decode(2)
    urls = tuple(worker.record.url() for worker in workers)
    directory = await stack.enter_async_context(StaticDirectory(urls))
    service = await stack.enter_async_context(Service(ProxyOptions(), directory))
    async with asyncio.timeout(30):
        while len(directory.workers()) < 2:  # noqa: ASYNC110 - it asks them
            await asyncio.sleep(0.01)

    def health():
        return report_health(service.router, service.health, service.pairs)

    assert health().status == "ok"

    def fail(_):
        raise KeyError("a bug")

    directory.ask_first(fail)
    async with asyncio.timeout(30):
        while not directory.trouble():  # noqa: ASYNC110 - at its next look
            await asyncio.sleep(0.01)
    answer = health()
    assert answer.status == "degraded"
    words = "who is known may be old: the static directory failed (KeyError) and was begun again"
    assert [each.reason for each in answer.degraded] == [words]
    assert len(directory.workers()) == 2
    looks = asyncio.Semaphore(0)
    directory.ask_first(lambda _: looks.release())
    failures = directory._asking.num_failures
    async with asyncio.timeout(30):
        for _ in range(6):  # three looks at two workers, after it has rested
            await looks.acquire()
    assert not directory._asking._task.done()
    assert directory._asking.num_failures == failures


async def test_a_named_worker_that_is_gone_is_missed(stack, monkeypatch):
    """Nobody else names it: without this all would be well for as long as another one serves."""
    monkeypatch.setattr("neuron_di_proxy.static_directory.ASK_INTERVAL_S", 0.05)
    worker = await stack.enter_async_context(ScriptedWorker("b1", "both"))
    urls = ("http://127.0.0.1:1", worker.record.url())
    directory = await stack.enter_async_context(StaticDirectory(urls))
    service = await stack.enter_async_context(Service(ProxyOptions(), directory))
    async with asyncio.timeout(30):
        while not (directory.workers() and directory.refused()):  # noqa: ASYNC110 - it asks them
            await asyncio.sleep(0.01)
    answer = report_health(service.router, service.health, service.pairs)
    assert answer.status == "degraded"
    words = "a worker that was named is not used: it cannot be reached: Connection refused"
    assert [each.reason for each in answer.degraded] == [words]


async def test_health_does_not_say_where_things_are(stack, monkeypatch):
    """It is asked for no key."""
    service = await stack.enter_async_context(Service(ProxyOptions(), StaticDirectory(())))
    trouble = "etcd at 127.0.0.1:21999 cannot be reached: tcp://10.0.0.7:9000, /run/etcd.sock"
    monkeypatch.setattr("neuron_di_proxy.status._directory_trouble", lambda _: trouble)
    answer = report_health(service.router, service.health, service.pairs)
    assert answer.status == "unavailable"
    hidden = "etcd at (hidden) cannot be reached: (hidden), (hidden)"
    assert answer.reason is not None
    assert answer.reason.endswith(hidden)
