"""How many sockets connections take (N-43, N-44), counted in ZMQ itself: real links."""

import asyncio

import pytest
import zmq

from neuron_di.types import RequestId


@pytest.fixture
def opened(monkeypatch):
    """The kinds of the ZMQ sockets that are opened, in order."""
    kinds = []
    open_socket = zmq.Context.socket

    def count(context, kind, *args, **kwargs):
        kinds.append(kind)
        return open_socket(context, kind, *args, **kwargs)

    monkeypatch.setattr(zmq.Context, "socket", count)
    return kinds


async def hand_over(prefill, decode, number):
    request_id = RequestId(f"request-{number}")
    prefill.park(request_id)
    token = await decode.hand_over(prefill, [0, 1], request_id)
    assert token.error() is None


async def test_n43_a_second_request_to_the_same_pair_opens_no_socket(cluster, opened):
    prefill, decode = cluster.prefill(), cluster.decode()
    await hand_over(prefill, decode, 0)
    before = list(opened)
    assert zmq.DEALER in before
    for number in range(1, 6):
        await hand_over(prefill, decode, number)
    assert opened == before
    assert len(decode.connector.connection_dict) == 1


async def test_n44_one_prefill_worker_serves_three_by_one_send_buffer_and_one_socket(
    cluster, opened
):
    prefill = cluster.prefill()
    decodes = [cluster.decode(worker_id=f"decode-{number}") for number in range(3)]
    await asyncio.gather(*(hand_over(prefill, each, at) for at, each in enumerate(decodes)))
    assert prefill.connector._send_buffer is prefill.buffer
    assert prefill.connector.connections() == ["decode-0", "decode-1", "decode-2"]
    assert opened.count(zmq.ROUTER) == 1
    assert opened.count(zmq.DEALER) == 3
