"""Decode's end of the data connections to one prefill worker: what it asks for, and takes.

Promise: a byte from the network goes only where a posted receive wants it, and each of them once:
every answer is compared with the WANT that it answers. A receive that has ended is written to by
nobody; what still comes for it is read and dropped.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from neuron_di.clock import Deadline, now_s
from neuron_di.errors import (
    CapacityError,
    KvMissing,
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    RemoteProtocolError,
)
from neuron_di.obs import get_logger
from neuron_di.transfer.copy_thread import CopyThread, complete_token
from neuron_di.transfer.run_bounds import OwnMemories
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
    pieces_of,
    read_frame,
)
from neuron_di.transfer.tcp_stream import Stream
from neuron_di.transfer.transfer_engine import Receive, TransferToken, deadline_of
from neuron_di.types import Incarnation
from neuron_di_bindings.process import lower_thread_priority

_log = get_logger(__name__)

RECEIVES_MAX = 1024  # open at once, of one peer
_SHORT_BYTES_MAX = 1 << 20  # are verified about as soon as a thread wakes
_SCRATCH_BYTES = 1 << 18
_NICE = 5  # running streams go first where cores are scarce


@dataclass(eq=False, slots=True)
class _Incoming:
    """A posted receive. It is over once it has all or an error, and nobody writes for it."""

    receive: Receive
    token: TransferToken
    total: int
    remaining: int
    num_writing: int = 0
    error: NeuronDiError | None = None
    start_s: float | None = None


@dataclass(eq=False, slots=True)
class _Inlet:
    """A stream, what was asked for on it and not answered yet, and how many bytes that is."""

    stream: Stream
    wanted: dict[int, tuple[_Incoming, Frame]] = field(default_factory=dict)
    num_bytes: int = 0


def end_tokens(ended: Sequence[tuple[TransferToken, NeuronDiError | None]]) -> None:
    """Tell whoever waits, without any lock."""
    for token, error in ended:
        complete_token(token, error)


class TcpReceiver:
    """Owns the streams, and a thread for each. Thread-safe.

    Receives that succeed are completed by `token_thread`: what is done then may take long.
    """

    def __init__(
        self,
        peer: Incarnation,
        streams: Sequence[Stream],
        own: OwnMemories,
        peer_bytes: int,
        token_thread: CopyThread,
    ) -> None:
        """Owns the streams also where this fails: PeerGone where no thread is left."""
        self._peer = peer
        self._own = own
        self._peer_bytes = peer_bytes
        self._token_thread = token_thread
        self._lock = threading.Condition()
        self._error: NeuronDiError | None = None  # why nothing can be posted any more
        self._incoming: dict[int, _Incoming] = {}
        self._inlets = [_Inlet(stream) for stream in streams]
        self._threads = [
            threading.Thread(target=self._serve, args=(inlet,), name="kv-tcp-in", daemon=True)
            for inlet in self._inlets
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            error = PeerGone("no thread is left to receive on")
            self.fail(error)  # those that run close their streams themselves
            for inlet, thread in zip(self._inlets, self._threads, strict=True):
                if thread.ident is None:
                    inlet.stream.close()
            raise error from None

    def post(self, receive: Receive, block_bytes: int) -> TransferToken:
        """Ask for the bytes. `block_bytes` are the peer's."""
        token = TransferToken()
        error: NeuronDiError | None
        try:
            error = self._own.refusal(
                receive, peer_bytes=self._peer_bytes, peer_blocks=self._peer_bytes // block_bytes
            )
        except Exception as bug:  # whoever posts serves every request, and must live on
            error = LocalProtocolError(f"a receive could not be checked: {type(bug).__name__}")
        if error is None and not 0 <= receive.tag < 1 << 64:
            error = LocalProtocolError("a transfer's tag is 64 bits")
        if error is None:
            error = self._ask(receive, token)
        if error is not None:
            complete_token(token, error)
        return token

    def _ask(self, receive: Receive, token: TransferToken) -> NeuronDiError | None:
        total, tag = receive.runs.num_bytes, receive.tag
        incoming = _Incoming(receive, token, total, total)
        asked: list[tuple[_Inlet, Frame]] = []
        with self._lock:
            if self._error is not None:
                return self._error
            if len(self._incoming) >= RECEIVES_MAX:
                return CapacityError("too many open transfers from one prefill worker")
            inlets = sorted(self._inlets, key=lambda inlet: inlet.num_bytes)
            pieces = pieces_of(total, len(inlets))
            if tag in self._incoming or any(tag in inlet.wanted for inlet in inlets):
                return LocalProtocolError("two open transfers have one tag")
            self._incoming[tag] = incoming
            for inlet, (offset, length) in zip(inlets, pieces, strict=False):
                frame = Frame(WANT, tag, total, offset, length)
                inlet.wanted[tag] = (incoming, frame)
                inlet.num_bytes += length
                asked.append((inlet, frame))
        self._tell(asked)
        return None

    def cancel(self, tag: int) -> None:
        """End a receive with KvMissing as soon as nobody writes for it."""
        with self._lock:
            incoming = self._incoming.get(tag)
            if incoming is None:
                return
            error = KvMissing("the transfer was given up before it came")
            ended = self._give_up(incoming, error)
            asked = [
                (inlet, inlet.wanted[tag][1].answered(CANCEL))
                for inlet in self._inlets
                if tag in inlet.wanted
            ]
        self._tell(asked)
        end_tokens(ended)

    def fail(self, error: NeuronDiError) -> None:
        """End everything: at once what nobody writes for, the rest as its thread lets go."""
        with self._lock:
            if self._error is None:
                self._error = error
            ended = []
            for incoming in list(self._incoming.values()):
                ended += self._give_up(incoming, self._error)
        for inlet in self._inlets:
            inlet.stream.shut()
        end_tokens(ended)

    def wait_idle(self, deadline: Deadline) -> None:
        """Until nothing is posted any more, or the deadline."""
        with self._lock:
            self._lock.wait_for(lambda: not self._incoming, deadline.remaining_s())

    @property
    def is_running(self) -> bool:
        """Whether a thread of it is."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self, deadline: Deadline) -> None:
        """After fail(): until its threads have ended, or the deadline."""
        for thread in self._threads:
            thread.join(deadline.remaining_s())

    def _tell(self, frames: Sequence[tuple[_Inlet, Frame]]) -> None:
        try:
            for inlet, frame in frames:
                inlet.stream.send_frames(frame.pack())
        except (OSError, NeuronDiError) as error:
            self.fail(as_peer_error(error))

    def _give_up(
        self, incoming: _Incoming, error: NeuronDiError
    ) -> list[tuple[TransferToken, NeuronDiError | None]]:
        """Under the lock. The first error counts."""
        incoming.error = incoming.error or error
        return self._if_over(incoming)

    def _if_over(self, incoming: _Incoming) -> list[tuple[TransferToken, NeuronDiError | None]]:
        """Under the lock: the token to complete, where nothing more happens to its memory."""
        tag = incoming.receive.tag
        if incoming.num_writing or self._incoming.get(tag) is not incoming:
            return []
        if incoming.error is None and incoming.remaining:
            return []
        del self._incoming[tag]
        self._lock.notify_all()
        if incoming.start_s is not None:
            incoming.token.transfer_s = now_s() - incoming.start_s
        if incoming.error is None:
            incoming.token.kv_bytes = incoming.total
        return [(incoming.token, incoming.error)]

    def _serve(self, inlet: _Inlet) -> None:
        raw = bytearray(FRAME_BYTES)
        try:
            lower_thread_priority(_NICE)
            while True:
                inlet.stream.receive_exactly(raw)
                self._take(inlet, read_frame(raw, (DATA, GONE, UNFIT)))
        except Exception as error:  # of one peer: its receives end, and it is dialled anew
            failure = as_peer_error(error)
            with self._lock:
                is_first = self._error is None
            if is_first:
                _log.warning("data_connection_ended", peer=self._peer, reason=failure.message)
            self.fail(failure)
        finally:
            inlet.stream.close()

    def _take(self, inlet: _Inlet, frame: Frame) -> None:
        with self._lock:
            incoming, wanted = inlet.wanted.pop(frame.tag, (None, None))
            if incoming is None or wanted is None or frame[1:] != wanted[1:]:
                raise RemoteProtocolError("the prefill worker sends what nobody asked for")
            inlet.num_bytes -= frame.length
            ended = []
            if frame.kind == GONE:
                error: NeuronDiError = KvMissing("the prefill worker has not got this transfer")
                ended = self._give_up(incoming, error)
            elif frame.kind == UNFIT:
                error = RemoteProtocolError("the prefill worker means another number of bytes")
                ended = self._give_up(incoming, error)
            is_taken = frame.kind == DATA and incoming.error is None
            if is_taken:
                incoming.num_writing += 1
                incoming.start_s = incoming.start_s or now_s()
        end_tokens(ended)
        if is_taken:
            self._fill(inlet, incoming, frame)
        elif frame.kind == DATA:
            self._drop(inlet, frame.length)

    def _fill(self, inlet: _Inlet, incoming: _Incoming, frame: Frame) -> None:
        runs, memory = incoming.receive.runs, incoming.receive.memory
        error: NeuronDiError | None = None
        try:
            offsets, lengths = runs.destination_offsets, runs.lengths
            if frame.length != frame.total:
                offsets, lengths = part_of(offsets, lengths, frame.offset, frame.length)
            deadline = deadline_of(frame.length, inlet.stream.silence_s)
            inlet.stream.receive_runs(memory.address, offsets, lengths, deadline)
        except Exception as failure:
            error = as_peer_error(failure)
        with self._lock:
            incoming.num_writing -= 1
            if error is None:
                incoming.remaining -= frame.length
            # Cancelled while its last bytes came: they are all there.
            if not incoming.remaining and isinstance(incoming.error, KvMissing):
                incoming.error = None
            ended = self._give_up(incoming, error) if error else self._if_over(incoming)
        is_short = incoming.total <= _SHORT_BYTES_MAX
        for token, reason in ended:
            self._token_thread.complete(token, reason, is_short=is_short or reason is not None)
        if error is not None:
            raise error

    def _drop(self, inlet: _Inlet, num_bytes: int) -> None:
        scratch = np.empty(min(num_bytes, _SCRATCH_BYTES), np.uint8)
        deadline = deadline_of(num_bytes, inlet.stream.silence_s)
        while num_bytes:
            length = min(num_bytes, len(scratch))
            inlet.stream.receive_runs(
                int(scratch.ctypes.data),
                np.zeros(1, np.int64),
                np.array([length], np.int64),
                deadline,
            )
            num_bytes -= length
