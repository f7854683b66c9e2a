"""How much a tenant may take per minute."""

from neuron_di.clock import now_s

WINDOW_S = 60.0


class RateLimit:
    """An allowance that fills up evenly, to one minute's worth. It may be overdrawn.

    What a request will take is known when it ends. So it is let in while anything is left and
    takes what it took, be it more than there was: then nothing is left until that is made up
    for. Over time nobody gets more than the rate, and nobody pays for what was only asked for.
    """

    __slots__ = ("_at_s", "_left", "_per_minute")

    def __init__(self, per_minute: int) -> None:
        self._per_minute = float(per_minute)
        self._left = self._per_minute
        self._at_s = now_s()

    def change(self, per_minute: int) -> None:
        """Go on at another rate. What was taken stays taken."""
        if per_minute != self._per_minute:
            self._fill()
            self._left += per_minute - self._per_minute
            self._per_minute = float(per_minute)

    @property
    def is_full(self) -> bool:
        """Whether nothing is taken that was not made up for."""
        self._fill()
        return self._left >= self._per_minute

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there; 0: it is. `amount` is at most one minute's worth."""
        self._fill()
        return max(0.0, (amount - self._left) * WINDOW_S / self._per_minute)

    def take(self, amount: float) -> None:
        """Take it, whether or not it is there."""
        self._fill()
        self._left -= amount

    def _fill(self) -> None:
        now = now_s()
        gained = (now - self._at_s) * self._per_minute / WINDOW_S
        self._left = min(self._per_minute, self._left + gained)
        self._at_s = now
