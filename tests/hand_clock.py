"""A clock that a test moves."""

_UNIX_S_AT_0 = 1_800_000_000.0


class HandClock:
    """Moves when it is told to, and when somebody sleeps; where nobody may, that fails."""

    def __init__(self, now_s: float = 100.0, *, may_sleep: bool = True) -> None:
        self.now_s = now_s
        self._may_sleep = may_sleep

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return _UNIX_S_AT_0 + self.now_s

    def sleep_s(self, duration_s: float) -> None:
        assert self._may_sleep, "nothing here sleeps"
        self.now_s += duration_s
