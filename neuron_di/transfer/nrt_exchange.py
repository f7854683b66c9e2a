"""One link between two devices: its control connection, its channels, and what is under way.

A link that breaks leaves messages behind that were agreed on and posted. They have a grace time to
go through all the same, as they do when only the control connection broke. If they do not, the
device cannot be used any more: nobody can take a posted message back, and it may still come, at any
time, into a slot that is another request's by then. Only a new process has a device without it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from neuron_di.clock import Deadline, now_s
from neuron_di.errors import (
    LocalProtocolError,
    NeuronDiError,
    PeerTimeout,
    RemoteProtocolError,
)
from neuron_di.obs import get_logger
from neuron_di.transfer.nrt_channel import Channel, Message, Movement
from neuron_di.transfer.nrt_connections import PROBE_BYTES, ConnectionSet, Place
from neuron_di.transfer.nrt_frames import Frame
from neuron_di.transfer.nrt_link import ControlLink
from neuron_di.transfer.nrt_plan import Moves
from neuron_di.transfer.nrt_poster import Poster

_log = get_logger(__name__)

_UNHEARD_MAX = 64  # frames that were read, and that the poster has not come to


@dataclass(frozen=True, slots=True, kw_only=True)
class NrtTimes:
    """How long an engine waits, in seconds."""

    proof_s: float = 5.0  # for the control connection and its proof
    silence_s: float = 5.0  # for the rest of a frame
    connect_s: float = 30.0  # for all of connecting, the device's connections with it
    unclaimed_s: float = 30.0  # for a posted send to be accepted
    answer_s: float = 5.0  # for the answer to a withdrawal
    stall_s: float = 30.0  # without any message being done while some are posted
    grace_s: float = 10.0  # for what is posted when a link breaks
    close_s: float = 5.0  # for what is posted, at close()


OnOver = Callable[[Movement], object]


class Listener(Protocol):
    """Whoever has the exchange. Called on the poster's thread."""

    def heard(self, frame: Frame) -> None:
        """RemoteProtocolError where the peer may not say that."""
        ...

    def ended(self, error: NeuronDiError, *, is_broken: bool) -> None:
        """Nothing new can begin. What has begun goes on, or fails in time. A link that is not
        broken, and ends in good order, may break later: then this is called again."""
        ...

    def tick(self) -> Deadline | None:
        """As an Agent's."""
        ...

    @property
    def has_open(self) -> bool:
        """Whether it waits for words of the peer. A link in good order ends after them."""
        ...


class _Nobody:
    """While the link is not proved, and once it is over."""

    has_open = False

    def heard(self, frame: Frame) -> None:  # noqa: ARG002
        raise RemoteProtocolError("a peer's device says things out of turn")

    def ended(self, error: NeuronDiError, *, is_broken: bool) -> None:
        """Whoever waits finds out."""

    def tick(self) -> Deadline | None:
        return None


class Exchange:
    """An Agent of the poster. Made by any thread, used on the poster's.

    `tensors` are the device's, as the driver takes them. `on_stuck` is told how many of a
    transfer's messages are posted for good, before the transfer is over. `quiet` is set once the
    link is over and nothing is under way any more.
    """

    def __init__(
        self,
        poster: Poster,
        link: ControlLink,
        connections: ConnectionSet,
        tensors: Sequence[object],
        times: NrtTimes,
        on_stuck: Callable[[int], object],
    ) -> None:
        self.quiet = threading.Event()
        self.error: NeuronDiError | None = None  # why nothing new begins
        self.link = link
        self._poster = poster
        self._connections = connections
        self._tensors = tensors
        self._times = times
        self._on_stuck = on_stuck
        self._listener: Listener = _Nobody()
        self._unheard = threading.Semaphore(_UNHEARD_MAX)
        self._is_broken = False  # the peer hears nothing of this end any more
        self._grace = Deadline.after(0.0)
        self._moved_s = now_s()
        connections.is_used = True

    def start(self, listener: Listener) -> None:
        """On the poster's thread: from now on `listener` hears what the peer says."""
        self._listener = listener
        if self.error is not None:
            self._tell()

    def read_on(self) -> None:
        """Read what the peer says until the link ends. Blocks; owns the link, and closes it."""
        try:
            while True:
                frame = self.link.read()
                if not self._unheard.acquire(timeout=self._times.stall_s):
                    raise PeerTimeout("this worker's device is busy")
                if not self._poster.call(partial(self._hear, frame)):
                    return
        except NeuronDiError as error:
            self._poster.call(partial(self.break_off, error))
        finally:
            self.link.shut()
            self.link.close()

    def begin(self, moves: Moves, on_over: OnOver) -> None:
        """Post these messages behind all that began before. `on_over` is called at the end.

        Whatever fails breaks the link off, and is told by `on_over` alone: nobody but the movement
        knows what of it the device has by then.
        """
        assert not self._is_broken, "nothing begins on a link that is broken"
        movement = self._movement(len(moves.lengths), on_over, self._on_stuck)
        try:
            self._post(self._messages(moves, movement))
        except Exception as bug:
            _log.exception("nrt_transfer_failed")
            error = LocalProtocolError(f"a transfer engine failed: {type(bug).__name__}")
            self.break_off(error)
            if movement.num_left and not movement.num_posted:
                self._take_back(movement)
                movement.fail(error)
                on_over(movement)

    def _take_back(self, movement: Movement) -> None:
        """Nothing of it was posted, and perhaps not all of it waits: it would never be over."""
        for channel in self._connections.channels:
            while channel.waiting and channel.waiting[-1].movement is movement:
                channel.waiting.pop()
        movement.num_left = 0

    def _messages(self, moves: Moves, movement: Movement) -> list[tuple[Channel, Message]]:
        """In the order in which both ends post them: the first of each pair, the second of each …

        So what is posted first is spread over all pairs, however much may be posted at once.
        """
        is_send = self._connections.direction == "send"
        numbers, offsets = (
            (moves.source_tensors, moves.source_offsets)
            if is_send
            else (moves.destination_tensors, moves.destination_offsets)
        )
        places = self._connections.places
        if len(moves.starts) != len(places) + 1:
            raise ValueError("a transfer over other connections than there are")
        pairs, order = moves.in_turns()
        columns = (pairs, numbers[order], offsets[order], moves.lengths[order])
        return [
            _message(movement, places[pair], self._tensors[number], offset, num_bytes)
            for pair, number, offset, num_bytes in zip(*(c.tolist() for c in columns), strict=True)
        ]

    def begin_probe(self, probes: Sequence[object], on_over: OnOver) -> None:
        """The first thing: a short message through each channel, from or to its place's probe."""
        self._poster.add(self)
        # Nobody else uses its memory: what is posted for good there costs no device.
        movement = self._movement(len(probes), on_over, lambda _: None)
        places = self._connections.places
        self._post(
            [
                _message(movement, place, probe, place.probe_offset, PROBE_BYTES)
                for place, probe in zip(places, probes, strict=True)
            ]
        )

    def _movement(
        self, num_messages: int, on_over: OnOver, on_stuck: Callable[[int], object]
    ) -> Movement:
        is_send = self._connections.direction == "send"
        lncs = frozenset[int]() if is_send else frozenset(p.lnc for p in self._connections.places)
        return Movement(num_messages, lncs, on_over, on_stuck)

    def _post(self, messages: Sequence[tuple[Channel, Message]]) -> None:
        """Behind what waits on their channels."""
        for channel, message in messages:
            channel.waiting.append(message)
        self._moved_s = now_s()
        self._poster.step([self])

    def finish(self, error: NeuronDiError) -> None:
        """Nothing new begins; what has begun ends in good order, and the link after it."""
        if self.error is None:
            self.error = error
            self._tell()

    def break_off(self, error: NeuronDiError) -> None:
        """The link is of no use any more. What has begun has its grace time."""
        if self._is_broken:
            return
        self._is_broken = True
        self._grace = Deadline.after(self._times.grace_s)
        self.error = self.error or error
        self.link.shut()
        self._tell()

    def abandon(self, error: NeuronDiError) -> None:
        """Wait for nothing any more."""
        self.break_off(error)
        over: list[Movement] = []
        for channel in self.busy_channels():
            channel.abandon(error, over)
        self._poster.finish(over)

    def busy_channels(self) -> Sequence[Channel]:
        return [channel for channel in self._connections.channels if channel.is_busy]

    def moved(self) -> None:
        self._moved_s = now_s()
        for channel in self._connections.channels:
            if channel.error is not None:
                self.break_off(channel.error)

    def tick(self) -> Deadline | None:
        soonest = self._listener.tick()
        busy = self.busy_channels()
        if not busy:
            is_over = self._is_broken or not self._listener.has_open
            if self.error is not None and is_over:
                self._end()
            return soonest
        limit = self._grace if self._is_broken else Deadline(self._moved_s + self._times.stall_s)
        if not limit.has_passed():
            return limit if soonest is None else limit.earlier_of(soonest)
        if not self._is_broken:
            self.break_off(PeerTimeout("nothing moves between the two devices any more"))
            return self._grace
        assert self.error is not None, "it is broken"
        self.abandon(self.error)
        return self.tick()

    def _end(self) -> None:
        """The last thing that it does: its listener may serve the next link from now on, and its
        reader still has to find out that this one is over."""
        channels = self._connections.channels
        self._poster.remove(self)
        self.link.shut()
        self._is_broken = True
        self._listener = _Nobody()
        if any(channel.error is not None for channel in channels):
            self._connections.is_broken = True
        self._connections.is_used = False
        self.quiet.set()

    def _hear(self, frame: Frame) -> None:
        self._unheard.release()
        if self._is_broken:
            return
        try:
            self._listener.heard(frame)
        except NeuronDiError as error:
            self.break_off(error)
        except Exception as bug:  # the peer waits for an answer that it may never get
            _log.exception("nrt_frame_failed")
            self.break_off(LocalProtocolError(f"a transfer engine failed: {type(bug).__name__}"))

    def _tell(self) -> None:
        assert self.error is not None, "it is over"
        self._listener.ended(self.error, is_broken=self._is_broken)


def _message(
    movement: Movement, place: Place, tensor: object, offset: int, num_bytes: int
) -> tuple[Channel, Message]:
    assert place.channel is not None, "it is connected"
    return place.channel, Message(movement, place.communicator, tensor, offset, num_bytes)
