"""Lets workers of other processes reach an embedded registry."""

import asyncio
import math
from contextlib import AsyncExitStack, suppress
from typing import Self

import zmq
import zmq.asyncio

from neuron_di.clock import now_s
from neuron_di.errors import ConfigError, PeerRefused, RemoteProtocolError
from neuron_di.obs import LimitedLogger
from neuron_di.registry.embedded import EmbeddedRegistry
from neuron_di.registry.link import open_socket
from neuron_di.registry.registry import LeaseId
from neuron_di.registry.supervised import Supervised
from neuron_di.wire import (
    GrantLease,
    KeepLeaseAlive,
    KeyPut,
    KeysListed,
    LeaseGranted,
    LeaseRemaining,
    LeaseRevoked,
    ListKeys,
    PutKey,
    RegistryAnswer,
    RegistryRefused,
    RevokeLease,
    encode_msgpack,
    registry_call_decoder,
)

_log = LimitedLogger(__name__)  # whoever reaches the port brings its lines about

SWEEP_INTERVAL_S = 0.5  # between two looks for leases that ended
LIST_WAIT_S_MAX = 10.0
WAITING_MAX = 256  # clients that wait for a change; one more is answered at once


class RegistryServer:
    """Answers workers while entered: `async with RegistryServer(registry, "tcp://127.0.0.1:0")`.

    `address` is where it listens, the port filled in. `num_malformed` counts messages that
    could not be understood.
    """

    def __init__(self, registry: EmbeddedRegistry, bind: str) -> None:
        self._registry = registry
        self._bind = bind
        self._serving = Supervised("registry's server", self._serve)
        self._sweeping = Supervised("registry's sweeper", self._sweep)
        self._waiting: dict[bytes, asyncio.Task[None]] = {}  # by client: for a change
        self.address = ""
        self.num_malformed = 0

    def trouble(self) -> str:
        """What failed lately by a bug of ours; empty while all is well."""
        return self._serving.trouble() or self._sweeping.trouble()

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, self._bind)
        try:
            self._socket.bind(self._bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"the registry cannot listen on {self._bind}: {error}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._registry.is_served_by(self.trouble)
        async with AsyncExitStack() as stack:
            stack.callback(self._context.destroy, linger=0)
            stack.push_async_callback(self._end_waiting)
            for part in (self._serving, self._sweeping):
                await stack.enter_async_context(part)
            self._parts = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parts.aclose()

    async def _serve(self) -> None:
        while True:
            client, *frames = await self._socket.recv_multipart()
            answer = await self._answer(client, frames)
            if answer is not None:
                await self._send(client, answer)
            # What waits is received at once: a flood must not keep the loop from all else.
            await asyncio.sleep(0)

    async def _send(self, client: bytes, answer: RegistryAnswer) -> None:
        # Without waiting: a client that does not read must not hold up the others.
        with suppress(zmq.ZMQError):
            await self._socket.send_multipart([client, encode_msgpack(answer)], flags=zmq.NOBLOCK)

    async def _sweep(self) -> None:
        swept_s = now_s()
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            # A process that was stopped could not hear its workers: that time does not count,
            # or all of them would vanish at once.
            late_s = now_s() - swept_s - SWEEP_INTERVAL_S
            self._registry.extend_all(max(0.0, late_s))
            swept_s = now_s()
            self._registry.expire()

    async def _answer(self, client: bytes, frames: list[bytes]) -> RegistryAnswer | None:
        """What is said now; None where the client waits for a change."""
        try:
            if len(frames) != 1:
                raise RemoteProtocolError(f"a message has one frame, not {len(frames)}")
            request = registry_call_decoder.decode(frames[0])
        except RemoteProtocolError as error:
            self.num_malformed += 1
            _log.warning("registry_message_malformed", reason=error.message)
            return RegistryRefused(call=0, reason=error.message)
        call = request.call
        try:
            match request:
                case GrantLease():
                    return LeaseGranted(call=call, lease=await self._registry.grant(request.ttl_s))
                case PutKey():
                    await self._registry.put(request.key, request.value, LeaseId(request.lease))
                    return KeyPut(call=call)
                case KeepLeaseAlive():
                    ttl_s = await self._registry.keep_alive(LeaseId(request.lease))
                    return LeaseRemaining(call=call, ttl_s=ttl_s)
                case RevokeLease():
                    await self._registry.revoke(LeaseId(request.lease))
                    return LeaseRevoked(call=call)
                case ListKeys():
                    return None if self._lets_wait(client, request) else self._page(request)
        except PeerRefused as error:
            return RegistryRefused(call=call, reason=error.message)

    def _page(self, request: ListKeys) -> KeysListed:
        version = self._registry.version
        if request.seen == version:
            return KeysListed(call=request.call, version=version, values=None, is_last=True)
        values, is_last = self._registry.page(request.prefix, request.after)
        return KeysListed(call=request.call, version=version, values=values, is_last=is_last)

    def _lets_wait(self, client: bytes, request: ListKeys) -> bool:
        """Whether the answer comes later. A client waits once: what it asked before is over."""
        before = self._waiting.pop(client, None)
        if before is not None:
            before.cancel()
        is_new = request.seen != self._registry.version or not request.wait_s > 0
        if is_new or len(self._waiting) >= WAITING_MAX:
            return False
        task = asyncio.create_task(self._answer_later(client, request))
        self._waiting[client] = task
        task.add_done_callback(lambda task: self._forget(client, task))
        return True

    async def _answer_later(self, client: bytes, request: ListKeys) -> None:
        wait_s = min(request.wait_s, LIST_WAIT_S_MAX)
        if not math.isfinite(wait_s):
            wait_s = LIST_WAIT_S_MAX
        try:
            async with asyncio.timeout(wait_s):
                while self._registry.version == request.seen:
                    await self._registry.wait_change()
        except TimeoutError:
            pass
        await self._send(client, self._page(request))

    def _forget(self, client: bytes, task: "asyncio.Task[None]") -> None:
        if self._waiting.get(client) is task:
            del self._waiting[client]

    async def _end_waiting(self) -> None:
        tasks = list(self._waiting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
