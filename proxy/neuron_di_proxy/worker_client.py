"""Talks to workers: legs of requests over a link to each, and status over HTTP."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Self

import msgspec

from neuron_di.config import LimitOptions
from neuron_di.errors import NeuronDiError, PeerGone, PeerTimeout, RemoteProtocolError, TooLarge
from neuron_di.types import Incarnation
from neuron_di.wire import WorkerRecord, WorkerStatus, encode_json, status_decoder
from neuron_di.wire.announce import STATUS_BYTES_MAX
from neuron_di.wire.codec import LEG_BYTES_MAX
from neuron_di_proxy.failure import gone
from neuron_di_proxy.leg_link import LegLink, document_of
from neuron_di_proxy.token_lane import Lane
from neuron_di_proxy.worker_http import ask_worker, worker_session
from neuron_di_proxy.workers import STATUS_TIMEOUT_S, Hear, LegKind, OnWord

CLIENT_CLOSED = "the proxy has ended its connections to workers"

_Place = tuple[str, int, Incarnation]  # host, port, and which process there


class LinkedLeg:
    """One leg at one worker, on that worker's link. See `workers.Leg`."""

    def __init__(
        self,
        record: WorkerRecord,
        link_to: Callable[[WorkerRecord], LegLink | None],
        kind: LegKind,
        leg: msgspec.Struct,
    ) -> None:
        self.worker_id = record.worker_id
        self._record = record
        self._link_to = link_to
        self._kind: LegKind = kind
        self._leg = leg
        self._link: LegLink | None = None
        self._number = -1
        self._is_closed = False

    def open(self, hear: Hear) -> None:
        """As `workers.Leg.open`."""
        if self._is_closed:
            return
        self._link = self._link_to(self._record)
        if self._link is None:
            self._end_soon(hear, PeerGone(CLIENT_CLOSED))
            return
        document = document_of(self._leg)
        # A longer one would end the link, and with it everybody's legs.
        if sum(map(len, document)) > LEG_BYTES_MAX:
            self._link = None
            self._end_soon(hear, TooLarge("the request is too large for a worker"))
            return
        self._number = self._link.open(self._kind, document, hear)

    def relay(self, lane: Lane) -> None:
        """As `workers.Leg.relay`."""
        if self._link is not None:
            self._link.relay(self._number, lane)

    def close(self) -> None:
        """As `workers.Leg.close`."""
        self._is_closed = True
        if self._link is not None:
            self._link.close_leg(self._number)

    def _end_soon(self, hear: Hear, error: NeuronDiError) -> None:
        asyncio.get_running_loop().call_soon(self._end, hear, error)

    def _end(self, hear: Hear, error: NeuronDiError) -> None:
        if not self._is_closed:
            hear(error)


class WorkerClient:
    """The proxy's connections to all workers. An async context manager; one per process.

    A worker's link is made when it answered how it is, or when its first leg is opened, and stays
    until one side ends: the worker's process, the client, or a silence of `idle_timeout_s`; or
    until nobody watches the worker and no leg is open there.
    """

    def __init__(self, limits: LimitOptions) -> None:
        self._limits = limits
        self._links: dict[_Place, LegLink] = {}
        self._on_word: OnWord | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        self._session = worker_session()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every open leg with PeerGone. May be called more than once."""
        self._is_closed = True
        for link in list(self._links.values()):
            link.end(PeerGone(CLIENT_CLOSED))
        await self._session.close()

    def open_leg(self, record: WorkerRecord, kind: LegKind, leg: msgspec.Struct) -> LinkedLeg:
        """Prepare a leg. Nothing is sent before its `open`."""
        return LinkedLeg(record, self._link_to, kind, leg)

    def on_word(self, hear: OnWord) -> None:
        """Tell `hear` what workers say of themselves by their links, and which links have ended."""
        self._on_word = hear

    def forget(self, record: WorkerRecord) -> None:
        """End the link to a process that nobody watches any more, unless legs are open there."""
        link = self._links.get((record.host, record.api_port, record.incarnation))
        if link is not None and not link.has_legs:
            link.end(PeerGone(f"worker {record.worker_id} is watched no more"))

    def _link_to(self, record: WorkerRecord) -> LegLink | None:
        """The link to a worker's process, made if need be. None once the client is closed."""
        if self._is_closed:
            return None
        place = record.host, record.api_port, record.incarnation
        link = self._links.get(place)
        if link is None:
            link = LegLink(
                record,
                self._limits,
                partial(self._drop, place, record),
                None if self._on_word is None else partial(self._on_word, record),
            )
            self._links[place] = link
        return link

    def _drop(self, place: _Place, record: WorkerRecord, link: LegLink) -> None:
        if self._links.get(place) is link:
            del self._links[place]
            if self._on_word is not None:
                self._on_word(record, None)

    async def status(
        self, record: WorkerRecord, timeout_s: float = STATUS_TIMEOUT_S
    ) -> WorkerStatus:
        """Ask a worker how it is. Raises a PeerError when it does not say within `timeout_s`.

        A worker that answers gets its link, unless nobody would hear what it says there by itself:
        the first request need not wait for a connection.
        """
        http_status, body = await self.ask(
            record, "/status", timeout_s=timeout_s, bytes_max=STATUS_BYTES_MAX
        )
        if http_status != 200:
            raise RemoteProtocolError(
                f"worker {record.worker_id} answered with HTTP status {http_status}"
            )
        status = status_decoder.decode(body)
        if self._on_word is not None and status.record.incarnation == record.incarnation:
            self._link_to(record)
        return status

    async def ask(
        self,
        record: WorkerRecord,
        path: str,
        question: msgspec.Struct | None = None,
        *,
        timeout_s: float,
        bytes_max: int,
    ) -> tuple[int, bytes]:
        """GET from a worker's HTTP side, or POST a question. Its answer's status and body.

        Raises a PeerError when none comes in time, or one of more than `bytes_max` bytes.
        """
        posted = None if question is None else encode_json(question)
        try:
            async with asyncio.timeout(timeout_s):
                return await ask_worker(
                    self._session, f"{record.url()}{path}", bytes_max=bytes_max, question=posted
                )
        except TimeoutError:
            raise PeerTimeout(f"worker {record.worker_id} did not answer in time") from None
        except (OSError, UnicodeError) as error:  # idna refuses some host names
            raise gone(record.worker_id, error) from None
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"worker {record.worker_id}: {error.message}") from None
