"""One question to another process and its answer, over the simulated network."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from neuron_di.errors import LocalProtocolError, PeerError, PeerGone, PeerTimeout
from neuron_di.registry import EmbeddedRegistry
from neuron_di.registry.registry import LeaseId
from neuron_di.testing.network import Network
from neuron_di.testing.virtual_loop import Process

T = TypeVar("T")

CALL_TIMEOUT_S = 2.0


async def ask(
    network: Network,
    source: Process,
    target: Process | None,
    answer: Callable[[], T],
    *,
    timeout_s: float = CALL_TIMEOUT_S,
) -> T:
    """Run `answer` in the other process and return what it says.

    PeerGone when nobody is there; PeerTimeout when nothing comes back; or its own PeerError.
    """
    if target is None:
        await asyncio.sleep(network.latency_s())
        raise PeerGone("the connection was refused")
    there: Process = target
    future: asyncio.Future[T] = network.loop.create_future()

    def settle(result: T | PeerError) -> None:
        if future.done():
            return
        if isinstance(result, PeerError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def serve() -> None:
        try:
            result: T | PeerError = answer()
        except PeerError as error:
            result = error
        if not network.is_cut(there.name, source.name):
            source.call_later(network.latency_s(), settle, result)

    if not network.is_cut(source.name, there.name):
        there.call_later(network.latency_s(), serve)
    try:
        async with asyncio.timeout(timeout_s):
            return await future
    except TimeoutError:
        raise PeerTimeout("no answer in time") from None


class SimRegistryClient:
    """A Registry as a worker's announcer sees it: the proxy's, over the network."""

    def __init__(
        self,
        network: Network,
        process: Process,
        place: str,
        registry_of: Callable[[], EmbeddedRegistry],
    ) -> None:
        self._network = network
        self._process = process
        self._place = place  # the registry's
        self._registry_of = registry_of
        self.last_put = b""  # whether or not it arrived

    async def grant(self, ttl_s: float) -> LeaseId:
        return await self._ask(lambda registry: registry.grant(ttl_s))

    async def put(self, key: str, value: bytes, lease: LeaseId) -> None:
        self.last_put = value
        await self._ask(lambda registry: registry.put(key, value, lease))

    async def keep_alive(self, lease: LeaseId) -> float:
        return await self._ask(lambda registry: registry.keep_alive(lease))

    async def revoke(self, lease: LeaseId) -> None:
        await self._ask(lambda registry: registry.revoke(lease))

    async def _ask(self, call: Callable[[EmbeddedRegistry], Coroutine[Any, Any, T]]) -> T:
        target = self._network.process_at(self._place)
        return await ask(
            self._network, self._process, target, lambda: _run_at_once(call(self._registry_of()))
        )


def _run_at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, as those of the embedded registry."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise LocalProtocolError("the embedded registry waited for something")
