"""Serving means: our own workers are known, whoever else is."""

import asyncio

import pytest
from aiohttp import web

from neuron_di.clock import Deadline
from neuron_di.config import EtcdOptions, ServeOptions
from neuron_di.errors import ConfigError
from neuron_di.obs import LaunchReport
from neuron_di.serve import Fleet


class Proxy:
    """Serves from the start, by other people's workers."""

    def __init__(self):
        self.known = ["prefill-0-theirs", "decode-0-theirs"]
        self.num_asked = asyncio.Semaphore(0)

    async def answer(self, request):
        if request.path == "/health":
            return web.json_response({"status": "ok"})
        self.num_asked.release()
        workers = [{"record": {"worker_id": name}} for name in self.known]
        return web.json_response({"workers": workers})


@pytest.fixture
async def proxy():
    proxy = Proxy()
    app = web.Application()
    app.router.add_get("/{path}", proxy.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield proxy
    await runner.cleanup()


def fleet_of(proxy, *etcd):
    fleet = Fleet(ServeOptions(model="m", etcd=EtcdOptions(etcd=etcd)))
    fleet.url = proxy.url
    return fleet


@pytest.mark.parametrize("etcd", [(), ("auto",), ("127.0.0.1:2379",)])
async def test_it_waits_for_its_own_workers(proxy, etcd):
    fleet = fleet_of(proxy, *etcd)
    with pytest.raises(ConfigError, match="did not learn of its workers"):
        await fleet._reachable(Deadline.after(0.2))
    waiting = asyncio.create_task(fleet._reachable(Deadline.after(30)))
    for name in fleet._roles:
        await proxy.num_asked.acquire()
        assert not waiting.done()
        proxy.known.append(name + fleet._suffix)
    await waiting


async def test_why_the_registry_does_not_take_them_is_said(proxy):
    fleet = fleet_of(proxy, "127.0.0.1:2379")
    for name, reason in (
        ("decode-0", "permission denied"),
        ("prefill-0", "busy"),
        ("prefill-0", ""),
    ):
        fleet._note_report(name, LaunchReport(event="unannounced", message=reason))
    with pytest.raises(ConfigError, match="in time: decode-0: permission denied"):
        await fleet._reachable(Deadline.after(0.2))
