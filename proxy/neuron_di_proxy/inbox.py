"""What the legs of one attempt say, in the order in which it can be dealt with.

Legs push: whatever they say is dealt with before they go on, on the event loop. Two things
differ from that. A leg may be told to *pause* until its partner has spoken: what it says
meanwhile is kept. And one leg's tokens may be *relayed*: they take a short way of their own.
"""

from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from neuron_di.errors import RemoteProtocolError
from neuron_di.wire import Finished, Released, Token, TokenLogprobs
from neuron_di_proxy.workers import Hear, Said

# Tokens that are kept of a leg that pauses. What says more floods us.
KEPT_MAX = 4096
TEXT_PER_TOKEN = 64  # characters; more text counts as more tokens
_NUMBER_TEXT = 8  # what a number, or an alternative's few, count as: characters

Side = Literal["prefill", "decode", "whole"]
OnToken = Callable[[Token], None]

_TERMINAL = (Exception, Finished, Released)  # what a leg ends with, as it is heard


class Heard(msgspec.Struct, frozen=True):
    """One event of a leg, or what ended the leg instead of one."""

    side: Side
    said: Said


class Inbox:
    """Hears the legs of one attempt until `close`, and has `deal` deal with each event.

    `deal` is called for one event after the other, never from within itself. It does not raise.
    """

    def __init__(self, deal: Callable[[Heard], None]) -> None:
        self._deal = deal
        self._due: deque[Heard] = deque()
        self._is_dealing = False
        self._is_closed = False
        self._ears: dict[Side, _Ear] = {}

    def listen(self, side: Side, *, pause: bool = False) -> Hear:
        """What a leg is to be opened with. With `pause`, only its first event until `resume`."""
        ear = _Ear(self, side, pauses=pause)
        if self._is_closed:
            ear.end()
        else:
            self._ears[side] = ear
        return ear.hear

    def resume(self) -> None:
        """Go on where a leg was to pause."""
        for ear in self._ears.values():
            ear.pauses = ear.is_paused = False
            if ear.kept:
                self._due.extend(ear.kept)
                ear.kept.clear()
        self._deal_with_all()

    def relay(self, side: Side | None, on_token: OnToken) -> None:
        """From now on give this side's tokens to `on_token` as they come; no other side's.

        An exception of `on_token` ends the side, as if its leg had ended with it.
        """
        for ear in self._ears.values():
            is_meant = ear.side == side and not ear.is_over and not ear.is_paused
            ear.relay = on_token if is_meant else None

    def lose(self, side: Side, error: Exception) -> None:
        """End a leg that may never say anything again, as if it had ended with `error`.

        What was kept of it is forgotten.
        """
        ear = self._ears.get(side)
        if ear is not None and not ear.is_over:
            ear.end()
            self._due.append(Heard(side, error))
            self._deal_with_all()

    def put(self, ear: "_Ear", said: Said) -> None:
        """Deal with what an ear heard, or keep it."""
        is_kept = ear.is_paused
        if is_kept:
            ear.weight += _weight_of(said)
            if ear.weight > KEPT_MAX:
                self.lose(ear.side, RemoteProtocolError("a worker says more than can be kept"))
                return
            ear.kept.append(Heard(ear.side, said))
        else:
            ear.is_paused = ear.pauses
            self._due.append(Heard(ear.side, said))
        if isinstance(said, _TERMINAL):
            ear.is_over = True
            ear.relay = None
        if not is_kept:
            self._deal_with_all()

    def close(self) -> None:
        """Hear nothing more. Nothing refers to anything then: no garbage is left to find."""
        self._is_closed = True
        for ear in self._ears.values():
            ear.end()
        self._ears.clear()
        self._due.clear()
        self._deal = _ignore

    def _deal_with_all(self) -> None:
        if self._is_dealing:  # who called this is in the midst of it
            return
        self._is_dealing = True
        while self._due:
            self._deal(self._due.popleft())
        self._is_dealing = False


def _weight_of(said: Said) -> int:
    """What it counts as, in tokens."""
    if not isinstance(said, Token):
        return 1
    num_characters = len(said.text)
    candidates: list[TokenLogprobs | None] = [said.logprobs]
    if said.prompt is not None:
        candidates += said.prompt.logprobs or ()
        num_characters += len(said.prompt.text) + _NUMBER_TEXT * len(said.prompt.token_ids)
    for each in candidates:
        if each is not None:
            for one in (each.chosen, *each.top):
                num_characters += _NUMBER_TEXT + len(one.text) + len(one.token_bytes)
    return 1 + num_characters // TEXT_PER_TOKEN


class _Ear:
    """One side of an inbox."""

    __slots__ = ("inbox", "is_over", "is_paused", "kept", "pauses", "relay", "side", "weight")

    def __init__(self, inbox: Inbox, side: Side, *, pauses: bool) -> None:
        self.inbox = inbox
        self.side: Side = side
        self.pauses = pauses  # after its first event
        self.is_paused = False
        self.kept: list[Heard] = []  # while paused
        self.weight = 0  # of all that was ever kept
        self.relay: OnToken | None = None
        self.is_over = False

    def hear(self, said: Said) -> None:
        relay = self.relay
        if relay is not None and type(said) is Token:
            try:
                relay(said)
            except Exception as error:
                self.inbox.lose(self.side, error)
        elif not self.is_over:
            self.inbox.put(self, said)

    def end(self) -> None:
        """Nothing is heard from now on, and what was kept is forgotten."""
        self.is_over = True
        self.relay = None
        self.kept.clear()


def _ignore(_: Heard) -> None:
    """What is done with events of an attempt that is over."""
