"""Calls of somebody's etcd3 client that come late, on a client of the test's own."""

import asyncio
import threading

import pytest

from neuron_di.errors import ConfigError, PeerTimeout
from neuron_di.etcd import etcd3_registry
from neuron_di.etcd.daemon_threads import DaemonThreads
from neuron_di.etcd.etcd3_registry import Etcd3Registry
from neuron_di.registry import LeaseId


class SlowClient:
    """Its first put takes until it may go on."""

    timeout = 1

    def __init__(self):
        self.goes_on = threading.Event()
        self.values = []

    def put(self, key, value, lease):
        if value == b"first":
            self.goes_on.wait(30)
        self.values.append(value)


async def test_a_put_that_comes_late_does_not_undo_a_later_one(monkeypatch):
    monkeypatch.setattr(etcd3_registry, "CALL_TIMEOUT_S", 0.05)
    client = SlowClient()
    async with Etcd3Registry(client, "/neuron-di") as registry:
        for value in (b"first", b"second"):  # given up both, and only one has begun
            with pytest.raises(PeerTimeout):
                await registry.put("/a", value, LeaseId(1))
        assert client.values == []
        client.goes_on.set()
        monkeypatch.setattr(etcd3_registry, "CALL_TIMEOUT_S", 30)
        await registry.put("/a", b"third", LeaseId(1))
        assert client.values == [b"first", b"third"]


@pytest.mark.parametrize("timeout", [None, 0])
def test_a_client_without_a_time_out_is_refused_by_name(timeout):
    client = SlowClient()
    client.timeout = timeout
    with pytest.raises(ConfigError, match="no time-out"):
        Etcd3Registry(client, "/neuron-di")


async def test_threads_do_not_hold_up_the_end():
    threads, held = DaemonThreads(2, "some"), threading.Event()
    calls = [threads.submit(held.wait, 30) for _ in range(2)]
    waiting = threads.submit(int)
    found = [each for each in threading.enumerate() if each.name.startswith("some_")]
    assert [each.daemon for each in found] == [True, True]
    threads.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    with pytest.raises(RuntimeError):
        threads.submit(int)
    held.set()
    assert await asyncio.gather(*map(asyncio.wrap_future, calls)) == [True, True]
    for each in found:
        each.join()


def test_what_a_call_raises_is_its_futures():
    threads = DaemonThreads(1, "one")
    with pytest.raises(ValueError, match="no number"):
        threads.submit(fail).result()
    assert threads.submit(int, "7").result() == 7
    threads.shutdown()


def fail():
    raise ValueError("no number")


def test_once_there_are_threads_again_calls_are_made(monkeypatch):
    threads, start, are_left = DaemonThreads(2, "few"), threading.Thread.start, [False, True, False]

    def start_if_left(thread):
        if not are_left.pop(0):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_left)
    with pytest.raises(RuntimeError, match="new thread"):
        threads.submit(int)
    calls = [threads.submit(int, number) for number in ("7", "8")]  # the first one makes both
    assert [call.result(timeout=20) for call in calls] == [7, 8]
    threads.shutdown()
