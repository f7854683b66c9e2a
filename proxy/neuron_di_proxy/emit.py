"""Where an attempt's tokens go: one by one to who writes them, or by a lane of their own."""

from collections.abc import Callable
from typing import Protocol

from neuron_di.wire import Token
from neuron_di_proxy.token_lane import Lane

# Gets a request's tokens, each once, in order, at once, on the event loop. It does not block.
Emit = Callable[[Token], None]


class MakeLane(Protocol):
    """Makes the lane from a leg to the client for all tokens from the next one on.

    Or for the first one, and no other. None: there can be none now.
    """

    def __call__(self, *, is_first: bool) -> Lane | None: ...


def no_lane(*, is_first: bool) -> None:
    """A MakeLane for tokens that are all to be emitted."""
