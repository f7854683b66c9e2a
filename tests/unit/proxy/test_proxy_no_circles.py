"""What of a request is left once it is over, while nobody looks for garbage: nothing.

The proxy's collector runs rarely, and a request in a circle of references keeps its body until
then: a few hundred refused prompts would fill the memory.
"""

import asyncio
import contextlib
import gc
import weakref
from dataclasses import replace

import aiohttp
import pytest
from admission_kit import admission_of
from running_proxy import AT_ONCE, RunningProxy, until
from scripted_worker import ScriptedWorker, parked, released, token

from neuron_di.clock import Deadline
from neuron_di.config import LimitOptions, ProxyOptions
from neuron_di.errors import CapacityError
from neuron_di.wire import Failed
from neuron_di_proxy.front_connection import FrontConnection
from neuron_di_proxy.service import Exchange
from neuron_di_proxy.tenant import Tenant

PROMPT = "x" * 50_000
TIMES = 5


async def refuse_client(leg):
    await leg.finish(
        Failed(
            code="context_length_exceeded",
            message="too long",
            http_status=400,
            retryable=False,
            fault="client",
        )
    )


async def refuse_for_now(leg):
    await leg.finish(
        Failed(code="over_capacity", message="no room", http_status=503, retryable=True)
    )


async def idle(leg):
    await leg.closed.wait()


async def prefill(leg):
    await leg.send(token(0, "t"), parked(), released())


async def break_off(leg):
    await leg.break_off()


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_left(kind):
    # Not isinstance(), which asks some objects of torch for more than they like.
    return sum(type(each) is kind for each in gc.get_objects())


async def ask_often(proxy, status):
    for _ in range(TIMES):
        found, _ = await proxy.post("/v1/completions", model="tiny", prompt=PROMPT)
        assert found // 100 == status


@pytest.mark.parametrize(
    ("scripts", "limits", "status"),
    [
        ((refuse_client, idle), AT_ONCE, 4),
        ((refuse_for_now, idle), AT_ONCE, 5),
        ((prefill, break_off), AT_ONCE, 5),
        ((prefill, break_off), replace(AT_ONCE, continuations_max=2, queue_timeout_s=5), 5),
    ],
    ids=["client's fault", "no room", "broken off", "broken off thrice"],
)
async def test_a_failed_request_is_gone(no_collector, scripts, limits: LimitOptions, status):
    async with (
        ScriptedWorker("p1", "prefill", scripts[0]) as one,
        ScriptedWorker("d1", "decode", scripts[1]) as two,
        RunningProxy(ProxyOptions(limits=limits), [one.record, two.record]) as proxy,
    ):
        before = num_left(Exchange)
        await ask_often(proxy, status)
        assert num_left(Exchange) == before


async def test_a_connection_that_found_the_queue_full_is_gone(no_collector):
    limits = replace(AT_ONCE, requests_max=1, queue_max=0, queue_timeout_s=5)
    async with (
        ScriptedWorker("p1", "prefill", idle) as one,
        ScriptedWorker("d1", "decode", idle) as two,
        RunningProxy(ProxyOptions(limits=limits), [one.record, two.record]) as proxy,
    ):
        running = asyncio.create_task(proxy.post("/v1/completions", model="tiny", prompt="a"))
        await until(lambda: at_work(proxy))
        before = num_left(FrontConnection)
        for _ in range(TIMES):
            async with aiohttp.ClientSession(proxy.url, headers={"Connection": "close"}) as http:
                body = {"model": "tiny", "prompt": PROMPT}
                async with http.post("/v1/completions", json=body) as response:
                    assert response.status == 503
        await asyncio.sleep(0.1)  # the connections' ends are heard
        assert num_left(FrontConnection) <= before
        running.cancel()


async def at_work(proxy):
    return await proxy.num_running() == 1


class Body:
    """Of a request; may be referred to weakly."""


async def test_a_request_that_was_pushed_out_of_the_queue_is_gone(no_collector):
    admission = admission_of(1, queue=4)

    async def answer(tenant, body):
        with contextlib.suppress(CapacityError):
            ticket = admission.arrive(tenant)
            try:
                ticket.take(1, 1.0)
                await ticket.turn(Deadline.after(30))
                await asyncio.Event().wait()
            finally:
                ticket.close()
        return body

    bodies = [Body() for _ in range(5)]
    left = [weakref.ref(body) for body in bodies]
    crowd = [asyncio.create_task(answer(Tenant(name="a"), bodies.pop())) for _ in range(5)]
    await asyncio.sleep(0)
    other = asyncio.create_task(answer(Tenant(name="b"), None))
    done, _ = await asyncio.wait(crowd, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    crowd = [task for task in crowd if task not in done]
    done.clear()
    assert sum(ref() is not None for ref in left) == 4
    for task in (*crowd, other):
        task.cancel()
