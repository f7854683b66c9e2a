"""What a client of the registry waits for, and what it says when that was too long."""

import asyncio
import gc

import pytest
import zmq

from neuron_di.errors import PeerTimeout
from neuron_di.registry import RegistryClient, RegistryServer, registry_client
from neuron_di.registry.registry_server import LIST_WAIT_S_MAX
from neuron_di.wire import RECORD_BYTES_MAX, KeysListed, ListKeys

NUM_PAGES = 4


async def test_a_deadline_that_passed_is_said_as_it_was():
    context = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1", min_port=20_000, max_port=32_000)
    try:
        async with RegistryClient(f"tcp://127.0.0.1:{port}", call_timeout_s=0.1) as client:
            request = ListKeys(call=1, prefix="/", wait_s=0.2)
            with pytest.raises(PeerTimeout, match=r"did not answer within 0\.3 s"):
                await client._ask(request, KeysListed, wait_s=0.2)
    finally:
        context.destroy(linger=0)


async def test_who_hangs_up_before_anything_was_sent_is_no_error_of_ours():
    loop, told = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: told.append(context["message"]))
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, RegistryClient(f"tcp://127.0.0.1:{port}", call_timeout_s=1) as client:
        asking = asyncio.create_task(client.grant(10))
        async with asyncio.timeout(30):
            while not any(each.done() for each in client._pending.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(PeerTimeout):
            await asking
    del asking
    gc.collect()
    assert told == []


def test_a_registry_that_hangs_is_noticed_soon():
    assert registry_client.CALL_TIMEOUT_S + registry_client.WATCH_WAIT_S <= 4.0
    assert registry_client.WATCH_WAIT_S <= LIST_WAIT_S_MAX


class Restless(RegistryServer):
    """A key changes behind each of its answers: there are many workers, and they are busy."""

    num_answers = 0
    num_changes = 100

    async def _answer(self, client, frames):
        answer = await super()._answer(client, frames)
        self.num_answers += 1
        if self.num_answers <= self.num_changes:
            number = self.num_answers % NUM_PAGES
            await put_page(self._registry, number, self.num_answers)
        return answer


async def put_page(registry, number, value):
    """A key that fills a page."""
    value = bytes([value]) * RECORD_BYTES_MAX
    await registry.put(f"/{number}", value, await registry.grant(3600))


async def test_changes_between_pages_keep_nobody_from_what_there_is(registry):
    for number in range(NUM_PAGES):
        await put_page(registry, number, 0)
    async with (
        Restless(registry, "tcp://127.0.0.1:0") as server,
        RegistryClient(server.address) as client,
    ):
        watch = client.watch("/")
        assert len((await anext(watch)).values) == NUM_PAGES
        assert server.num_answers == NUM_PAGES
        server.num_changes = 0
        assert await anext(watch) == await anext(registry.watch("/"))
        await watch.aclose()
