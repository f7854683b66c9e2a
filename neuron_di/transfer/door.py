"""ZMQ's own question whether a connection may be kept (ZAP, RFC 27), answered on this loop.

libzmq asks over an in-process socket once a client has proved that it has its secret key. The
answer may take its time: a key that the directory does not have yet is waited for, and the
client notices nothing but the delay.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from neuron_di.obs import LimitedLogger
from neuron_di.transfer.admission import Admission
from neuron_di.transfer.signal_keys import SignalKeys
from neuron_di.transfer.signal_socket import SignalSocket

_refusals = LimitedLogger(__name__)

WAITING_MAX = 64  # connections with an unknown key; one more is refused at once
WAITING_PER_ADDRESS_MAX = 16  # of them; a host may have that many decode workers
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION, _OK, _REFUSED = b"1.0", b"200", b"400"


@dataclass(frozen=True, slots=True)
class Guard:
    """What a bound end of the signal link encrypts with, and whom it lets in.

    An unknown key is waited for during `patience_s`. `on_refused` is called for each connection
    that is not kept.
    """

    keys: SignalKeys
    admission: Admission
    patience_s: float
    on_refused: Callable[[], None]


@dataclass(slots=True)
class _Waiting:
    route: bytes
    call: bytes  # ZMQ's number for the question
    address: str
    key: str
    end: asyncio.TimerHandle | None = None


class Door:
    """Answers for every bound socket of one context. Open it before the first of them."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", guard: Guard) -> None:
        self._guard = guard
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Waiting] = []
        socket = context.socket(zmq.ROUTER)
        socket.bind(_ENDPOINT)
        self._socket = SignalSocket(socket, self._on_question)
        guard.admission.on_change = self._look_again

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        self._guard.admission.on_change = lambda: None
        for waiting in self._waiting:
            if waiting.end is not None:
                waiting.end.cancel()
        self._waiting.clear()
        self._socket.close(linger_ms=0)

    def _on_question(self, frames: list[bytes]) -> None:
        route, _, _, call, _, address, _, mechanism, *credentials = frames
        if mechanism != b"CURVE" or len(credentials) != 1:
            self._answer(_Waiting(route, call, address.decode("latin-1"), ""), is_good=False)
            return
        key = z85.encode(credentials[0]).decode("ascii")
        asked = _Waiting(route, call, address.decode("latin-1"), key)
        admission = self._guard.admission
        if admission.is_good(key):
            self._answer(asked, is_good=True)
        elif admission.may_become_good(key) and self._has_room(asked.address):
            asked.end = self._loop.call_later(self._guard.patience_s, self._give_up, asked)
            self._waiting.append(asked)
        else:
            self._answer(asked, is_good=False)

    def _has_room(self, address: str) -> bool:
        """Whether one more may wait; one host does not take all the places."""
        num_there = sum(each.address == address for each in self._waiting)
        return len(self._waiting) < WAITING_MAX and num_there < WAITING_PER_ADDRESS_MAX

    def _look_again(self) -> None:
        """The directory told of somebody."""
        for waiting in [each for each in self._waiting if self._guard.admission.is_good(each.key)]:
            assert waiting.end is not None, "whoever waits has a deadline"
            waiting.end.cancel()
            self._waiting.remove(waiting)
            self._answer(waiting, is_good=True)

    def _give_up(self, waiting: _Waiting) -> None:
        self._waiting.remove(waiting)
        self._answer(waiting, is_good=False)

    def _answer(self, asked: _Waiting, *, is_good: bool) -> None:
        if not is_good:
            _refusals.warning("key_refused", address=asked.address, key=asked.key[:8])
            self._guard.on_refused()
        code, text = (_OK, b"") if is_good else (_REFUSED, b"this key is not in the directory")
        user = asked.key.encode("ascii")
        self._socket.send([asked.route, b"", _VERSION, asked.call, code, text, user, b""])
