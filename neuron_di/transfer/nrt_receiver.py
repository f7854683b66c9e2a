"""Decode's half of all transfers from one peer: offers are matched with receives, by tag.

Until an offer is accepted everything can be called off. From then on the device owns the transfer:
its receives are posted, and its token is done when they are.

All of this runs on the poster's thread.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from neuron_di.clock import Deadline, now_s
from neuron_di.errors import (
    CapacityError,
    KvMissing,
    LocalProtocolError,
    NeuronDiError,
    RemoteProtocolError,
)
from neuron_di.transfer.nrt_channel import Movement
from neuron_di.transfer.nrt_exchange import Exchange
from neuron_di.transfer.nrt_frames import (
    ACCEPT,
    CROWDED,
    GIVEN_UP,
    OFFER,
    REFUSE,
    UNFIT,
    WITHDRAW,
    WITHDRAWN,
    Frame,
)
from neuron_di.transfer.nrt_plan import Moves
from neuron_di.transfer.transfer_engine import Receive, TransferToken

RECEIVES_MAX = 1024  # open at once, of one peer; and so many offers that wait for theirs
_CANCELLED_MAX = 1024

# How a token ends: on a thread on which verifying what came may take its time.
Complete = Callable[[TransferToken, NeuronDiError | None], None]


@dataclass(eq=False, slots=True)
class _Incoming:
    receive: Receive
    token: TransferToken
    moves: Moves
    start_s: float = 0.0


class NrtReceiver:
    """A Listener. `on_arrived` is told what came, before anybody else is."""

    def __init__(
        self, exchange: Exchange, on_arrived: Callable[[Receive], object], complete: Complete
    ) -> None:
        self.exchange = exchange
        self.idle = threading.Event()  # nothing is posted
        self.idle.set()
        self._on_arrived = on_arrived
        self._complete = complete
        self._waiting: dict[int, _Incoming] = {}  # by tag: no offer has come
        self._accepted: dict[int, _Incoming] = {}
        self._offers: dict[int, Frame] = {}  # that wait for their receives, by tag
        self._last_number = 0  # of an offer
        self._cancelled: OrderedDict[int, None] = OrderedDict()  # whose offers may still come

    has_open = False  # it answers, and asks nothing

    def post(self, receive: Receive, token: TransferToken, make_moves: Callable[[], Moves]) -> None:
        if self.exchange.error is not None:
            self._complete(token, self.exchange.error)
            return
        tag = receive.tag
        if tag in self._waiting or tag in self._accepted:
            self._complete(token, LocalProtocolError("two open transfers have one tag"))
            return
        if len(self._waiting) + len(self._accepted) >= RECEIVES_MAX:
            self._complete(token, CapacityError("too many transfers from one prefill worker"))
            return
        try:
            moves = make_moves()
        except NeuronDiError as error:
            self._complete(token, error)
            return
        self._cancelled.pop(tag, None)
        self._waiting[tag] = _Incoming(receive, token, moves)
        self.idle.clear()
        offer = self._offers.pop(tag, None)
        if offer is not None:
            self._take(offer)

    def cancel(self, tag: int) -> None:
        incoming = self._waiting.pop(tag, None)
        if incoming is None:
            return
        self._cancelled[tag] = None
        if len(self._cancelled) > _CANCELLED_MAX:
            self._cancelled.popitem(last=False)
        self._end(incoming.token, KvMissing("the transfer was given up"))

    def fail(self, token: TransferToken, error: NeuronDiError) -> None:
        """Something is wrong with this end of a receive. Where the device may have it, the link
        ends, and its token when the device is through with it, or lost."""
        if any(each.token is token for each in self._accepted.values()):
            self.exchange.break_off(error)
            return
        for tag, incoming in list(self._waiting.items()):
            if incoming.token is token:
                del self._waiting[tag]
        if not token.is_done():
            self._end(token, error)

    def heard(self, frame: Frame) -> None:
        match frame.kind:
            case kind if kind == OFFER:
                if frame.number <= self._last_number:
                    raise RemoteProtocolError("a prefill worker's offers are out of order")
                self._last_number = frame.number
                self._take(frame)
            case kind if kind == WITHDRAW:
                if frame.number > self._last_number:
                    raise RemoteProtocolError("a prefill worker withdrew what it had not offered")
                offer = self._offers.get(frame.tag)
                if offer is not None and offer.number == frame.number:
                    del self._offers[frame.tag]
                    self._refuse(offer, WITHDRAWN)
            case _:
                raise RemoteProtocolError("a prefill worker said what only a decode worker may")

    def tick(self) -> Deadline | None:
        """Nothing to do: whoever posted a receive cancels it when it has waited enough."""

    def ended(self, error: NeuronDiError, *, is_broken: bool) -> None:  # noqa: ARG002
        waiting, self._waiting = self._waiting, {}
        for incoming in waiting.values():
            self._end(incoming.token, error)
        offers, self._offers = self._offers, {}
        for offer in offers.values():
            self._refuse(offer, GIVEN_UP)

    def _take(self, offer: Frame) -> None:
        """An offer: accept, refuse or keep it."""
        incoming = self._waiting.get(offer.tag)
        if self.exchange.error is not None or offer.tag in self._cancelled:
            self._cancelled.pop(offer.tag, None)
            self._refuse(offer, GIVEN_UP)
        elif incoming is not None:
            del self._waiting[offer.tag]
            self._accept(offer, incoming)
        elif offer.tag in self._offers or offer.tag in self._accepted:
            raise RemoteProtocolError("a prefill worker offered one transfer twice")
        elif len(self._offers) >= RECEIVES_MAX:
            self._refuse(offer, CROWDED)
        else:
            self._offers[offer.tag] = offer

    def _accept(self, offer: Frame, incoming: _Incoming) -> None:
        moves = incoming.moves
        if (offer.num_bytes, offer.digest) != (moves.num_bytes, moves.digest()):
            self._refuse(offer, UNFIT)
            error = RemoteProtocolError("the two ends of a transfer reckon different bytes")
            self._end(incoming.token, error)
            return
        incoming.start_s = now_s()
        self._accepted[offer.tag] = incoming
        self.exchange.begin(moves, lambda over: self._over(incoming, over))
        self.exchange.link.send(Frame(ACCEPT, offer.number))  # where none was taken it is shut

    def _refuse(self, offer: Frame, reason: int) -> None:
        self.exchange.link.send(Frame(REFUSE, offer.number, reason))

    def _over(self, incoming: _Incoming, movement: Movement) -> None:
        del self._accepted[incoming.receive.tag]
        token = incoming.token
        if movement.error is None:
            token.kv_bytes = incoming.moves.num_bytes
            token.transfer_s = now_s() - incoming.start_s
            self._on_arrived(incoming.receive)
        self._end(token, movement.error)

    def _end(self, token: TransferToken, error: NeuronDiError | None) -> None:
        """Of a receive that is neither waiting nor accepted any more."""
        if not self._waiting and not self._accepted:
            self.idle.set()
        self._complete(token, error)
