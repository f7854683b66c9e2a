"""Who reads or writes a pool's memory now, so that it becomes nobody else's before they let go."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from neuron_di.clock import Deadline
from neuron_di.errors import LocalProtocolError

SETTLE_S = 30.0  # a copy of a whole pool takes less


class Holds:
    """Counted, from any thread, until `end`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.count = 0
        self._has_ended = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """LocalProtocolError after `end`."""
        with self._changed:
            if self._has_ended:
                raise LocalProtocolError("the KV pool is closed")
            self.count += 1
        try:
            yield
        finally:
            with self._changed:
                self.count -= 1
                self._changed.notify_all()

    def end(self, deadline: Deadline) -> bool:
        """From now on nobody holds anew. Whether all had let go by the deadline.

        Blocks until then at the first call only: whoever was waited for in vain is not again.
        """
        with self._changed:
            timeout_s = 0.0 if self._has_ended else deadline.remaining_s()
            self._has_ended = True
            return self._changed.wait_for(lambda: not self.count, timeout_s)
