"""The thread that ends sends which nobody asks for in time, however busy the streams are."""

import threading

from neuron_di.clock import Deadline
from neuron_di.transfer.tcp_sender import TcpSender


class ClaimWatch:
    """Owns the thread, which sleeps while no send waits to be asked for. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._senders: set[TcpSender] = set()
        self._is_ending = False
        self._is_idle = False  # it sleeps, or is about to, until look()
        self._thread = threading.Thread(target=self._run, name="kv-tcp-claims", daemon=True)
        self._thread.start()

    def add(self, sender: TcpSender) -> None:
        with self._lock:
            self._senders.add(sender)

    def remove(self, sender: TcpSender) -> None:
        with self._lock:
            self._senders.discard(sender)

    def look(self) -> None:
        """A send was posted. All have the same time, so only one who has none to wait for wakes."""
        if self._is_idle:
            with self._lock:
                self._is_idle = False
                self._lock.notify_all()

    def end(self) -> None:
        with self._lock:
            self._is_ending = True
            self._lock.notify_all()

    def join(self, deadline: Deadline) -> None:
        self._thread.join(deadline.remaining_s())

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._is_ending:
                    return
                self._is_idle = True  # first: what is posted from now on is looked at again
                senders = list(self._senders)
            ends = [end for sender in senders if (end := sender.end_unclaimed()) is not None]
            with self._lock:
                if ends:
                    self._is_idle = False
                    left_s = min(ends, key=lambda end: end.at_s).remaining_s()
                    self._lock.wait_for(lambda: self._is_ending, left_s)
                else:
                    self._lock.wait_for(lambda: self._is_ending or not self._is_idle)
