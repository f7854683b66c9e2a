"""HTTP/2: who resets each request at once, and sends any number of them in few bytes."""

import asyncio

import h2.connection
from h2_client import H2Client
from raw_http import RawClient
from running_proxy import AT_ONCE, RunningProxy

from neuron_di.config import ProxyOptions
from neuron_di_proxy import hypercorn_side

PATIENCE_S = 60
MANY = 300


def reset_at_once(state, numbers):
    """Requests of these numbers, each of them reset."""
    for number in numbers:
        pseudo = {":method": "GET", ":path": "/v1/models", ":scheme": "http", ":authority": "a"}
        state.send_headers(number, list(pseudo.items()), end_stream=True)
        state.reset_stream(number)


async def test_few_of_them_are_under_way_at_a_time():
    """So that they take little memory, and others have their turns of the loop."""
    most = 0

    async def watch():
        nonlocal most
        while True:
            most = max(most, len(asyncio.all_tasks()))
            await asyncio.sleep(0)

    async with (
        RunningProxy(ProxyOptions(limits=AT_ONCE), []) as proxy,
        RawClient(proxy.address) as raw,
        asyncio.timeout(PATIENCE_S),
    ):
        client = H2Client(raw)
        reset_at_once(client.state, range(1, 2 * MANY, 2))
        watching = asyncio.create_task(watch())
        client.ask(2 * MANY + 1, "/live")
        while 2 * MANY + 1 not in client.ended:
            assert await client.hear()
        watching.cancel()
    assert client.statuses == {2 * MANY + 1: 200}
    assert most < MANY / 2


async def test_little_is_taken_apart_at_a_time(monkeypatch):
    """A frame may have nine bytes: 64 KiB of them would take the loop for long."""
    sizes = []
    receive = h2.connection.H2Connection.receive_data

    def note(self, data):
        if not self.config.client_side:
            sizes.append(len(data))
        return receive(self, data)

    monkeypatch.setattr(h2.connection.H2Connection, "receive_data", note)
    async with (
        RunningProxy(ProxyOptions(limits=AT_ONCE), []) as proxy,
        RawClient(proxy.address) as raw,
        asyncio.timeout(PATIENCE_S),
    ):
        client = H2Client(raw)
        client.ask(1, "/v1/completions", b" " * (1 << 17))
        while 1 not in client.ended:
            assert await client.hear()
    assert sum(sizes) > 1 << 17
    assert max(sizes) <= hypercorn_side._READ_BYTES_MAX
