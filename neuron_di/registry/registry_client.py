"""The registry of another process, reached over ZMQ."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Self, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from neuron_di.errors import (
    ConfigError,
    PeerError,
    PeerGone,
    PeerRefused,
    PeerTimeout,
    RemoteProtocolError,
)
from neuron_di.obs import LimitedLogger
from neuron_di.registry.link import CALLS_MAX, open_socket
from neuron_di.registry.registry import LeaseId, RegistryEvent, Snapshot
from neuron_di.registry.supervised import Supervised
from neuron_di.wire import (
    RECORD_BYTES_MAX,
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
    RegistryCall,
    RegistryRefused,
    RevokeLease,
    encode_msgpack,
    registry_answer_decoder,
)

_log = LimitedLogger(__name__)  # an outage brings them about

CALL_TIMEOUT_S = 2.0
WATCH_WAIT_S = 1.5  # the registry answers at the next change, or after this: else it hangs
WATCH_PAUSE_S = 0.05  # at least, between two looks: what changes meanwhile is seen together
RETRY_S = 0.25

A = TypeVar("A", LeaseGranted, KeyPut, LeaseRemaining, LeaseRevoked, KeysListed)


class RegistryClient:
    """A Registry, and watchable, while entered: `async with RegistryClient("tcp://host:port")`.

    A call ends with its answer, or with PeerTimeout after `call_timeout_s` seconds; nothing
    has to listen yet when the client is entered. Of many calls at once CALLS_MAX are under way,
    the others wait their turn. Calls that wait when the connection breaks end
    with PeerGone. `num_malformed` counts answers that could not be understood.
    """

    num_dropped = 0

    def __init__(self, address: str, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._address = address
        self._call_timeout_s = call_timeout_s
        self._calls = itertools.count(1)
        self._pending: dict[int, asyncio.Future[RegistryAnswer]] = {}
        self._turns = asyncio.Semaphore(CALLS_MAX)
        self._receiving = Supervised("registry's link", self._receive)
        self._monitoring = Supervised("registry link's monitor", self._monitor)
        self._watch_trouble = ""  # why the last look of a watch failed
        self.num_malformed = 0

    def trouble(self) -> str:
        """Why a watch hears nothing; empty while all is well."""
        return self._receiving.trouble() or self._monitoring.trouble() or self._watch_trouble

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
        self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        async with AsyncExitStack() as stack:
            stack.callback(self._context.destroy, linger=0)
            stack.callback(self._socket.disable_monitor)
            stack.callback(self._end_calls, "the link to the registry was closed")
            for part in (self._receiving, self._monitoring):
                await stack.enter_async_context(part)
            self._parts = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parts.aclose()

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

    async def watch(self, prefix: str) -> AsyncGenerator[RegistryEvent, None]:
        """As WatchableRegistry says, in snapshots only.

        What changes while one is read may be as it was: the next one follows at once.
        While the registry cannot be reached nothing is said: what was known stays known.
        """
        seen = ""
        while True:
            try:
                version, values = await self._all(prefix, seen)
            except PeerError as error:
                # Once is no news yet: a proxy that ends takes its registry along.
                if self._watch_trouble:
                    _log.warning("registry_unreachable", reason=error.message)
                self._watch_trouble = error.message
                await asyncio.sleep(RETRY_S)
                continue
            self._watch_trouble = ""
            if version != seen:
                seen = version
                yield Snapshot(values)
            await asyncio.sleep(WATCH_PAUSE_S)

    async def _all(self, prefix: str, seen: str) -> tuple[str, dict[str, bytes]]:
        """Every key and the version they are of; no key where that is the one that was seen.

        Then it may take until something changes. The version is the first page's: what changed
        between two pages is seen by the next look, at once. To begin again at each change would
        take for ever where many workers are busy.
        """
        version, values, after = "", dict[str, bytes](), ""
        wait_s = WATCH_WAIT_S if seen else 0.0
        while True:
            request = ListKeys(
                call=next(self._calls), prefix=prefix, after=after, seen=seen, wait_s=wait_s
            )
            page = await self._ask(request, KeysListed, wait_s=wait_s)
            if page.values is None:
                return page.version, {}
            version = version or page.version
            values |= page.values
            if page.is_last:
                return version, values
            before, after = after, max(page.values, default="")
            if after <= before:
                raise RemoteProtocolError("the registry's pages do not go on")

    async def _ask(self, request: RegistryCall, answer_type: type[A], wait_s: float = 0.0) -> A:
        """The answer, which must be of this type, before the deadline.

        `wait_s` is what the registry may take beside that.
        """
        timeout_s = self._call_timeout_s + wait_s
        future = asyncio.get_running_loop().create_future()
        self._pending[request.call] = future
        try:
            async with asyncio.timeout(timeout_s), self._turns:
                if not future.done():  # the link may have ended before its turn
                    await self._send(request)
                answer = await future
        except TimeoutError:
            raise PeerTimeout(
                f"the registry at {self._address} did not answer within {timeout_s:g} s"
            ) from None
        finally:
            del self._pending[request.call]
            if future.done() and not future.cancelled():
                future.exception()  # the link may have ended before anything was sent: no news
        if isinstance(answer, RegistryRefused):
            raise PeerRefused(f"the registry refused: {answer.reason}")
        if not isinstance(answer, answer_type):
            raise RemoteProtocolError(f"the registry answered with {type(answer).__name__}")
        return answer

    async def _send(self, request: RegistryCall) -> None:
        """Nothing is sent where the socket is closed meanwhile, which has ended the call."""
        sending = asyncio.ensure_future(self._socket.send(encode_msgpack(request)))
        try:
            await asyncio.wait((sending,))
        finally:
            sending.cancel()
        if not sending.cancelled():  # as ZMQ ends it then: nobody has cancelled our caller
            sending.result()

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

    async def _monitor(self) -> None:
        """The connection broke: what was asked on it is not answered any more."""
        while True:
            await recv_monitor_message(self._events)
            self._end_calls("the registry hung up")

    def _end_calls(self, reason: str) -> None:
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(PeerGone(reason))
