"""Prefill's end of the data connections to one decode worker: what it may have, and gets.

    a send is posted, its pieces are wanted    they are sent, straight from the pool
    wanted before it is posted                 the wish waits
    posted and never wanted                    the send ends at its deadline

Each stream has one thread, which hears what is wanted and sends it.
"""

import os
import select
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np

from neuron_di.clock import Deadline, now_s
from neuron_di.errors import (
    KvMissing,
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    RemoteProtocolError,
)
from neuron_di.kv import KvPool
from neuron_di.kv.device_pool import DevicePool
from neuron_di.transfer.copy_thread import complete_token
from neuron_di.transfer.run_bounds import send_refusal
from neuron_di.transfer.tcp_frames import (
    CANCEL,
    DATA,
    FRAME_BYTES,
    GONE,
    UNFIT,
    WANT,
    Frame,
    as_peer_error,
    part_of,
    read_frame,
)
from neuron_di.transfer.tcp_stream import Stream
from neuron_di.transfer.transfer_engine import Send, TransferToken, deadline_of
from neuron_di.types import BlockId

WISHES_MAX = 4096  # that wait on one stream
ENDED_MAX = 1024  # sends that ended without their bytes, still known
_Ended = list[tuple[TransferToken, NeuronDiError | None, list[BlockId]]]


@dataclass(eq=False, slots=True)
class _Outgoing:
    """A posted send. It is over once all was sent or it has an error, and nobody reads for it."""

    send: Send
    token: TransferToken
    deadline: Deadline  # until all of it must have been asked for
    end: Deadline  # until all of it must have been sent
    whole: Frame  # the wish for all of it at once
    remaining: int
    unwanted: int
    num_reading: int = 0
    error: NeuronDiError | None = None
    start_s: float | None = None
    bringing: threading.Lock = field(default_factory=threading.Lock)
    brought: list[BlockId] | None = None  # from a GPU to the host's memory; None: not yet


@dataclass(eq=False, slots=True)
class _Outlet:
    """A stream, what waits on it for its send, and what to answer next."""

    stream: Stream
    wake_fd: int
    early: dict[int, Frame] = field(default_factory=dict)
    ready: deque[tuple[Frame, _Outgoing | None]] = field(default_factory=deque)
    raw: bytes = b""  # of a frame that has not come wholly
    poll: select.poll = field(default_factory=select.poll)

    def __post_init__(self) -> None:
        self.poll.register(self.stream.fileno(), select.POLLIN)
        self.poll.register(self.wake_fd, select.POLLIN)


class TcpSender:
    """Borrows the streams' threads and the pool. Thread-safe."""

    def __init__(self, pool: KvPool, unclaimed_s: float, send_s: float) -> None:
        """A send has `unclaimed_s` to be asked for, and `send_s` in all: a peer that reads more
        slowly loses its connection. Somebody must call end_unclaimed()."""
        self._memory = pool.memory()
        self._device = pool if isinstance(pool, DevicePool) else None
        self._unclaimed_s = unclaimed_s
        self._send_s = send_s
        self._lock = threading.Condition()
        self._error: NeuronDiError | None = None  # why nothing can be posted any more
        self._attempt = 0
        self._outlets: list[_Outlet] = []
        self._outgoing: dict[int, _Outgoing] = {}
        self._by_wish: dict[bytes, _Outgoing] = {}  # the same, by the wish for all of it
        # Of sends that ended without their bytes: the answer to a wish that comes late.
        self._answers: OrderedDict[int, int] = OrderedDict()
        self._skipped: OrderedDict[int, None] = OrderedDict()  # cancelled before they were posted

    def post(self, send: Send) -> TransferToken:
        """Let the peer have these bytes of the pool."""
        token = TransferToken()
        refusal = send_refusal(send.runs, self._memory.num_bytes)
        num_bytes = 0 if refusal else send.runs.num_bytes
        ended: _Ended = []
        with self._lock:
            if self._error is not None or not self._outlets:
                ended = [(token, self._error or PeerGone("no data connection of the peer"), [])]
            elif not 0 <= send.tag < 1 << 64:
                ended = [(token, LocalProtocolError("a transfer's tag is 64 bits"), [])]
            elif send.tag in self._outgoing:
                ended = [(token, LocalProtocolError("two open transfers have one tag"), [])]
            elif send.tag in self._skipped:
                del self._skipped[send.tag]
                ended = [(token, KvMissing("the decode worker gave this transfer up"), [])]
            else:
                deadline, end = Deadline.after(self._unclaimed_s), Deadline.after(self._send_s)
                whole = Frame(WANT, send.tag, num_bytes, 0, num_bytes)
                outgoing = _Outgoing(send, token, deadline, end, whole, num_bytes, num_bytes)
                self._outgoing[send.tag] = self._by_wish[whole.pack()] = outgoing
                self._answers.pop(send.tag, None)
                if refusal is not None:
                    ended += self._give_up(outgoing, refusal, UNFIT)
                for outlet in self._outlets:
                    if (frame := outlet.early.pop(send.tag, None)) is not None:
                        ended += self._want(outlet, frame)
                        os.eventfd_write(outlet.wake_fd, 1)
        self._tell(ended)
        return token

    def serve(self, stream: Stream, attempt: int, num_streams: int, welcome: bytes) -> None:
        """Serve a proved stream on this thread until it ends. Owns it.

        Whoever was welcomed finds what is posted from then on.
        """
        outlet = _Outlet(stream, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        try:
            self._join(outlet, attempt, num_streams)
            self._send_only(outlet, welcome)
            while True:
                self._wait(outlet)
                self._hear(outlet)
                while outlet.ready:
                    self._answer(outlet, *outlet.ready.popleft())
        except Exception as error:  # of one peer: its sends end
            self._fail_attempt(attempt, as_peer_error(error))
        finally:
            with self._lock:  # nobody wakes it any more
                if outlet in self._outlets:
                    self._outlets.remove(outlet)
                os.close(outlet.wake_fd)
            stream.close()

    def fail(self, error: NeuronDiError) -> None:
        """End everything, for good."""
        with self._lock:
            self._error = self._error or error
            ended = self._end_all(self._error)
        self._tell(ended)

    def wait_idle(self, deadline: Deadline) -> None:
        """Until nothing is posted any more, or the deadline."""
        with self._lock:
            self._lock.wait_for(lambda: not self._outgoing, deadline.remaining_s())

    def _join(self, outlet: _Outlet, attempt: int, num_streams: int) -> None:
        ended: _Ended = []
        with self._lock:
            if self._error is not None:
                raise self._error
            if attempt < self._attempt or (
                attempt == self._attempt and not 0 < len(self._outlets) < num_streams
            ):
                raise RemoteProtocolError("a data connection of an earlier attempt")
            if attempt > self._attempt:
                ended = self._end_all(PeerGone("the decode worker connected anew"))
                self._attempt = attempt
            self._outlets.append(outlet)
        self._tell(ended)

    def _fail_attempt(self, attempt: int, error: NeuronDiError) -> None:
        with self._lock:
            ended = self._end_all(error) if attempt == self._attempt else []
        self._tell(ended)

    def _end_all(self, error: NeuronDiError) -> _Ended:
        """Under the lock: shut the streams there are; no send outlives them."""
        ended: _Ended = []
        for outgoing in list(self._outgoing.values()):
            ended += self._give_up(outgoing, error)
        for outlet in self._outlets:
            outlet.stream.shut()
        self._outlets = []
        self._answers.clear()
        self._skipped.clear()
        return ended

    def _give_up(self, outgoing: _Outgoing, error: NeuronDiError, answer: int = GONE) -> _Ended:
        """Under the lock. The first error counts."""
        if outgoing.error is None:
            outgoing.error = error
            self._answers[outgoing.send.tag] = answer
            if len(self._answers) > ENDED_MAX:
                self._answers.popitem(last=False)
        return self._if_over(outgoing)

    def _if_over(self, outgoing: _Outgoing) -> _Ended:
        """Under the lock: the token to complete, where nobody reads the memory any more."""
        tag = outgoing.send.tag
        if outgoing.num_reading or self._outgoing.get(tag) is not outgoing:
            return []
        if outgoing.error is None and outgoing.remaining:
            return []
        del self._outgoing[tag], self._by_wish[outgoing.whole.pack()]
        self._lock.notify_all()
        if outgoing.start_s is not None:
            outgoing.token.transfer_s = now_s() - outgoing.start_s
        if outgoing.error is None:
            outgoing.token.kv_bytes = outgoing.whole.total
        return [(outgoing.token, outgoing.error, outgoing.brought or [])]

    def end_unclaimed(self) -> Deadline | None:
        """End the sends that were not asked for in time. When the next one's time ends, if any."""
        ended: _Ended = []
        with self._lock:
            waiting = [o for o in self._outgoing.values() if o.unwanted and o.error is None]
            late = [outgoing for outgoing in waiting if outgoing.deadline.has_passed()]
            if late and self._has_unheard():  # perhaps just these wishes: what is sent may be large
                for outgoing in late:
                    outgoing.deadline = Deadline.after(self._unclaimed_s).earlier_of(outgoing.end)
            for outgoing in late:
                if outgoing.deadline.has_passed():
                    error = KvMissing("the decode worker never asked for this transfer")
                    ended += self._give_up(outgoing, error)
            ends = [outgoing.deadline for outgoing in waiting if outgoing.error is None]
        self._tell(ended)
        return min(ends, key=lambda end: end.at_s, default=None)

    def _has_unheard(self) -> bool:
        """Under the lock: whether the peer has said what a thread that sends could not hear yet."""
        poll = select.poll()
        for outlet in self._outlets:
            poll.register(outlet.stream.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _wait(self, outlet: _Outlet) -> None:
        """Until the peer says something, or something is to be sent."""
        if outlet.ready or outlet.stream.has_read_ahead:
            return
        for fd, _ in outlet.poll.poll():
            if fd == outlet.wake_fd:
                os.eventfd_read(outlet.wake_fd)

    def _hear(self, outlet: _Outlet) -> None:
        some = outlet.stream.receive_some()
        if not outlet.raw and (outgoing := self._wanted_wholly(some)) is not None:
            self._send(outlet, outgoing.whole.answered(DATA), outgoing)
            return
        outlet.raw += some
        ended: _Ended = []
        try:
            with self._lock:
                while len(outlet.raw) >= FRAME_BYTES:
                    frame = read_frame(outlet.raw[:FRAME_BYTES], (WANT, CANCEL))
                    outlet.raw = outlet.raw[FRAME_BYTES:]
                    if frame.kind == CANCEL:
                        ended += self._cancel(outlet, frame)
                    elif frame.tag in outlet.early or len(outlet.early) >= WISHES_MAX:
                        raise RemoteProtocolError("the decode worker asks for too much at once")
                    else:
                        ended += self._want(outlet, frame)
        finally:  # they are forgotten already, whatever came behind what ended them
            self._tell(ended)

    def _wanted_wholly(self, wish: bytes) -> _Outgoing | None:
        """The send that this asks for, if it is a wish for all of one that was posted: as _want and
        _answer have it, in a third of their time, which a small one feels. It is being read now."""
        with self._lock:
            outgoing = self._by_wish.get(wish)
            if outgoing is None or outgoing.error is not None:
                return None
            if outgoing.unwanted < outgoing.whole.total:  # some of it was asked for before
                return None
            outgoing.unwanted = 0
            outgoing.num_reading += 1
            outgoing.start_s = outgoing.start_s or now_s()
            return outgoing

    def _want(self, outlet: _Outlet, frame: Frame) -> _Ended:
        """Under the lock: what this wish will be answered, or that it waits."""
        outgoing = self._outgoing.get(frame.tag)
        if outgoing is None and frame.tag not in self._answers:
            outlet.early[frame.tag] = frame
            return []
        if outgoing is None or outgoing.error is not None:
            outlet.ready.append((frame.answered(self._answers.get(frame.tag, GONE)), None))
            return []
        if frame.total != outgoing.whole.total or frame.length > outgoing.unwanted:
            outlet.ready.append((frame.answered(UNFIT), None))
            error = RemoteProtocolError("the decode worker asks for another number of bytes")
            return self._give_up(outgoing, error, UNFIT)
        outgoing.unwanted -= frame.length
        outlet.ready.append((frame.answered(DATA), outgoing))
        return []

    def _cancel(self, outlet: _Outlet, frame: Frame) -> _Ended:
        """Under the lock. A wish that was answered meanwhile is left alone."""
        if (wish := outlet.early.pop(frame.tag, None)) is not None:
            outlet.ready.append((wish.answered(GONE), None))
            self._skipped[frame.tag] = None
            if len(self._skipped) > ENDED_MAX:
                self._skipped.popitem(last=False)
            return []
        outgoing = self._outgoing.get(frame.tag)
        if outgoing is None or all(waiting is not outgoing for _, waiting in outlet.ready):
            return []
        return self._give_up(outgoing, KvMissing("the decode worker gave this transfer up"))

    def _answer(self, outlet: _Outlet, frame: Frame, outgoing: _Outgoing | None) -> None:
        with self._lock:
            if outgoing is not None and outgoing.error is not None:
                frame, outgoing = frame.answered(self._answers.get(frame.tag, GONE)), None
            elif outgoing is not None:
                outgoing.num_reading += 1
                outgoing.start_s = outgoing.start_s or now_s()
        if outgoing is None:
            self._send_only(outlet, frame.pack())
        else:
            self._send(outlet, frame, outgoing)

    def _send(self, outlet: _Outlet, frame: Frame, outgoing: _Outgoing) -> None:
        """This piece of it, which counts as being read until it is sent."""
        error: NeuronDiError | None = None
        if (lack := self._bring(outgoing)) is not None:
            with self._lock:
                outgoing.num_reading -= 1
                ended = self._give_up(outgoing, lack)
            self._tell(ended)
            self._send_only(outlet, frame.answered(GONE).pack())
            return
        try:
            deadline = deadline_of(frame.length, outlet.stream.silence_s)
            deadline = deadline.earlier_of(outgoing.end)
            offsets, lengths = outgoing.send.runs.source_offsets, outgoing.send.runs.lengths
            if frame.length != frame.total:
                offsets, lengths = part_of(offsets, lengths, frame.offset, frame.length)
            header = frame.pack()
            outlet.stream.send_runs(header, self._memory.address, offsets, lengths, deadline)
        except Exception as failure:
            error = as_peer_error(failure)
        with self._lock:
            outgoing.num_reading -= 1
            if error is None:
                outgoing.remaining -= frame.length
            # The peer had all and closed another stream before this thread could say so.
            if not outgoing.remaining and isinstance(outgoing.error, PeerGone):
                outgoing.error = None
            ended = self._give_up(outgoing, error) if error else self._if_over(outgoing)
        self._tell(ended)
        if error is not None:
            raise error

    def _bring(self, outgoing: _Outgoing) -> NeuronDiError | None:
        """Blocks of a GPU come to the host's memory before the first of them is read. Why not."""
        if self._device is None:
            return None
        with outgoing.bringing:  # other streams want other pieces of it
            try:
                if outgoing.brought is None:
                    block_ids, num_tokens = outgoing.send.block_ids, outgoing.send.num_tokens
                    outgoing.brought = self._device.to_host(block_ids, num_tokens)
            except Exception as error:  # the send must end, whatever it was
                return as_peer_error(error)
        return None

    def _tell(self, ended: _Ended) -> None:
        """Whoever waits for these sends, without any lock."""
        for token, error, brought in ended:
            try:
                if brought and self._device is not None:
                    self._device.drop_mirror(brought)  # while the blocks are still this send's
            finally:
                complete_token(token, error)

    def _send_only(self, outlet: _Outlet, message: bytes) -> None:
        nothing = np.zeros(0, np.int64)
        deadline = deadline_of(len(message), outlet.stream.silence_s)
        outlet.stream.send_runs(message, 0, nothing, nothing, deadline)
