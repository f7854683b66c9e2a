"""One client's connection: HTTP/1.1 requests, one after another.

Where it is in that is its `ConnectionState`.

Next: proxy/neuron_di_proxy/service.py
"""

import asyncio
from typing import TYPE_CHECKING, cast

from neuron_di.clock import now_s
from neuron_di.errors import NeuronDiError, TooLarge
from neuron_di.obs import get_logger
from neuron_di_proxy.body_refusal import body_bytes_max, body_late, check_body, head_late
from neuron_di_proxy.choice_request import HOT_PATHS, Endpoint
from neuron_di_proxy.connection_state import ConnectionState as _State
from neuron_di_proxy.failure import Refusal
from neuron_di_proxy.half_close import keeps_listening
from neuron_di_proxy.quart_exchange import QuartExchange
from neuron_di_proxy.request_body import ChunkedBody, SizedBody
from neuron_di_proxy.request_head import RequestHead, check_begun, drop_empty_lines, read_head
from neuron_di_proxy.send_deadline import NEVER, SendDeadline
from neuron_di_proxy.service import Exchange
from neuron_di_proxy.socket_reply import SocketReply
from neuron_di_proxy.socket_rest import is_quiet, unsent_of
from neuron_di_proxy.token_lane import Outlet, outlet_of

if TYPE_CHECKING:
    from neuron_di_proxy.front import Front

PIPELINED_BYTES_MAX = 64 << 10  # of further requests, before one is answered
LEAVING_TIMEOUT_S = 2.0  # for a client to read the last response while it still sends
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_Exchange = Exchange | QuartExchange
_log = get_logger(__name__)


class FrontConnection(asyncio.Protocol):
    """Owned by its transport until that is lost or handed over. Never waits, never raises."""

    def __init__(self, owner: "Front") -> None:
        self._owner = owner
        self._service = owner.service
        self._options = owner.options
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._state = _State.HEAD
        self._deadline_s = now_s() + owner.options.header_timeout_s
        self._send_deadline = SendDeadline(owner.send_timeout_s)
        self._is_full = False  # what was written is not being taken
        self._is_paused = False  # more was sent than is wanted now
        self._is_due = False  # `_go_on` comes with the next turn of the loop
        self._is_idle = False  # between two requests
        self._has_all = False  # the client; until the next response begins
        self._has_eof = False
        self._has_surplus = False  # more was sent than is kept, while a request was answered
        self._closes = False
        self._head: RequestHead | None = None
        self._exchange: _Exchange | None = None
        self._coming: SizedBody | ChunkedBody | None = None  # a body
        self._body = b""  # until `begin_answer`
        self._reply: SocketReply | None = None
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport
        self._outlet: Outlet

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's own class
        tls = transport.get_extra_info("ssl_object")
        self._outlet = outlet_of(transport)
        if not self._owner.joined(self):
            self._state = _State.GONE
            transport.abort()
            return
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            self._hand_over()

    def data_received(self, data: bytes) -> None:
        if self._state in (_State.LEAVING, _State.GONE) or self._has_surplus:
            return
        coming = self._coming
        if isinstance(coming, SizedBody) and not self._received and not self._is_full:
            self._received += coming.add(data)  # what follows the body
            if (body := coming.whole()) is not None:
                self._answer(body)
            return
        self._received += data
        if self._state is _State.ANSWERING:
            self._bound_received()
        elif not (self._is_full or self._is_due):
            self._go_on()
        elif len(self._received) > PIPELINED_BYTES_MAX and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Keep the connection only where an answer is still owed (TLS and HTTP/1.0 cannot)."""
        self._has_eof = True
        is_due = self._is_full or self._is_due
        return keeps_listening(self._transport, self._head, self._reply, is_due=is_due)

    def connection_lost(self, _: Exception | None) -> None:
        self._state = _State.GONE
        self._outlet.close()  # before its number is another connection's
        self._owner.left(self)
        self._coming = None
        self._received.clear()
        if self._task is not None:
            self._task.cancel()
        else:
            self._close_exchange()

    def pause_writing(self) -> None:
        self._is_full = True
        self._send_deadline.begin()
        if self._reply is not None:
            self._reply.is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._send_deadline.end()
        if self._reply is not None:
            self._reply.is_full = False
        if (self._received or self._is_paused or self._has_eof) and not self._is_due:
            self._go_on()

    # What the owner calls.

    def sweep(self, at_s: float, silent_max: float) -> None:
        """Look whether a deadline has passed, and whether a stream is silent for too long."""
        is_idle = self._state is _State.HEAD and self._is_idle
        is_answered = is_idle or self._state is _State.LEAVING
        if self._is_full or (is_answered and not self._has_all):
            num_unsent = self.num_unsent
            self._has_all = num_unsent == 0
            self._send_deadline.see(num_unsent, at_s)
            if is_answered and num_unsent:  # who still reads a response is not idle
                wait_s = self._options.keep_alive_s if is_idle else LEAVING_TIMEOUT_S
                self._deadline_s = max(self._deadline_s, at_s + wait_s)
        else:  # what was to be read has been: the next request has all its time
            self._send_deadline.end()
        if at_s >= self._send_deadline.at_s:
            self._transport.abort()
        elif at_s >= self._deadline_s:
            self._be_late()
        reply = self._reply
        if reply is not None and reply.is_streaming and not self._is_full:
            reply.sweep(silent_max)

    @property
    def is_resting(self) -> bool:
        """Whether nothing is under way, either way, and has not been for a while."""
        is_waiting = self._state is _State.HEAD and not (self._received or self.num_unsent)
        return is_waiting and is_quiet(self._transport)

    @property
    def num_unsent(self) -> int:
        """As `unsent_of`."""
        return unsent_of(self._transport)

    def begin_answer(self) -> None:
        """Answer the request that has come, unless its client has left."""
        body, self._body = self._body, b""
        if self._state is _State.ANSWERING:
            assert self._exchange is not None
            assert self._reply is not None
            self._task = self._loop.create_task(self._run(self._exchange, body, self._reply))
            self._task.add_done_callback(self._ended)

    def close(self) -> None:
        """End the connection as soon as what it owes is written."""
        self._closes = True
        if self._state is _State.HEAD:
            self._leave(is_read=True)

    def abort(self) -> None:
        """End the connection now."""
        self._transport.abort()

    # From bytes to requests.

    def _go_on(self) -> None:
        """Do what can be done with what was received, and read on where that was all."""
        self._is_due = False
        while self._received and not self._is_full:
            state = self._state
            try:
                if state is _State.HEAD:
                    self._take_head()
                elif state is _State.BODY:
                    self._take_body()
            except NeuronDiError as error:
                # Where the next request would begin is not known.
                self._refuse(self._refusal(error), is_read=False)
            if self._state is state:
                break
        is_waiting = self._is_full or self._is_due
        if self._is_paused and not is_waiting and self._state is not _State.GONE:
            self._is_paused = False
            self._transport.resume_reading()
        if self._has_eof and not is_waiting and self._state in (_State.HEAD, _State.BODY):
            self._leave(is_read=True)  # there is no more

    def _take_head(self) -> None:
        received = self._received
        if received.startswith(b"\r\n"):
            drop_empty_lines(received)
        if received.startswith(_HTTP2_PREFACE):
            self._hand_over()
            return
        is_preface = _HTTP2_PREFACE.startswith(bytes(received[:25]))  # some of it
        end = -1 if is_preface else received.find(b"\r\n\r\n")
        num_head_bytes = end + 4 if end >= 0 else len(received)
        check_begun(received, num_head_bytes, self._options.header_bytes_max)
        if end < 0:
            if self._is_idle:
                self._is_idle = False
                self._deadline_s = now_s() + self._options.header_timeout_s
            return
        head = read_head(bytes(received[:num_head_bytes]))
        self._owner.begins(self)
        endpoint = None
        if head.method == "POST" and self._owner.takes_hot:
            endpoint = HOT_PATHS.get(head.path) or HOT_PATHS.get(head.route)
        self._head = head
        del received[:num_head_bytes]
        self._open(head, endpoint)

    def _open(self, head: RequestHead, endpoint: Endpoint | None) -> None:
        bytes_max: int = self._options.body_bytes_max
        try:
            if endpoint is None:
                bytes_max = body_bytes_max(head.method, head.route, bytes_max)
                self._exchange = other = self._owner.open_other(head, self._transport)
                other.check_key()
            else:
                self._exchange = self._service.open(endpoint, head.headers)
            check_body(head.headers, head.body_bytes, bytes_max, is_json=endpoint is not None)
        except Exception as error:
            if not isinstance(error, NeuronDiError):
                _log.exception("internal_error")
            refusal = self._refusal(error)
            num_bytes = head.body_bytes
            has_come = num_bytes is not None and num_bytes <= len(self._received)
            is_read = has_come and not isinstance(error, TooLarge)
            if is_read:
                del self._received[:num_bytes]
            self._refuse(refusal, is_read=is_read)
            return
        received, num_bytes = self._received, head.body_bytes
        if num_bytes is None:
            self._coming = ChunkedBody(bytes_max)
        elif len(received) < num_bytes:
            self._coming = SizedBody(num_bytes)
        else:
            body = bytes(received) if len(received) == num_bytes else bytes(received[:num_bytes])
            del received[:num_bytes]
            self._answer(body)
            return
        if head.wants_continue and not received:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._state = _State.BODY
        self._deadline_s = now_s() + self._options.body_timeout_s

    def _take_body(self) -> None:
        assert self._coming is not None
        body = self._coming.take(self._received)
        if body is not None:
            self._answer(body)

    # From requests to responses.

    def _answer(self, body: bytes) -> None:
        assert self._head is not None
        self._coming = None
        self._state = _State.ANSWERING
        self._deadline_s = NEVER
        self._reply = self._new_reply(self._head)
        self._bound_received()
        self._body = body
        if self._has_eof:  # it was sent before that
            keeps_listening(self._transport, self._head, self._reply)
        self._owner.let_answer(self)

    def _new_reply(self, head: RequestHead | None) -> SocketReply:
        if head is None or not head.keeps_alive or self._owner.is_draining:
            self._closes = True
        is_chunked = head is None or head.version == "1.1"
        reply = SocketReply(
            self._transport, self._outlet, is_chunked=is_chunked, closes=self._closes
        )
        reply.is_full, self._has_all = self._is_full, False
        return reply

    async def _run(self, exchange: _Exchange, body: bytes, reply: SocketReply) -> None:
        await exchange.answer(body, reply)
        self._answered()  # a next request need not wait until the loop says that the task is over

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """A task is over. Unless it got to its end, it was given up or, by a bug, failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.exception("front_failed", raised=error)
            self._transport.abort()  # where its next request begins is not certain
        if task is self._task:
            self._answered()

    def _answered(self) -> None:
        reply, self._reply, self._task = self._reply, None, None
        self._close_exchange()
        if self._state is _State.GONE:
            return
        assert reply is not None
        if not reply.is_over:  # a bug: the client must not take it for an end
            self._transport.abort()
        elif self._closes or (self._has_eof and not self._received):
            self._leave(is_read=not self._has_surplus)
        else:
            self._wait_for_head()
            if self._received or self._is_paused:
                self._go_on()

    def _refusal(self, error: Exception) -> Refusal:
        if self._exchange is not None:
            return self._exchange.refuse(error)
        return self._service.refuse(error, self._head.headers if self._head else None)

    def _refuse(self, refusal: Refusal, *, is_read: bool) -> None:
        """Answer at once. Unless the request was read to its end, that is the last response."""
        self._close_exchange()
        headers = list(refusal.headers)
        reply = self._new_reply(self._head)
        if not is_read and not self._closes:
            self._closes = True
            headers.append(("connection", "close"))
        body = refusal.body
        first = b"" if self._head is not None and self._head.method == "HEAD" else body
        reply.begin(refusal.status, headers, length=len(body), first=first)
        reply.end()
        if self._closes:
            self._leave(is_read=is_read)
        else:
            self._wait_for_head()
            if self._received or self._is_paused:  # one a turn: others have theirs between
                self._is_due = True
                self._loop.call_soon(self._go_on)

    def _wait_for_head(self) -> None:
        """The last request is over: on to the next, which may have come already."""
        self._state = _State.HEAD
        self._head = None
        self._is_idle = True
        self._deadline_s = now_s() + self._options.keep_alive_s
        self._owner.rests(self)

    def _bound_received(self) -> None:
        # Reading goes on whatever comes during an answer: only that tells that the client left.
        reply = self._reply  # one that is over was read before this came: then nothing is early
        if len(self._received) > PIPELINED_BYTES_MAX and reply is not None and not reply.is_over:
            self._received.clear()
            self._has_surplus = self._closes = reply.closes = True

    def _leave(self, *, is_read: bool) -> None:
        """Let the client have what was written, then end the connection.

        Closing while it still sends would reset the connection and lose the response, so where
        a request was not read to its end, its rest is dropped for a while.
        """
        self._state = _State.LEAVING
        self._coming = None
        self._received.clear()
        self._deadline_s = now_s() + (self._owner.send_timeout_s if is_read else LEAVING_TIMEOUT_S)
        if is_read or self._has_eof:
            self._transport.close()
        elif self._transport.can_write_eof():
            self._transport.write_eof()

    def _be_late(self) -> None:
        self._deadline_s = NEVER
        if self._state is _State.BODY:
            self._refuse(self._refusal(body_late(self._options.body_timeout_s)), is_read=False)
        elif self._state is _State.HEAD and self._received and not self._is_full:
            late = head_late(self._options.header_timeout_s)
            self._refuse(self._refusal(late), is_read=False)
        elif self._state is not _State.ANSWERING:
            self._transport.abort()

    def _hand_over(self) -> None:
        received = bytes(self._received)
        self._received.clear()
        self._state = _State.GONE
        self._outlet.close()
        self._owner.hand_over(self, self._transport, received)

    def _close_exchange(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()
