"""The proxy's end of a leg link: all legs at one worker process, over one connection.

Nothing here waits. `data_received` gives each event to its leg's `hear` at once, or a plain token
to the leg's lane, which takes it to its client by itself. Legs that are opened in one turn of the
loop are sent together, a few at a time; those that are opened while the connection is being made,
with its first bytes.

Next: neuron_di/wire/leg_link.py
"""

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from os import sched_yield
from typing import Any, TypeAlias

import msgspec
from msgspec import structs

from neuron_di.clock import now_s, own_clock
from neuron_di.config import LimitOptions
from neuron_di.errors import (
    CapacityError,
    NeuronDiError,
    PeerGone,
    PeerTimeout,
    RemoteProtocolError,
)
from neuron_di.types import Incarnation, WorkerId
from neuron_di.wire import (
    Failed,
    Finished,
    LegEvent,
    PrefillLeg,
    Released,
    Token,
    WorkerRecord,
    WorkerStatus,
    encode_json,
)
from neuron_di.wire.leg_link import (
    ALIVE_INTERVAL_S,
    FROM_WORKER_BYTES_MAX,
    MAGIC,
    CloseLeg,
    FrameReader,
    LegKind,
    PlainToken,
    ProxyAlive,
    Told,
    encode_frame,
    encode_open,
    told_decoder,
)
from neuron_di_proxy.failure import LegFailed, gone
from neuron_di_proxy.ticks import look_every
from neuron_di_proxy.token_lane import Lane, LinkReader, relay_told
from neuron_di_proxy.workers import Hear

# A leg as its worker gets it, in pieces: a long prompt is a part of the client's body, of which no
# byte is copied on its way.
Document: TypeAlias = tuple[bytes | memoryview, ...]

# Shorter prompts are copied: to take a document apart costs more.
LONG_PROMPT_BYTES = 64 << 10

_MARK = msgspec.Raw(b"0")
_MARKED = b',"prompt":0,'  # in a string its quotes would be escaped: only the field looks so

# Prompts that a worker has not taken yet. One that reads nothing is given no more.
UNSENT_BYTES_MAX = 64 << 20

# Legs that are sent by one system call. A worker begins with these while others are made. Measured
# with 16 and 64 requests at once: of 8, first tokens came later, of 2, for a tenth more CPU time.
_SENT_TOGETHER = 4

# Answers whose end is dealt with in one turn of the loop. An end costs as much as tens of tokens:
# neither running streams nor new requests are to wait for all of a crowd that ends together.
_ENDS_PER_TURN = 4

_ALIVE = bytes(encode_frame(ProxyAlive()))
_NOTHING = Told([], [])
_TERMINAL = (Failed, Finished, Released)  # what a leg ends with, on the wire


def document_of(leg: msgspec.Struct) -> Document:
    """The leg's JSON, to be sent piece after piece. They are not to be changed until then."""
    if not isinstance(leg, PrefillLeg):
        return (encode_json(leg),)
    prompt = memoryview(leg.prompt)
    if prompt.nbytes < LONG_PROMPT_BYTES:
        return (encode_json(leg),)
    document = encode_json(structs.replace(leg, prompt=_MARK))
    mark = document.index(_MARKED) + len(_MARKED) - 2
    return document[:mark], prompt, document[mark + 1 :]


class LegLink(LinkReader, asyncio.Protocol):
    """One connection. Made and used on the event loop; `on_end` is called once, when it is over.

    When it ends, for whatever reason, each of its legs hears the reason as its last word.
    """

    def __init__(
        self,
        record: WorkerRecord,
        limits: LimitOptions,
        on_end: Callable[["LegLink"], None],
        on_status: Callable[[WorkerStatus], None] | None = None,
    ) -> None:
        super().__init__(own_clock())
        self._has_ended = False
        self._worker_id: WorkerId = record.worker_id
        self._incarnation: Incarnation = record.incarnation
        self._limits = limits
        self._on_end = on_end
        self._on_status = on_status
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._hears: dict[int, Hear] = {}
        self._num_opened = 0
        # Last words that wait for their turn, of legs that hear nothing else any more, and what the
        # worker said of itself behind them.
        self._ends: OrderedDict[int, LegEvent] = OrderedDict()
        self._status_behind: WorkerStatus | None = None
        # Frames of legs, in pieces, until `_send`.
        self._unsent: dict[int, list[bytes | bytearray | memoryview]] = {}
        self._frames = FrameReader(FROM_WORKER_BYTES_MAX)
        # How the worker was, as it came and as it was read.
        self._last_word: tuple[bytes | None, Told] = None, _NOTHING
        self._stop_watching: Callable[[], None] | None = None
        # Rarer than the worker's words: who is idle is to sleep. `Health` notices silence earlier.
        self._watch_interval_s = min(2 * ALIVE_INTERVAL_S, limits.idle_timeout_s / 6)
        self._connecting = self._loop.create_task(self._connect(record.host, record.api_port))

    @property
    def has_legs(self) -> bool:
        """Whether a leg is open here, sent or not."""
        return bool(self._hears)

    def open(self, kind: LegKind, document: Document, hear: Hear) -> int:
        """Send a leg, once this turn of the loop is over and there is a connection.

        Returns its number on this link.
        """
        number = self._num_opened
        self._num_opened += 1
        self._hears[number] = hear
        if self._transport is not None:
            if self._transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
                self._loop.call_soon(self._refuse, number)
                return number
            if not self._unsent:
                self._loop.call_soon(self._send)
        self._unsent[number] = encode_open(number, kind, document)
        if len(self._unsent) >= _SENT_TOGETHER:
            self._send()
            # The transport writes at the end of this turn. In the next one a worker that waits for
            # this core may begin, before further legs of the crowd are made.
            self._loop.call_soon(sched_yield)
        return number

    def relay(self, number: int, lane: Lane) -> None:
        """As `workers.Leg.relay`, for a leg of this link."""
        if number in self._hears and number not in self._ends:
            self.lanes[number] = lane

    def close_leg(self, number: int) -> None:
        """Take a leg back, unless it is over: nothing is heard of it from now on."""
        self.lanes.pop(number, None)
        if self._ends.pop(number, None) is not None:  # the worker has said its last word
            del self._hears[number]
        if self._hears.pop(number, None) is None or self._unsent.pop(number, None) is not None:
            return
        if self._transport is not None:
            self._transport.write(encode_frame(CloseLeg(number)))

    def end(self, error: NeuronDiError) -> None:
        """End the link and all its legs, each of which hears `error`. May be called twice."""
        if self._has_ended:
            return
        self._has_ended = True
        self._connecting.cancel()
        if self._stop_watching is not None:
            self._stop_watching()
        if self._transport is not None:
            self._transport.abort()
        self._on_end(self)
        self._hear_last_words(len(self._ends))  # they were said before
        self._unsent.clear()
        self.lanes.clear()
        while self._hears:  # one that hears it may close others
            _, hear = self._hears.popitem()
            hear(error)

    # What the connection calls.

    def connection_made(self, transport: Any) -> None:
        if self._has_ended:
            transport.abort()
            return
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport = transport
        transport.write(MAGIC)
        self._send()
        self._stop_watching = look_every(self._watch_interval_s, self._watch)

    def frames_came(self, data: bytes) -> None:
        """What comes but is not whole frames, or not to be relayed by `data_received`."""
        if self._has_ended:
            return
        try:
            payloads = self._frames.feed(data)
        except RemoteProtocolError as error:
            self._end_not_understood(error)
            return
        self.has_partial = bool(self._frames.partial)
        at_s = now_s()
        for left in [relay_told(payload, self.lanes, at_s) for payload in payloads]:
            self.hear_told(*left)

    def hear_told(
        self,
        tokens: Sequence[PlainToken],
        rest: bytes | None,
        failures: Sequence[tuple[int, Exception]],
    ) -> None:
        """Deal with what lanes left of a frame, as `token_lane` says."""
        if self._has_ended:  # by a frame that came before it
            return
        try:
            told = _NOTHING if rest is None else self._decode(rest)
        except RemoteProtocolError as error:
            self._end_not_understood(error)
            return
        for number, failure in failures:
            if (hear := self._hear_of(number)) is not None:
                hear(failure)
        for number, index, token_id, text in tokens or told.tokens:
            if (hear := self._hear_of(number)) is not None:
                hear(Token(index=index, token_id=token_id, text=text))
        if told.events:
            # A client that waits for this core reads its tokens before all else is done, which is
            # an answer's end as a rule, and takes longer than they did.
            sched_yield()
            self._hear_events(told.events)
        if told.status is None:
            return
        if self._ends:  # it was said after them, and may say that the worker is no more
            self._status_behind = told.status
        else:
            self._hear_status(told.status)

    def _hear_of(self, number: int) -> Hear | None:
        """Who hears of a leg; None: it is over, though perhaps nobody has been told yet."""
        return None if number in self._ends else self._hears.get(number)

    def _hear_events(self, events: Sequence[tuple[int, LegEvent]]) -> None:
        is_crowd = bool(self._ends)
        for number, event in events:
            if (hear := self._hear_of(number)) is None:
                continue
            if isinstance(event, _TERMINAL):
                self._ends[number] = event
                self.lanes.pop(number, None)
            else:
                hear(event)
        if self._ends and not is_crowd:
            self._hear_ends()

    def _hear_ends(self) -> None:
        try:
            self._hear_last_words(_ENDS_PER_TURN)
        finally:
            if self._ends:
                self._loop.call_soon(self._hear_ends)
            elif self._status_behind is not None:
                status, self._status_behind = self._status_behind, None
                self._hear_status(status)

    def _hear_last_words(self, num_most: int) -> None:
        ends = self._ends
        for _ in range(num_most):
            if not ends:  # looked at each time: who hears one may end the link
                break
            number, event = ends.popitem(last=False)
            hear = self._hears.pop(number)
            hear(LegFailed(event) if isinstance(event, Failed) else event)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f" ({type(exc).__name__})" if exc is not None else ""
        self.end(PeerGone(f"worker {self._worker_id} hung up{reason}"))

    def _decode(self, rest: bytes) -> Told:
        """An idle worker says the same each second: only the first time it is decoded."""
        said, told = self._last_word
        if rest != said:
            told = told_decoder.decode(rest)
            if not told.tokens and not told.events:
                self._last_word = rest, told
        return told

    def _end_not_understood(self, error: RemoteProtocolError) -> None:
        text = f"worker {self._worker_id} cannot be understood: {error.message}"
        self.end(RemoteProtocolError(text))

    def _hear_status(self, status: WorkerStatus) -> None:
        if self._has_ended:  # by a word before it in the same bytes
            return
        if self._on_status is not None:
            self._on_status(status)
        if status.record.incarnation != self._incarnation:
            self.end(PeerGone(f"worker {self._worker_id} is another process now"))

    async def _connect(self, host: str, port: int) -> None:
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                await self._loop.create_connection(lambda: self, host, port)
        except TimeoutError:
            self.end(PeerTimeout(f"worker {self._worker_id} cannot be reached in time"))
        except (OSError, UnicodeError) as error:  # idna refuses some host names
            self.end(gone(self._worker_id, error))

    def _watch(self) -> None:
        """Say that we live, and see whether the worker does.

        Silence is counted in looks, not by the clock: if it was us who stood still, what came
        meanwhile is read before the next look.
        """
        self.num_silent += 1
        if self.num_silent * self._watch_interval_s > self._limits.idle_timeout_s:
            self.end(PeerTimeout(f"worker {self._worker_id} did not answer in time"))
            return
        if self._transport is not None and self._transport.get_write_buffer_size() == 0:
            self._transport.write(_ALIVE)

    def _send(self) -> None:
        if self._transport is not None and self._unsent:
            self._transport.writelines(list(chain.from_iterable(self._unsent.values())))
            self._unsent.clear()

    def _refuse(self, number: int) -> None:
        if (hear := self._hear_of(number)) is not None:  # else a worker out of its mind ended it
            del self._hears[number]
            hear(CapacityError(f"worker {self._worker_id} does not take what it is sent"))
