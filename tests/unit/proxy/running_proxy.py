"""The proxy as its clients meet it, on a free port."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Self

import aiohttp
import openai

from neuron_di.config import LimitOptions, ProxyOptions
from neuron_di.wire import WorkerRecord
from neuron_di_proxy.server import bind, serve

# A single attempt, and no waiting for workers: each failure shows.
AT_ONCE = LimitOptions(
    retries_max=0, continuations_max=0, queue_timeout_s=0, drain_timeout_s=2, probe_interval_s=0.05
)


class ListDirectory:
    """A directory that is exactly what a test says. The same object until that changes."""

    def __init__(self, records: list[WorkerRecord]) -> None:
        self.records = records
        self._view: tuple[WorkerRecord, ...] = ()

    def workers(self) -> tuple[WorkerRecord, ...]:
        if self._view != tuple(self.records):
            self._view = tuple(self.records)
        return self._view


class RunningProxy:
    """The proxy on a free port. Without `takes_hot` hypercorn and Quart answer everything."""

    def __init__(
        self, config: ProxyOptions, records: list[WorkerRecord], *, takes_hot: bool = True
    ) -> None:
        self.directory = ListDirectory(records)
        self.shutdown = asyncio.Event()
        sock = bind(replace(config, port=0))
        self.address: tuple[str, int] = sock.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.task = asyncio.create_task(
            serve(config, self.directory, sock, self.shutdown, takes_hot=takes_hot)
        )

    async def __aenter__(self) -> Self:
        self.http = aiohttp.ClientSession(self.url, headers={"Content-Type": "application/json"})
        self.openai = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=30
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.openai.close()
        await self.http.close()
        self.shutdown.set()
        await self.task

    async def post(self, path: str, **fields: object) -> tuple[int, dict]:
        async with self.http.post(path, json=fields) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, dict]:
        async with self.http.get(path) as response:
            return response.status, await response.json()

    async def num_running(self) -> int:
        """Requests that hold a place at this moment."""
        return (await self.get("/status"))[1]["proxy"]["num_running"]


async def until(is_so: Callable[[], Awaitable[bool]], tries: int = 3000) -> None:
    """Ask again and again, each time over HTTP, until it is so. Fails when it never is."""
    for _ in range(tries):
        if await is_so():
            return
    raise AssertionError("it never was so")


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """What follows `data: ` in each SSE event."""
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line.decode().removeprefix("data: ").strip()
