"""One communicator of the device and the messages that go through it, first in, first out.

The device can neither take a posted message back nor say which of them it means: it matches sends
and receives by their order. So nothing is posted out of turn, never more than the runtime allows,
and a message that failed leaves the order unknown: the channel is broken for good.

All of this runs on the poster's thread.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from neuron_di.errors import (
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    RemoteProtocolError,
)
from neuron_di_bindings.nrt import (
    Communicator,
    NrtError,
    NrtMisuse,
    NrtRequest,
    NrtRequestError,
    NrtRetry,
    NrtStatus,
    NrtTensor,
    NrtWorkerError,
)


@dataclass(eq=False, slots=True)
class Movement:
    """One transfer's messages, on however many channels.

    It is over when none of them is left, and then `error` says how it went. `num_stuck`: messages
    that were posted, and nobody can tell whether the device is through with them. `on_stuck` is
    told how many, before `on_over` is called: its memory must not be used again.
    """

    num_left: int
    lncs: frozenset[int]
    on_over: Callable[["Movement"], object]
    on_stuck: Callable[[int], object]
    error: NeuronDiError | None = None
    num_posted: int = 0
    num_stuck: int = 0

    def fail(self, error: NeuronDiError) -> None:
        """The first error counts."""
        self.error = self.error or error


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes of one tensor."""

    movement: Movement
    tensor: NrtTensor
    offset: int
    num_bytes: int


@dataclass(eq=False, slots=True)
class Channel:
    """A communicator that is connected. `error` says why nothing can be posted any more."""

    communicator: Communicator
    pending_max: int
    waiting: deque[Message] = field(default_factory=deque)
    posted: deque[tuple[NrtRequest, Message]] = field(default_factory=deque)
    error: NeuronDiError | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self.posted or self.waiting)

    def step(self, over: list[Movement]) -> bool:
        """Look what is done, and post what may be. Movements that are over now come into `over`.

        Returns whether anything happened. NrtWorkerError where the device is lost.
        """
        has_moved = False
        try:
            while self.posted and self._is_done(over):
                has_moved = True
            while self.waiting and self.error is None and len(self.posted) < self.pending_max:
                if not self._post():
                    break
                has_moved = True
        except NrtWorkerError as error:
            self.error = self.error or PeerGone(f"this worker's device failed: {error}")
            raise
        finally:
            if self.error is not None and self.waiting:
                self.drop_waiting(over)
                has_moved = True
        return has_moved

    def drop_waiting(self, over: list[Movement]) -> None:
        """What was not posted never will be."""
        assert self.error is not None, "nothing else is dropped"
        while self.waiting:
            movement = self.waiting.popleft().movement
            movement.fail(self.error)
            _count_down(movement, over)

    def abandon(self, error: NeuronDiError, over: list[Movement]) -> None:
        """Wait for nothing any more: what is posted may still happen, at any time."""
        self.error = self.error or error
        self.drop_waiting(over)
        while self.posted:
            _, message = self.posted.popleft()
            _lose(message, error, over)

    def _is_done(self, over: list[Movement]) -> bool:
        """Whether the oldest one that is posted is over; then it is forgotten."""
        request, message = self.posted[0]
        try:
            num_bytes = request.test()
        except (NrtError, NrtMisuse) as error:
            if isinstance(error, NrtRetry) or is_late(error):
                return False  # it may be asked again
            self.posted.popleft()
            self.error = self.error or PeerGone(f"a message between devices failed: {error}")
            _lose(message, self.error, over)
            if isinstance(error, NrtWorkerError):
                raise
            return True
        if num_bytes is None:
            return False
        self.posted.popleft()
        if num_bytes != message.num_bytes:
            self.error = RemoteProtocolError("a message between devices came with another length")
            message.movement.fail(self.error)
        _count_down(message.movement, over)
        return True

    def _post(self) -> bool:
        message = self.waiting[0]
        communicator = self.communicator
        post = communicator.send if communicator.direction == "send" else communicator.receive
        try:
            request = post(message.tensor, message.offset, message.num_bytes)
        except NrtRetry:
            return False  # others of this core have to be done first
        except NrtRequestError as error:
            self.error = PeerGone(f"the device did not take a message: {error}")
            return False
        except (NrtMisuse, ValueError) as bug:
            self.error = LocalProtocolError(f"a message that cannot be: {type(bug).__name__}")
            return False
        self.waiting.popleft()
        message.movement.num_posted += 1
        self.posted.append((request, message))
        return True


def is_late(error: Exception) -> bool:
    """Whether the runtime says that something did not happen yet: it may be asked again."""
    return isinstance(error, NrtError) and error.status == NrtStatus.TIMEOUT


def _lose(message: Message, error: NeuronDiError, over: list[Movement]) -> None:
    message.movement.num_stuck += 1
    message.movement.fail(error)
    _count_down(message.movement, over)


def _count_down(movement: Movement, over: list[Movement]) -> None:
    movement.num_left -= 1
    assert movement.num_left >= 0, "each message ends once"
    if not movement.num_left:
        over.append(movement)
