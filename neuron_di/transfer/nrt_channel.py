"""Messages that go through communicators of the device, first in, first out.

The device can neither take a posted message back nor say which of them it means: it matches sends
and receives by their order. So nothing is posted out of turn, never more than the runtime allows,
and a message that failed leaves the order unknown: the channel is broken for good.

A channel has one communicator, or all between two processes. In the latter its messages have one
order over all of them, the same at both ends, and what is posted is always a first part of it. So
two ends that post in batches, each waiting for its last one, never wait for each other.

A batch that failed may have been posted in part. Then the order has fewer messages at this end than
at the other, and each that comes later is taken for an earlier one: whatever was posted behind it
counts as failed, even where it says that it is done. And where the device goes on by itself with
the batches that it has, none of them is of another movement: else those of the next would end one
of the peer's that is not whole, without an error there.

All of this runs on the poster's thread.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from neuron_di.errors import (
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    RemoteProtocolError,
)
from neuron_di_bindings.nrt import (
    NrtError,
    NrtMisuse,
    NrtRequestError,
    NrtRetry,
    NrtStatus,
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
    """Bytes of one tensor, through one communicator; both are the driver's."""

    movement: Movement
    communicator: object
    tensor: object
    offset: int
    num_bytes: int


class Posted(Protocol):
    """Messages that the device has."""

    def is_done(self) -> bool:
        """Whether all of them went or came. Not called again once it was so, or failed.

        RemoteProtocolError where one came with another length; NrtRetry, and TIMEOUT, where it may
        be asked again. What another error leaves of them is unknown.
        """
        ...


class PostFailed(Exception):
    """Raised when a post failed, and the device may have any of its messages."""


Post = Callable[[Sequence[Message]], Posted]


@dataclass(eq=False, slots=True)
class Channel:
    """Communicators that are connected. `error` says why nothing can be posted any more.

    `post` gives messages to the device: of one movement, in the order of the channel, of each
    communicator at most `batch_max`, and so that it never has more than `pending_max`. NrtRetry,
    NrtRequestError, NrtMisuse and ValueError mean that the device took none of them.

    `is_one_movement`: while messages of one movement are posted, none of another is.
    """

    post: Post
    pending_max: int
    batch_max: int = 1
    is_one_movement: bool = False
    waiting: deque[Message] = field(default_factory=deque)
    posted: deque[tuple[Posted, list[Message]]] = field(default_factory=deque)
    error: NeuronDiError | None = None
    _num_pending: dict[object, int] = field(default_factory=dict, init=False)  # by communicator
    _is_shifted: bool = field(default=False, init=False)  # a batch failed: nothing behind it counts

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
            while self.waiting and self.error is None and self._post(over):
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
            _lose(self._forget_oldest(), error, over)

    def _is_done(self, over: list[Movement]) -> bool:
        """Whether those that were posted first are over; then they are forgotten."""
        request, _ = self.posted[0]
        try:
            if not request.is_done():
                return False
        except (NrtError, NrtMisuse) as error:
            if isinstance(error, NrtRetry) or is_late(error):
                return False  # it may be asked again
            self._is_shifted = True
            self.error = self.error or PeerGone(f"a message between devices failed: {error}")
            _lose(self._forget_oldest(), self.error, over)
            if isinstance(error, NrtWorkerError):
                raise
            return True
        except RemoteProtocolError as error:
            self.error = self.error or error
            self.posted[0][1][0].movement.fail(error)
        messages = self._forget_oldest()
        if self._is_shifted:
            assert self.error is not None, "a batch failed"
            _lose(messages, self.error, over)
            return True
        for message in messages:
            _count_down(message.movement, over)
        return True

    def _forget_oldest(self) -> list[Message]:
        _, messages = self.posted.popleft()
        for message in messages:
            self._num_pending[message.communicator] -= 1
        return messages

    def _post(self, over: list[Movement]) -> bool:
        """Whether something was posted."""
        messages = self._next_messages()
        if not messages:
            return False
        try:
            request = self.post(messages)
        except NrtRetry:
            return False  # others of this core have to be done first
        except NrtRequestError as error:
            self.error = PeerGone(f"the device did not take a message: {error}")
            return False
        except (NrtMisuse, ValueError) as bug:
            self.error = LocalProtocolError(f"a message that cannot be: {type(bug).__name__}")
            return False
        except PostFailed as error:
            self.error = PeerGone(f"the device did not take a transfer: {error}")
            _lose(self._take_out(messages), self.error, over)
            return True
        except NrtWorkerError:
            raise
        except Exception as bug:  # in front of the call, or behind it
            self.error = LocalProtocolError(f"a transfer engine failed: {type(bug).__name__}")
            _lose(self._take_out(messages), self.error, over)
            raise
        self.posted.append((request, self._take_out(messages)))
        for message in messages:
            communicator = message.communicator
            self._num_pending[communicator] = self._num_pending.get(communicator, 0) + 1
        return True

    def _next_messages(self) -> list[Message]:
        """That may be posted now, at once: the first ones that wait."""
        first, pending = self.waiting[0], self._num_pending
        movement = first.movement
        if self.is_one_movement and self.posted and self.posted[-1][1][0].movement is not movement:
            return []
        waiting = self.waiting
        is_alone = len(waiting) == 1 or waiting[1].communicator is first.communicator
        if is_alone and self.batch_max == 1:  # as in each channel of one communicator
            is_full = pending.get(first.communicator, 0) >= self.pending_max
            return [] if is_full else [first]
        num_taken: dict[object, int] = {}
        messages = []
        for message in waiting:
            communicator = message.communicator
            count = num_taken.get(communicator, 0)
            is_full = pending.get(communicator, 0) + count >= self.pending_max
            if message.movement is not movement or is_full or count >= self.batch_max:
                break
            num_taken[communicator] = count + 1
            messages.append(message)
        return messages

    def _take_out(self, messages: list[Message]) -> list[Message]:
        """They wait no more: they are posted, as far as anybody knows."""
        for message in messages:
            self.waiting.popleft()
            message.movement.num_posted += 1
        return messages


def is_late(error: Exception) -> bool:
    """Whether the runtime says that something did not happen yet: it may be asked again."""
    return isinstance(error, NrtError) and error.status == NrtStatus.TIMEOUT


def _lose(messages: Sequence[Message], error: NeuronDiError, over: list[Movement]) -> None:
    for message in messages:
        message.movement.num_stuck += 1
        message.movement.fail(error)
        _count_down(message.movement, over)


def _count_down(movement: Movement, over: list[Movement]) -> None:
    movement.num_left -= 1
    assert movement.num_left >= 0, "each message ends once"
    if not movement.num_left:
        over.append(movement)
