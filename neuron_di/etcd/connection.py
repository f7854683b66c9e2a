"""Calls to whichever member of etcd answers, again until a deadline, with a token that is good.

try -> answered
    -> unreachable, late,    another member, after a pause once all were tried
       not understood
    -> token refused         authenticate once per call, then the same member
    -> refused               the caller's error
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from neuron_di.clock import Deadline
from neuron_di.errors import ConfigError, PeerGone, PeerRefused, PeerTimeout
from neuron_di.etcd.failures import Failure, Mend, failure_of
from neuron_di.etcd.messages import AUTHENTICATE, AuthenticateRequest, Method
from neuron_di.etcd.packages import grpc
from neuron_di.etcd.security import Pem, Security
from neuron_di.obs import LimitedLogger

_log = LimitedLogger(__name__)

MESSAGE_BYTES_MAX = 16 << 20
TRY_TIMEOUT_S = 1.0  # after it another member is asked
PAUSE_S_MIN = 0.05
PAUSE_S_MAX = 0.5
AUTHENTICATE_TIMEOUT_S = 10.0  # etcd hashes passwords one after the other: 200 workers queue

_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 6000),  # etcd hangs up on who pings more often than every 5 s,
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 0),  # or while nothing is asked
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also what one attempt to connect gets
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),  # closing one client must not touch another's sockets
    ("grpc.enable_http_proxy", 0),
)

_CLOSED = "the connection to etcd is closed"

T = TypeVar("T")

# One try: (the member's stubs, metadata, seconds it gets) -> the answer.
Try = Callable[["Endpoint", tuple[tuple[str, str], ...], float], Awaitable[T]]


class Endpoint:
    """One member of etcd: a channel, connected when it is first used, and its calls.

    All that it ever connects with are these certificates.
    """

    def __init__(self, address: str, pem: Pem | None) -> None:
        self.address = address
        self.pem = pem
        if pem is None:
            self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
            self._channel = grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
        self._stubs: dict[str, Any] = {}

    def stub(self, method: Method) -> Any:
        stub = self._stubs.get(method.path)
        if stub is None:
            make = self._channel.stream_stream if method.is_stream else self._channel.unary_unary
            stub = self._stubs[method.path] = make(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
        return stub

    async def close(self) -> None:
        self._stubs.clear()
        await self._channel.close(grace=None)


class Connection:
    """The members of one etcd, while entered. Used from one event loop.

    `num_attempts` counts every try, `num_authentications` every token. Nothing has to listen
    yet when it is entered.
    """

    def __init__(self, addresses: Sequence[str], security: Security) -> None:
        self._addresses = tuple(addresses)
        self._security = security
        self._endpoints: list[Endpoint] = []
        self._current = 0
        self._token: str | None = None
        self._authenticating: dict[str, asyncio.Task[str]] = {}  # by the member's address
        self._closing: set[asyncio.Task[None]] = set()
        self.num_attempts = 0
        self.num_authentications = 0

    def open(self) -> None:
        self._endpoints = [Endpoint(each, self._pem()) for each in self._addresses]

    async def close(self) -> None:
        endpoints, self._endpoints = self._endpoints, []
        for task in (tasks := list(self._authenticating.values())):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for endpoint in endpoints:
            await endpoint.close()
        if self._closing:
            await asyncio.wait(self._closing)

    async def call(
        self, method: Method, request: Any, deadline: Deadline, *, may_repeat: bool = True
    ) -> Any:
        """The answer to one request. Without `may_repeat` it is sent again only if it was not.

        PeerTimeout or PeerGone when no member answered before the deadline, PeerRefused for
        what etcd will not do, RemoteProtocolError for what is no etcd.
        """

        async def attempt(
            endpoint: Endpoint, metadata: tuple[tuple[str, str], ...], timeout_s: float
        ) -> Any:
            if not may_repeat:
                timeout_s = deadline.remaining_s()
            return await endpoint.stub(method)(request, timeout=timeout_s, metadata=metadata)

        return await self.persist(attempt, deadline, may_repeat=may_repeat)

    async def persist(self, attempt: Try[T], deadline: Deadline, *, may_repeat: bool = True) -> T:
        """Try until it works, cannot work, or the deadline has passed."""
        pause_s, num_tries, is_renewed = PAUSE_S_MIN, 0, False
        while True:
            endpoint, token = self.endpoint(), self._token
            timeout_s = min(TRY_TIMEOUT_S, deadline.remaining_s())
            try:
                token = await self.token(endpoint, timeout_s)
                self.num_attempts += 1
                return await attempt(endpoint, metadata_of(token), timeout_s)
            except grpc.aio.AioRpcError as error:
                failure = failure_of(error.code(), error.details(), endpoint.address)
            except TimeoutError:
                late = PeerTimeout(f"etcd at {endpoint.address} did not authenticate us in time")
                failure = Failure(late, Mend.ANOTHER_TRY)
            except (grpc.aio.UsageError, asyncio.CancelledError):
                if not self.was_closed(endpoint):
                    raise
                failure = Failure(PeerGone(_CLOSED), Mend.ANOTHER_TRY, may_have_happened=True)
            if failure.mend is Mend.NEW_TOKEN and self._security.user and not is_renewed:
                is_renewed = True
                self.forget(token)
                continue
            is_final = failure.may_have_happened and not may_repeat
            is_over = deadline.has_passed() or not self._endpoints
            if failure.mend is not Mend.ANOTHER_TRY or is_final or is_over:
                raise failure.error
            self.leave(endpoint)
            num_tries += 1
            if num_tries % len(self._addresses) == 0:
                if deadline.remaining_s() < 2 * pause_s:  # a try in a hurry would hide the reason
                    raise failure.error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def endpoint(self) -> Endpoint:
        """The member that answered last, as far as we know."""
        if not self._endpoints:
            raise PeerGone(_CLOSED)
        return self._endpoints[self._current]

    def was_closed(self, endpoint: Endpoint) -> bool:
        """After a call that was cancelled: whether that was because its channel was closed."""
        task = asyncio.current_task()
        return endpoint not in self._endpoints and (task is None or not task.cancelling())

    def leave(self, endpoint: Endpoint) -> None:
        """Use another member from now on, unless that has been done already.

        Where certificates were renewed, this member is dialled anew with those when its turn comes.
        """
        if endpoint not in self._endpoints:
            return
        index, pem = self._endpoints.index(endpoint), self._pem()
        if pem != endpoint.pem:
            self._endpoints[index] = Endpoint(endpoint.address, pem)
            closing = asyncio.create_task(endpoint.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if index == self._current:
            self._current = (self._current + 1) % len(self._endpoints)

    def _pem(self) -> Pem | None:
        return None if self._security.pem is None else self._security.pem()

    async def token(self, endpoint: Endpoint, timeout_s: float) -> str | None:
        """What shows who we are; empty where etcd asks nobody, None where we have no user.

        TimeoutError when it is not there in time; whoever asks next waits on for the same one.
        """
        if self._security.user is None or self._token is not None:
            return self._token
        task = self._authenticating.get(endpoint.address)
        if task is None:
            task = asyncio.create_task(self._authenticate(endpoint))
            self._authenticating[endpoint.address] = task
            task.add_done_callback(partial(self._authenticated, endpoint.address))
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(task)

    def forget(self, token: str | None) -> None:
        """Authenticate anew before the next call, unless another token is there already."""
        if token == self._token:
            self._token = None

    async def _authenticate(self, endpoint: Endpoint) -> str:
        user, password = self._security.user, self._security.password
        assert password is not None, "a user has one"
        try:
            request = AuthenticateRequest(name=user, password=password())
        except ConfigError as error:  # its file was there when we started
            raise PeerRefused(error.message) from None
        self.num_attempts += 1
        self.num_authentications += 1
        try:
            answer = await endpoint.stub(AUTHENTICATE)(request, timeout=AUTHENTICATE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if "authentication is not enabled" not in (error.details() or ""):
                raise
            _log.warning("etcd_asks_nobody", reason="authentication is not enabled in etcd")
            return ""
        token: str = answer.token
        return token

    def _authenticated(self, address: str, task: asyncio.Task[str]) -> None:
        del self._authenticating[address]
        if not task.cancelled() and task.exception() is None:
            self._token = task.result()


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """How a token is sent."""
    return (("token", token),) if token else ()
