"""Talks HTTP to workers: legs of requests, and status."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import aiohttp
import msgspec

from neuron_di.config import LimitOptions
from neuron_di.errors import CapacityError, PeerError, PeerGone, PeerTimeout, RemoteProtocolError
from neuron_di.types import WorkerId
from neuron_di.wire import (
    EVENT_BYTES_MAX,
    Failed,
    Finished,
    Released,
    WorkerRecord,
    WorkerStatus,
    encode_json,
    leg_event_decoder,
    status_decoder,
)
from neuron_di_proxy.failure import LegFailed
from neuron_di_proxy.workers import STATUS_TIMEOUT_S, LegKind, Progress

END_OF_LEG_TIMEOUT_S = 1.0  # from a leg's terminal event to the end of its answer
STATUS_BYTES_MAX = 64 << 10


class Leg:
    """One leg at one worker. The first `next` opens it; `close` cancels it there.

    `next` is awaited by one task at a time. Once it raised, only `close` may follow.
    """

    def __init__(
        self, session: aiohttp.ClientSession, worker_id: WorkerId, url: str, body: bytes
    ) -> None:
        self.worker_id = worker_id
        self._session = session
        self._url = url
        self._body = body
        self._response: aiohttp.ClientResponse | None = None
        self._lines: deque[bytes] = deque()
        self._partial = b""

    async def next(self) -> Progress:
        """Wait for the leg's next event.

        Raises LegFailed when the worker says that the leg failed, PeerGone when it cannot be
        reached or hangs up, PeerTimeout when it is silent for too long, RemoteProtocolError
        when it says what cannot be understood.
        """
        with _as_peer_error(self.worker_id):
            while not self._lines:
                await self._read()
            event = leg_event_decoder.decode(self._lines.popleft())
            if isinstance(event, Failed):
                raise LegFailed(event)
            if isinstance(event, Finished | Released):
                await self._expect_end()
            return event

    def close(self) -> None:
        """Cancel the leg if it is still open. The worker sees its connection end."""
        if self._response is not None:
            self._response.close()

    async def _read(self) -> None:
        if self._response is None:
            # A worker has no reason to send us elsewhere.
            self._response = await self._session.post(
                self._url, data=self._body, headers=_JSON, allow_redirects=False
            )
        chunk = await self._response.content.readany()
        if self._response.status != 200:
            raise self._refusal(chunk)
        if not chunk:
            raise PeerGone(f"worker {self.worker_id} ended a leg before it was complete")
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        self._lines.extend(line for line in lines if line)
        if len(self._partial) > EVENT_BYTES_MAX:
            raise RemoteProtocolError(f"worker {self.worker_id} sent a line without end")

    async def _expect_end(self) -> None:
        """See the answer end, so that its connection is free for the next leg."""
        assert self._response is not None, "an event was read"
        try:
            async with asyncio.timeout(END_OF_LEG_TIMEOUT_S):
                rest = self._partial + b"".join(self._lines)
                while chunk := await self._response.content.readany():
                    rest += chunk.strip()  # empty lines only say that the worker is alive
        except TimeoutError:
            self.close()
        else:
            if rest:
                raise RemoteProtocolError(f"worker {self.worker_id} went on after the end of a leg")

    def _refusal(self, body: bytes) -> PeerError | CapacityError:
        """The error that an HTTP status other than 200 means."""
        assert self._response is not None, "it has a status"
        try:
            event = leg_event_decoder.decode(body.strip())
        except RemoteProtocolError:
            event = None
        if isinstance(event, Failed):
            return LegFailed(event)
        text = f"worker {self.worker_id} answered with HTTP status {self._response.status}"
        if self._response.status in (429, 503):
            return CapacityError(text)
        return RemoteProtocolError(text)


class WorkerClient:
    """The proxy's connections to all workers. An async context manager; one per process."""

    def __init__(self, limits: LimitOptions) -> None:
        self._limits = limits

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # the proxy's admission is the limit
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(
                total=self._limits.request_timeout_s,
                sock_connect=self._limits.connect_timeout_s,
                sock_read=self._limits.idle_timeout_s,
            ),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every open leg with PeerGone. May be called more than once."""
        await self._session.close()

    def open_leg(self, record: WorkerRecord, kind: LegKind, leg: msgspec.Struct) -> Leg:
        """Prepare a leg. Nothing is sent before its first `next`."""
        url = f"{record.url()}/legs/{kind}"
        return Leg(self._session, record.worker_id, url, encode_json(leg))

    async def status(
        self, record: WorkerRecord, timeout_s: float = STATUS_TIMEOUT_S
    ) -> WorkerStatus:
        """Ask a worker how it is. Raises a PeerError when it does not say within `timeout_s`."""
        with _as_peer_error(record.worker_id):
            async with asyncio.timeout(timeout_s):
                async with self._session.get(
                    f"{record.url()}/status", allow_redirects=False
                ) as response:
                    body = bytearray()
                    async for chunk in response.content.iter_any():
                        body += chunk
                        if len(body) > STATUS_BYTES_MAX:
                            break
        if response.status != 200:
            raise RemoteProtocolError(
                f"worker {record.worker_id} answered with HTTP status {response.status}"
            )
        return status_decoder.decode(bytes(body))


_JSON = {"Content-Type": "application/json"}


@contextmanager
def _as_peer_error(worker_id: WorkerId) -> Iterator[None]:
    try:
        yield
    except aiohttp.ConnectionTimeoutError:
        raise PeerTimeout(f"worker {worker_id} cannot be reached in time") from None
    except TimeoutError:
        raise PeerTimeout(f"worker {worker_id} did not answer in time") from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
        raise PeerGone(f"worker {worker_id} is gone ({type(error).__name__})") from None
    except aiohttp.ClientError as error:
        raise RemoteProtocolError(
            f"worker {worker_id} does not speak HTTP ({type(error).__name__})"
        ) from None
