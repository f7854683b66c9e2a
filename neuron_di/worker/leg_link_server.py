"""The worker's end of leg links, and the port where they arrive beside HTTP.

A link only carries: what answers a leg is the `OpenHere` it was made with, which says the leg's
events at once, from the event loop. All that is said in one turn of the loop leaves together.
Each second, and whenever it changes its state, the worker tells every proxy how it is: at the
moments at which an idle proxy of the same host wakes anyway.

Next: neuron_di/wire/leg_link.py, neuron_di/worker/server.py
"""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from neuron_di.clock import until_tick_s
from neuron_di.errors import RemoteProtocolError, TooLarge
from neuron_di.obs import LimitedLogger
from neuron_di.wire import (
    EVENT_BYTES_MAX,
    Failed,
    Finished,
    LegEvent,
    Released,
    Token,
    WorkerStatus,
)
from neuron_di.wire.codec import encode_msgpack
from neuron_di.wire.leg_link import (
    ALIVE_INTERVAL_S,
    FROM_PROXY_BYTES_MAX,
    MAGIC,
    CloseLeg,
    FrameReader,
    LegKind,
    OpenLeg,
    PlainToken,
    Told,
    encode_frame,
    from_proxy_decoder,
)
from neuron_di.worker.leg_report import failed

_log = LimitedLogger(__name__)  # proxies, or who says to be one, bring its lines about

# A proxy that says, reads or acknowledges nothing for so long is gone.
ORPHAN_TIMEOUT_S = 45.0
# Seconds until a connection must have said what it is.
HELLO_TIMEOUT_S = 10.0
# What a proxy may leave unread; the answers of a thousand legs are far less.
UNREAD_BYTES_MAX = 64 << 20
# Of one frame: what many steps have said that were heard of together, after the loop stood still.
EVENTS_MAX = 1000

Say = Callable[[LegEvent], None]
End = Callable[[], object]
# Begins to answer a leg: gets its kind, its document and where to say its events, the last of
# which is terminal. Gives back what ends it early; called for a leg that is over, it does nothing.
OpenHere = Callable[[LegKind, bytes, Say], End]
# How the worker is. None: it only says that it lives, and proxies have to ask.
Status = Callable[[], WorkerStatus | None]

_ALIVE = bytes(encode_frame(Told([], [])))


class LegLinkServer:
    """Makes a protocol per connection: a leg link, or HTTP by `make_http`. Knows all links.

    Once it is closed it ends whatever connects, or first says something: another worker may live
    at this port by then, and a connection must not outlive the worker that answers it.
    """

    def __init__(
        self,
        open_here: OpenHere,
        make_http: Callable[[], asyncio.BaseProtocol],
        status: Status = lambda: None,
    ) -> None:
        self.open_here = open_here
        self.make_http = make_http
        self.links: set[WorkerLegLink] = set()
        self.unknown: set[_FirstBytes] = set()
        self.is_closed = False
        self._status = status
        self._loop = asyncio.get_running_loop()
        self._looking: asyncio.TimerHandle | None = None  # while there are links

    def __call__(self) -> asyncio.Protocol:
        return _FirstBytes(self)

    def say_status(self) -> None:
        """Tell every proxy how this worker is now: call it when that is another state."""
        word = self.word()
        for link in list(self.links):
            link.say_word(word)

    def word(self) -> bytes:
        """The frame that says that this worker lives, and how it is."""
        try:
            status = self._status()
            return _ALIVE if status is None else bytes(encode_frame(Told([], [], status)))
        except Exception as error:  # a bug, and no reason to fall silent: proxies ask, and see it
            _log.warning("status_failed", raised=type(error).__name__)
            return _ALIVE

    def joined(self, link: "WorkerLegLink") -> None:
        """A link begins."""
        self.links.add(link)
        if self._looking is None:
            self._looking = self._loop.call_later(until_tick_s(ALIVE_INTERVAL_S), self._look)

    def left(self, link: "WorkerLegLink") -> None:
        """It ended. May be called twice."""
        self.links.discard(link)
        if not self.links and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look(self) -> None:
        """One word and one timer for all links."""
        self._looking = self._loop.call_later(until_tick_s(ALIVE_INTERVAL_S), self._look)
        word = self.word()
        for link in list(self.links):
            link.look(word)

    def close(self) -> None:
        """End every link, and with it its legs. What they have said is sent."""
        self.is_closed = True
        for connection in list(self.unknown):
            connection.abort()
        for link in list(self.links):
            link.close()


class _FirstBytes(asyncio.Protocol):
    """A connection that has not said yet what it is."""

    def __init__(self, server: LegLinkServer) -> None:
        self._server = server

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server.unknown.add(self)
        loop = asyncio.get_running_loop()
        self._hello = loop.call_later(HELLO_TIMEOUT_S, transport.close)
        if self._server.is_closed:  # it was accepted before
            self.abort()

    def abort(self) -> None:
        self._forget()
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._server.is_closed:
            return  # it was aborted, and this was read before
        self._forget()
        protocol: Any
        if data.startswith(MAGIC[:1]):
            protocol = WorkerLegLink(self._server)
        else:
            protocol = self._server.make_http()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._forget()

    def _forget(self) -> None:
        self._hello.cancel()
        self._server.unknown.discard(self)


class WorkerLegLink(asyncio.Protocol):
    """One proxy process, and its legs here."""

    def __init__(self, server: LegLinkServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._greeting = bytearray()
        self._is_greeted = False
        self._frames = FrameReader(FROM_PROXY_BYTES_MAX)
        self._ends: dict[int, End] = {}  # of the legs that run
        self._tokens: list[PlainToken] = []
        self._events: list[tuple[int, LegEvent]] = []
        self._eventful: set[int] = set()  # legs with something in `_events`
        # Legs that have a report of a prompt to say, and what follows it, once the proxy has read.
        self._waiting: dict[int, list[LegEvent]] = {}
        self._is_flush_due = False
        self._has_ended = False
        self._num_silent = 0  # looks in a row at which nothing had come
        self._num_unread = 0  # and at which the proxy had not read
        self._is_unread = False

    def close(self) -> None:
        """Send what was said, but for what waits until the proxy has read, then end."""
        self._flush()
        self._end_legs()
        self._transport.close()

    def say(self, number: int, event: LegEvent) -> None:
        """Send an event of a leg, together with what all legs say in this turn of the loop.

        A leg that is over is not heard any more.
        """
        if number not in self._ends:
            return
        if self._waiting and (waiting := self._waiting.get(number)) is not None:
            waiting.append(event)
            return
        if type(event) is Token and _is_plain(event):
            if number in self._eventful:
                self._events.append((number, event))
            else:
                self._tokens.append((number, event.index, event.token_id, event.text))
        else:
            self._say_more(number, event)
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _say_more(self, number: int, event: LegEvent) -> None:
        is_large = isinstance(event, Token) and event.prompt is not None
        if is_large and len(encode_msgpack(event)) > EVENT_BYTES_MAX:
            event = failed(TooLarge("the report of the prompt is too large", param="prompt"))
            self._ends[number]()
        elif is_large and self._is_unread:  # a few of them would be more than may be unread
            self._waiting[number] = [event]
            return
        if isinstance(event, Finished | Released | Failed):
            del self._ends[number]
        self._eventful.add(number)
        self._events.append((number, event))
        if is_large or len(self._events) == EVENTS_MAX:
            self._flush()  # two of this size, or many with logprobs, may be more than a frame holds

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._has_ended or not (self._tokens or self._events):
            return
        frame = encode_frame(Told(self._tokens, self._events))
        self._tokens, self._events = [], []
        self._eventful.clear()
        self._transport.write(frame)
        if self._transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self._give_up("unread")

    # What the connection calls.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server.joined(self)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Let the kernel end a connection whose other host vanished without a word.
            timeout_ms = round(ORPHAN_TIMEOUT_S * 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            return
        self._num_silent = 0
        try:
            if not self._is_greeted:
                data = self._greet(data)
            for payload in self._frames.feed(data):
                self._hear(from_proxy_decoder.decode(payload))
        except RemoteProtocolError as error:
            _log.warning("leg_link_refused", reason=error.message)
            self._give_up("nonsense")

    def pause_writing(self) -> None:
        self._is_unread = True

    def resume_writing(self) -> None:
        self._is_unread = False
        self._num_unread = 0
        while self._waiting and not self._is_unread:
            number = next(iter(self._waiting))
            for event in self._waiting.pop(number):
                self.say(number, event)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._end_legs()

    def _greet(self, data: bytes) -> bytes:
        """Take the magic line off the first bytes; the bytes behind it."""
        self._greeting += data
        greeting = bytes(self._greeting[: len(MAGIC)])
        if not MAGIC.startswith(greeting):
            raise RemoteProtocolError("a greeting of another protocol")
        if len(greeting) < len(MAGIC):
            return b""
        self._is_greeted = True
        self.say_word(self._server.word())
        rest = bytes(self._greeting[len(MAGIC) :])
        self._greeting.clear()
        return rest

    def _hear(self, message: object) -> None:
        if isinstance(message, OpenLeg):
            number = message.number
            if number in self._ends:
                raise RemoteProtocolError(f"leg {number} was opened twice")
            say = partial(self.say, number)
            self._ends[number] = self._server.open_here(message.kind, message.document, say)
        elif isinstance(message, CloseLeg):
            end = self._ends.pop(message.number, None)
            self._waiting.pop(message.number, None)
            if end is not None:
                end()

    def say_word(self, word: bytes) -> None:
        """Send the server's word, unless the proxy has not even read what it was sent before."""
        if self._is_greeted and not self._is_unread and not self._has_ended:
            self._transport.write(word)

    def look(self, word: bytes) -> None:
        """Say that we live, and see whether the proxy does.

        Silence is counted in looks, not by the clock: if it was us who stood still, what came
        meanwhile is read before the next look.
        """
        self._num_silent += 1
        self._num_unread = self._num_unread + 1 if self._is_unread else 0
        if max(self._num_silent, self._num_unread) * ALIVE_INTERVAL_S > ORPHAN_TIMEOUT_S:
            self._give_up("silent" if self._num_silent >= self._num_unread else "unread")
            return
        self.say_word(word)

    def _give_up(self, reason: str) -> None:
        _log.warning("leg_link_ended", reason=reason, num_legs=len(self._ends))
        self._end_legs()
        self._transport.abort()

    def _end_legs(self) -> None:
        """End every leg, once: the link carries nothing any more."""
        self._has_ended = True
        self._server.left(self)
        self._waiting.clear()
        while self._ends:
            _, end = self._ends.popitem()
            end()


def _is_plain(token: Token) -> bool:
    return token.logprobs is None and token.prompt is None and not token.in_reasoning
