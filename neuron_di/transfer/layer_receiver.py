"""Decode's half of KV that comes layer by layer, while the prefill still computes.

    take()     a layer of some blocks is there: receive it into landing memory
    claim()    Ready is here and the request has its blocks: wait for what is still on its way
    end()      the request is over, or is pulled as a whole

Nothing of it is believed: what has landed is compared with the digests of Ready like any other
KV. Whatever is missing, late or in doubt, the whole KV is pulled as always. Landing memory is
given back when nothing writes to it any more.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from neuron_di.clock import now_s
from neuron_di.config import HandOverOptions
from neuron_di.errors import LocalProtocolError, NeuronDiError, PeerError, RemoteProtocolError
from neuron_di.obs import get_logger
from neuron_di.transfer.counters import HandOverCounters
from neuron_di.transfer.kv_plan import block_ids_of
from neuron_di.transfer.kv_receiver import KvReceiver
from neuron_di.transfer.landing import Landing, Room
from neuron_di.transfer.prefill_link import PrefillLink
from neuron_di.transfer.recv_entry import Entry, Key
from neuron_di.transfer.transfer_engine import Receive, TransferToken
from neuron_di.wire import LayerReady, PullLayer

_log = get_logger(__name__)

OPEN_MAX = 64  # pieces that are posted at once, of one peer


@dataclass(slots=True, eq=False)
class _Stream:
    """One request's layers: what was announced, is on its way, and has come."""

    room: Room | None  # None: it is another's
    announced: NDArray[np.bool_]  # [layer, block]
    arrived: NDArray[np.bool_]
    num_pieces: int = 0
    open: dict[int, Receive] = field(default_factory=dict)  # by piece
    waiting: deque[LayerReady] = field(default_factory=deque)
    is_over: bool = False
    kv_bytes: int = 0
    claimed_s: float = 0.0
    entry: Entry | None = None  # of the request, once it was claimed
    on_settled: Callable[[], None] = lambda: None
    late: asyncio.TimerHandle | None = None


class LayerReceiver:
    """All requests of one peer. Lives on the event loop.

    Breaks `link` when a receive does not end although it was cancelled.
    """

    def __init__(
        self,
        receiver: KvReceiver,
        landing: Landing,
        limits: HandOverOptions,
        counters: HandOverCounters,
        link: PrefillLink,
    ) -> None:
        self._receiver = receiver
        self._landing = landing
        self._limits = limits
        self._counters = counters
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._streams: dict[Key, _Stream | None] = {}  # None: it is pulled as a whole
        self._num_open = 0
        self._ready: deque[_Stream] = deque()  # those with pieces that wait to be posted

    def take(self, message: LayerReady) -> None:
        """Of a request that waits for its KV. RemoteProtocolError for a piece of no such KV."""
        key = (message.request_id, message.attempt)
        if key not in self._streams:
            self._streams[key] = self._open(key, message.num_blocks)
        stream = self._streams[key]
        if stream is None:
            return
        if message.piece != stream.num_pieces:  # one was lost, or came twice
            self._give_up(key)
            return
        blocks = slice(message.first_block, message.first_block + len(message.block_ids))
        if (
            message.num_blocks != stream.announced.shape[1]
            or message.layer >= len(stream.announced)
            or not message.block_ids
            or len(message.block_ids) != len(message.generations)
            or block_ids_of(message.block_ids) is None
            or blocks.stop > message.num_blocks
            or stream.announced[message.layer, blocks].any()
        ):
            raise RemoteProtocolError("layers were announced that do not add up")
        stream.num_pieces += 1
        stream.announced[message.layer, blocks] = True
        stream.waiting.append(message)
        self._ready.append(stream)
        self._post_next()

    def claim(self, key: Key, entry: Entry, on_settled: Callable[[], None]) -> bool:
        """Wait for the layers of this request. False: they will not do.

        `on_settled` is called when they are in the entry's room and `is_streamed` says so, or when
        they failed meanwhile; not after end().
        """
        ready, stream = entry.ready, self._streams.get(key)
        if (
            stream is None
            or ready is None
            or entry.num_held
            or not stream.announced.all()
            or stream.announced.shape[1] != len(ready.block_ids)
        ):
            self.end(key)
            return False
        assert stream.room is not None, "a recalled stream is no stream"
        self._landing.keep(stream.room)
        stream.entry, stream.on_settled, stream.claimed_s = entry, on_settled, now_s()
        if not stream.open and not stream.waiting:
            self._settle(key, stream)
        else:
            timeout_s = self._limits.transfer_deadline_s(self._counters.kv_bytes_in_flight)
            stream.late = self._loop.call_later(timeout_s, self._fail, key, stream)
        return True

    def end(self, key: Key) -> None:
        """The layers are not wanted. Their room is free once nothing writes to it."""
        stream = self._streams.pop(key, None)
        if stream is None or stream.is_over:
            return
        stream.is_over = True
        stream.waiting.clear()
        if stream.late is not None:
            stream.late.cancel()
        self._free(stream)
        lane = self._receiver.lane
        if stream.open and not lane.engine.is_one_sided:
            for receive in list(stream.open.values()):
                lane.cancel(receive.tag)
            patience_s = self._limits.transfer_deadline_s(self._counters.kv_bytes_in_flight)
            self._link.doubt(lambda: bool(stream.open), patience_s)

    def place(self, entry: Entry, on_placed: Callable[[NeuronDiError | None], None]) -> None:
        """Verify the layers in the entry's room and bring them into its blocks.

        With an error nothing was placed, and the entry is as if no layers had come.
        """

        def on_end(error: NeuronDiError | None) -> None:
            if error is not None:
                self._counters.num_streams_refused += 1
                _log.warning("layers_refused", reason=error.message)
                entry.is_streamed = False
                if self._receiver.is_direct and entry.room is not None:
                    self._landing.free(entry.room)
                    entry.room = None
            on_placed(error)

        turn = threading.Lock()  # whose it is to say how it ended

        def finish() -> None:
            if turn.acquire(blocking=False):
                error = self._receiver.finish_streamed(entry)
                self._loop.call_soon_threadsafe(on_end, error)

        try:
            self._loop.run_in_executor(None, finish)
        except RuntimeError:  # no thread can be started: it may be called all the same, much later
            if turn.acquire(blocking=False):
                self._loop.call_soon(on_end, LocalProtocolError("no thread is left to place them"))

    def _open(self, key: Key, num_blocks: int) -> _Stream | None:
        layout = self._receiver.layout.without_replicas()
        room = self._landing.take(num_blocks * layout.block_bytes, partial(self._give_up, key))
        if room is None:
            return None
        shape = (layout.num_layers, num_blocks)
        return _Stream(room, np.zeros(shape, np.bool_), np.zeros(shape, np.bool_))

    def _give_up(self, key: Key) -> None:
        """It is pulled as a whole: a piece failed, or somebody who has a slot waits for room, and
        this request may wait for just that slot."""
        if key in self._streams:  # else it is over, and its room free once nothing writes to it
            self.end(key)
            self._streams[key] = None

    def _post_next(self) -> None:
        """As many as may be under way at once, in the order in which they were announced."""
        while self._ready and self._num_open < OPEN_MAX:
            stream = self._ready.popleft()
            if stream.waiting:
                self._post(stream, stream.waiting.popleft())

    def _post(self, stream: _Stream, message: LayerReady) -> None:
        assert stream.room is not None, "nothing waits of a stream that is over"
        lane = self._receiver.lane
        receive = self._receiver.receive_layer(message, stream.room)
        stream.open[message.piece] = receive
        self._num_open += 1
        self._counters.kv_bytes_in_flight += receive.runs.num_bytes
        token = self._posted(receive)
        if not lane.engine.is_one_sided:
            self._link.send(
                PullLayer(
                    request_id=message.request_id,
                    attempt=message.attempt,
                    piece=message.piece,
                    engine=lane.name,
                )
            )
        token.on_done(partial(self._on_done, stream, message))

    def _posted(self, receive: Receive) -> TransferToken:
        try:
            return self._receiver.lane.post_receive(receive)
        except Exception as error:  # a receive that was never posted must not be waited for
            bug = LocalProtocolError(f"no receive was posted: {type(error).__name__}")
            return TransferToken.over(error if isinstance(error, PeerError) else bug)

    def _on_done(self, stream: _Stream, message: LayerReady, token: TransferToken) -> None:
        """On the thread that ended it."""
        is_here = token.error() is None
        if is_here:
            try:
                self._receiver.lane.fence()
            except Exception:
                _log.exception("fence_failed", request=message.request_id)
                is_here = False
        self._loop.call_soon_threadsafe(self._on_landed, stream, message, token, is_here)

    def _on_landed(
        self, stream: _Stream, message: LayerReady, token: TransferToken, is_here: bool
    ) -> None:
        """Nothing writes to this piece any more."""
        receive = stream.open.pop(message.piece)
        self._num_open -= 1
        self._counters.kv_bytes_in_flight -= receive.runs.num_bytes
        key = (message.request_id, message.attempt)
        if not is_here:
            self._fail(key, stream)
        else:
            blocks = slice(message.first_block, message.first_block + len(message.block_ids))
            stream.arrived[message.layer, blocks] = True
            stream.kv_bytes += token.kv_bytes
        if stream.is_over:
            self._free(stream)
        elif stream.entry is not None and not stream.open and not stream.waiting:
            self._settle(key, stream)
        self._post_next()

    def _settle(self, key: Key, stream: _Stream) -> None:
        """All of it is there: it is the request's now."""
        assert stream.arrived.all(), "whatever failed is over"
        entry = stream.entry
        assert entry is not None, "it was claimed"
        assert stream.room is not None, "it is not over"
        del self._streams[key]
        entry.room, entry.is_streamed = stream.room, True
        stream.room, stream.is_over = None, True
        if stream.late is not None:
            stream.late.cancel()
        entry.arrived.kv_bytes = stream.kv_bytes
        entry.arrived.transfer_s = now_s() - stream.claimed_s  # as long as anybody waited
        stream.on_settled()

    def _fail(self, key: Key, stream: _Stream) -> None:
        if stream.is_over:
            return
        self._give_up(key)
        if stream.entry is not None:
            stream.on_settled()

    def _free(self, stream: _Stream) -> None:
        """Nobody wants it: once nothing writes to it, the room is free."""
        if stream.room is not None and not stream.open:
            self._landing.free(stream.room)
            stream.room = None
