"""Until when a client must have read something of what was written for it."""

from neuron_di.clock import now_s

NEVER = float("inf")


class SendDeadline:
    """Of one connection. A client that reads moves it on.

    Runs while the transport is full, and while something of a whole response is unsent.
    """

    __slots__ = ("_num_unsent", "_timeout_s", "at_s")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._num_unsent = 0  # at the last look
        self.at_s = NEVER

    def begin(self) -> None:
        """The transport is full."""
        self._num_unsent = 0
        self.at_s = now_s() + self._timeout_s

    def end(self) -> None:
        """It is no more."""
        self.at_s = NEVER

    def see(self, num_unsent: int, at_s: float) -> None:
        """Look how much there is to send still."""
        if num_unsent == 0:
            self.at_s = NEVER
        elif num_unsent < self._num_unsent or self.at_s == NEVER:
            self.at_s = at_s + self._timeout_s
        self._num_unsent = num_unsent
