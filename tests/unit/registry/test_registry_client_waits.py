"""What a client of the registry waits for, and what it says when that was too long."""

import pytest
import zmq

from neuron_di.errors import PeerTimeout
from neuron_di.registry import RegistryClient, registry_client
from neuron_di.registry.registry_server import LIST_WAIT_S_MAX
from neuron_di.wire import KeysListed, ListKeys


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


def test_a_registry_that_hangs_is_noticed_soon():
    assert registry_client.CALL_TIMEOUT_S + registry_client.WATCH_WAIT_S <= 4.0
    assert registry_client.WATCH_WAIT_S <= LIST_WAIT_S_MAX
