"""Prefill's half of all transfers to one peer: each send is offered, and posted once accepted.

A send that nobody accepts in time is withdrawn. Only the peer's answer ends it then: an ACCEPT may
be on its way, and its receives are posted.

All of this runs on the poster's thread.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from neuron_di.clock import Deadline
from neuron_di.errors import (
    CapacityError,
    KvMissing,
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    PeerTimeout,
    RemoteProtocolError,
)
from neuron_di.transfer.nrt_channel import Movement
from neuron_di.transfer.nrt_exchange import Exchange, NrtTimes
from neuron_di.transfer.nrt_frames import ACCEPT, OFFER, REFUSALS, REFUSE, WITHDRAW, Frame
from neuron_di.transfer.nrt_plan import Moves
from neuron_di.transfer.transfer_engine import TransferToken

SENDS_MAX = 1024  # open at once, to one peer


@dataclass(eq=False, slots=True)
class _Outgoing:
    tag: int
    token: TransferToken
    moves: Moves
    deadline: Deadline  # to be accepted; once withdrawn, for the answer
    is_withdrawn: bool = False
    is_accepted: bool = False


class NrtSender:
    """The Listener of whichever exchange there is. Without one it has no open sends."""

    def __init__(
        self, times: NrtTimes, complete: Callable[[TransferToken, NeuronDiError | None], None]
    ) -> None:
        self.exchange: Exchange | None = None
        self.idle = threading.Event()
        self.idle.set()
        self._times = times
        self._complete = complete
        self._outgoing: dict[int, _Outgoing] = {}  # by number
        self._tags: set[int] = set()
        self._num_offers = 0

    def serve(self, exchange: Exchange) -> None:
        """From now on sends go by this one. Another one has ended before."""
        self.exchange = exchange
        exchange.start(self)

    def post(self, tag: int, token: TransferToken, make_moves: Callable[[], Moves]) -> None:
        exchange = self.exchange
        error: NeuronDiError | None = None
        if exchange is None or exchange.error is not None:
            error = PeerGone("no connection to the decode worker's device")
        elif not 0 <= tag < 1 << 64:
            error = LocalProtocolError("a transfer's tag is 64 bits")
        elif tag in self._tags:
            error = LocalProtocolError("two open transfers have one tag")
        elif len(self._outgoing) >= SENDS_MAX:
            error = CapacityError("too many transfers to one decode worker")
        else:
            try:
                moves = make_moves()
            except NeuronDiError as refusal:
                error = refusal
        if error is not None or exchange is None:
            self._complete(token, error)
            return
        number = self._num_offers = self._num_offers + 1
        deadline = Deadline.after(self._times.unclaimed_s)
        self._outgoing[number] = _Outgoing(tag, token, moves, deadline)
        self._tags.add(tag)
        self.idle.clear()
        exchange.link.send(Frame(OFFER, number, tag, moves.num_bytes, moves.digest()))

    def fail(self, token: TransferToken, error: NeuronDiError) -> None:
        """Something is wrong with this end of a send that nobody has accepted."""
        for number, outgoing in list(self._outgoing.items()):
            if outgoing.token is token:
                self._end(number, error)
        if not token.is_done():
            self._complete(token, error)

    def heard(self, frame: Frame) -> None:
        outgoing = self._outgoing.get(frame.number)
        if frame.kind not in (ACCEPT, REFUSE) or outgoing is None or outgoing.is_accepted:
            raise RemoteProtocolError("a decode worker answered what it was not asked")
        if frame.kind == REFUSE:
            reason = REFUSALS.get(frame.tag, "for a reason of its own")
            self._end(frame.number, KvMissing(f"the decode worker refused the transfer: {reason}"))
            return
        outgoing.is_accepted = True
        assert self.exchange is not None, "it heard this"
        self.exchange.begin(outgoing.moves, partial(self._over, frame.number))

    @property
    def has_open(self) -> bool:
        return any(not outgoing.is_accepted for outgoing in self._outgoing.values())

    def ended(self, error: NeuronDiError, *, is_broken: bool) -> None:
        """In good order, answers to what is withdrawn are waited for."""
        for number, outgoing in list(self._outgoing.items()):
            if outgoing.is_accepted:
                continue
            if is_broken:
                self._end(number, error)
            else:
                self._withdraw(number, outgoing)

    def tick(self) -> Deadline | None:
        unanswered = {n: each for n, each in self._outgoing.items() if not each.is_accepted}
        for number, outgoing in unanswered.items():
            if not outgoing.deadline.has_passed():
                continue
            if not outgoing.is_withdrawn:
                self._withdraw(number, outgoing)
                continue
            assert self.exchange is not None, "it was offered"
            self.exchange.break_off(PeerTimeout("the decode worker does not answer"))
            return None
        deadlines = [each.deadline for each in unanswered.values()]
        return min(deadlines, key=lambda each: each.at_s, default=None)

    def _withdraw(self, number: int, outgoing: _Outgoing) -> None:
        if outgoing.is_withdrawn:
            return
        assert self.exchange is not None, "it was offered"
        outgoing.is_withdrawn = True
        outgoing.deadline = Deadline.after(self._times.answer_s)
        self.exchange.link.send(Frame(WITHDRAW, number, outgoing.tag))

    def _over(self, number: int, movement: Movement) -> None:
        self._end(number, movement.error)

    def _end(self, number: int, error: NeuronDiError | None) -> None:
        outgoing = self._outgoing.pop(number, None)
        if outgoing is None:
            return
        self._tags.discard(outgoing.tag)
        if not self._outgoing:
            self.idle.set()
        self._complete(outgoing.token, error)
