"""Gives a worker an operator's orders, over HTTP on connections of their own."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Self

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError

from neuron_di.errors import PeerError, PeerGone, PeerTimeout, RemoteProtocolError
from neuron_di.wire import Failed, WorkerRecord, encode_json, leg_event_decoder
from neuron_di.wire.admin import (
    ORDER_BYTES_MAX,
    AbortOrder,
    CommitRole,
    DrainOrder,
    DrainProgress,
    DrainTicket,
    PrepareDrain,
    PrepareRole,
    RoleOutcome,
    RoleTicket,
    drain_progress_decoder,
    drain_ticket_decoder,
    role_outcome_decoder,
    role_ticket_decoder,
)
from neuron_di_proxy.failure import LegFailed, gone

ANSWER_TIMEOUT_S = 10.0  # for an answer, and for each of its lines: there is one each second


class AdminLink:
    """One operator's business with one worker process. Used within `async with`."""

    def __init__(self, record: WorkerRecord) -> None:
        self._record = record

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=ANSWER_TIMEOUT_S, sock_read=ANSWER_TIMEOUT_S
        )
        self._session = aiohttp.ClientSession(
            timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def prepare_drain(self, order: PrepareDrain) -> DrainTicket:
        """A ticket. LegFailed: another order is being carried out there."""
        async with self._asked("POST", "/drain/prepare", order) as response:
            return drain_ticket_decoder.decode(await _body(response))

    def drain(self, order: DrainOrder) -> AsyncGenerator[DrainProgress, None]:
        """The drain, line by line. LegFailed: the worker refuses. PeerError: it is lost."""
        return self._lines("/drain", order)

    async def prepare(self, order: PrepareRole) -> RoleTicket:
        """A ticket. LegFailed: the worker says why not."""
        async with self._asked("POST", "/role/prepare", order) as response:
            return role_ticket_decoder.decode(await _body(response))

    def commit(self, order: CommitRole) -> AsyncGenerator[DrainProgress, None]:
        """The change, line by line, up to the end of the worker that was."""
        return self._lines("/role/commit", order)

    async def abort(self, ticket: str) -> None:
        """Forget a ticket. One that cannot be told forgets it by itself."""
        with suppress(PeerError):
            async with self._asked("POST", "/abort", AbortOrder(ticket=ticket)):
                pass

    async def outcome(self) -> RoleOutcome | None:
        """What became of the last change of role there."""
        async with self._asked("GET", "/role") as response:
            return role_outcome_decoder.decode(await _body(response))

    async def _lines(self, path: str, order: msgspec.Struct) -> AsyncGenerator[DrainProgress, None]:
        progress: DrainProgress | None = None
        async with self._asked("POST", path, order) as response:
            while line := await _in_time(response.content.readline()):
                progress = drain_progress_decoder.decode(line)
                yield progress
        if progress is None or progress.state == "draining":
            raise PeerGone(f"worker {self._record.worker_id} ended before its drain was over")

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, order: msgspec.Struct | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        worker_id = self._record.worker_id
        try:
            async with self._session.request(
                method,
                f"{self._record.url()}{path}",
                data=None if order is None else encode_json(order),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise _refusal(worker_id, await _body(response))
                yield response
        except TimeoutError:
            raise PeerTimeout(f"worker {worker_id} did not answer in time") from None
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            raise gone(worker_id, error) from None
        except HttpProcessingError:
            raise RemoteProtocolError(f"worker {worker_id} sends a line without an end") from None


async def _in_time(reading: Awaitable[bytes]) -> bytes:
    """As a whole: a worker may send a byte now and then for ever."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        return await reading


async def _body(response: aiohttp.ClientResponse) -> bytes:
    return await _in_time(_read(response))


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = await response.content.read(ORDER_BYTES_MAX + 1)
    while len(body) <= ORDER_BYTES_MAX and (more := await response.content.read(ORDER_BYTES_MAX)):
        body += more
    return body


def _refusal(worker_id: str, body: bytes) -> PeerError:
    try:
        event = leg_event_decoder.decode(body)
    except RemoteProtocolError:
        event = None
    if isinstance(event, Failed):
        return LegFailed(event)
    return RemoteProtocolError(f"worker {worker_id} takes no orders: is it of another version?")
