"""The registry of another process, reached over ZMQ."""

import asyncio
import itertools
from types import TracebackType
from typing import Self, TypeVar

import zmq
import zmq.asyncio

from neuron_di.errors import (
    ConfigError,
    PeerGone,
    PeerRefused,
    PeerTimeout,
    RemoteProtocolError,
)
from neuron_di.obs import get_logger
from neuron_di.registry.link import open_socket
from neuron_di.registry.registry import LeaseId
from neuron_di.wire import (
    RECORD_BYTES_MAX,
    GrantLease,
    KeepLeaseAlive,
    KeyPut,
    LeaseGranted,
    LeaseRemaining,
    LeaseRevoked,
    PutKey,
    RegistryAnswer,
    RegistryCall,
    RegistryRefused,
    RevokeLease,
    encode_msgpack,
    registry_answer_decoder,
)

_log = get_logger(__name__)

CALL_TIMEOUT_S = 2.0

A = TypeVar("A", LeaseGranted, KeyPut, LeaseRemaining, LeaseRevoked)


class RegistryClient:
    """A Registry for as long as it is entered: `async with RegistryClient("tcp://host:port")`.

    A call ends with its answer, or with PeerTimeout after `call_timeout_s` seconds; nothing
    has to listen yet when the client is entered. `num_malformed` counts answers that could
    not be understood.
    """

    def __init__(self, address: str, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._address = address
        self._call_timeout_s = call_timeout_s
        self._calls = itertools.count(1)
        self._pending: dict[int, asyncio.Future[RegistryAnswer]] = {}
        self.num_malformed = 0

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = open_socket(self._context, zmq.DEALER, self._address)
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"{self._address} is not the address of a registry: {error}"
            ) from None
        self._task = asyncio.create_task(self._receive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(PeerGone("the link to the registry was closed"))
        self._context.destroy(linger=0)
        if not self._task.cancelled():
            self._task.result()  # it had failed, which is our own bug: show it

    async def grant(self, ttl_s: float) -> LeaseId:
        answer = await self._ask(GrantLease(call=next(self._calls), ttl_s=ttl_s), LeaseGranted)
        return LeaseId(answer.lease)

    async def put(self, key: str, value: bytes, lease: LeaseId) -> None:
        if len(value) > RECORD_BYTES_MAX:  # the link would be cut
            raise PeerRefused(f"a value has at most {RECORD_BYTES_MAX} bytes, not {len(value)}")
        request = PutKey(call=next(self._calls), key=key, value=value, lease=lease)
        await self._ask(request, KeyPut)

    async def keep_alive(self, lease: LeaseId) -> float:
        request = KeepLeaseAlive(call=next(self._calls), lease=lease)
        return (await self._ask(request, LeaseRemaining)).ttl_s

    async def revoke(self, lease: LeaseId) -> None:
        await self._ask(RevokeLease(call=next(self._calls), lease=lease), LeaseRevoked)

    async def _ask(self, request: RegistryCall, answer_type: type[A]) -> A:
        """The answer, which must be of this type, before the deadline."""
        future = asyncio.get_running_loop().create_future()
        self._pending[request.call] = future
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await self._socket.send(encode_msgpack(request))
                answer = await future
        except TimeoutError:
            raise PeerTimeout(
                f"the registry at {self._address} did not answer within {self._call_timeout_s} s"
            ) from None
        finally:
            del self._pending[request.call]
        if isinstance(answer, RegistryRefused):
            raise PeerRefused(f"the registry refused: {answer.reason}")
        if not isinstance(answer, answer_type):
            raise RemoteProtocolError(f"the registry answered with {type(answer).__name__}")
        return answer

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                answer = registry_answer_decoder.decode(frames[0])
            except RemoteProtocolError as error:
                self.num_malformed += 1
                _log.warning("registry_answer_malformed", reason=error.message)
                continue
            future = self._pending.get(answer.call)
            if future is not None and not future.done():  # else it came after its deadline
                future.set_result(answer)
