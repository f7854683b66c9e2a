"""Lets workers of other processes reach an embedded registry."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from neuron_di.clock import now_s
from neuron_di.errors import ConfigError, PeerRefused, RemoteProtocolError
from neuron_di.obs import get_logger
from neuron_di.registry.embedded import EmbeddedRegistry
from neuron_di.registry.link import open_socket
from neuron_di.registry.registry import LeaseId
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

_log = get_logger(__name__)

SWEEP_INTERVAL_S = 0.5  # between two looks for leases that ended


class RegistryServer:
    """Answers workers while entered: `async with RegistryServer(registry, "tcp://127.0.0.1:0")`.

    `address` is where it listens, the port filled in. `num_malformed` counts messages that
    could not be understood; `num_unanswered` answers whose client was gone or did not read.
    """

    def __init__(self, registry: EmbeddedRegistry, bind: str) -> None:
        self._registry = registry
        self._bind = bind
        self.address = ""
        self.num_malformed = 0
        self.num_unanswered = 0

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, self._bind)
        try:
            self._socket.bind(self._bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"the registry cannot listen on {self._bind}: {error}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._sweep())]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._context.destroy(linger=0)
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                task.result()  # a task that had failed is our own bug: show it

    async def _serve(self) -> None:
        while True:
            client, *frames = await self._socket.recv_multipart()
            answer = encode_msgpack(await self._answer(frames))
            try:
                # Without waiting: a client that does not read must not hold up the others.
                await self._socket.send_multipart([client, answer], flags=zmq.NOBLOCK)
            except zmq.ZMQError:
                self.num_unanswered += 1

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

    async def _answer(self, frames: list[bytes]) -> RegistryAnswer:
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
                    return self._page(request)
        except PeerRefused as error:
            return RegistryRefused(call=call, reason=error.message)

    def _page(self, request: ListKeys) -> KeysListed:
        version = self._registry.version
        if request.seen == version:
            return KeysListed(call=request.call, version=version, values=None, is_last=True)
        values, is_last = self._registry.page(request.prefix, request.after)
        return KeysListed(call=request.call, version=version, values=values, is_last=is_last)
