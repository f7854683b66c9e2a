"""The readers of an engine, one for each peer that is connected, each with a thread of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from neuron_di.errors import PeerGone
from neuron_di.obs import get_logger
from neuron_di.transfer.copy_thread import CopyThread
from neuron_di.types import Incarnation

_log = get_logger(__name__)

# What is being connected when an engine is closed is waited for so long. It ends where it next asks
# check_open, and what it waits for until then touches no memory of whoever closes.
CONNECTING_S = 20.0


class _Ends(Protocol):
    def end(self) -> CopyThread:
        """Read what was posted, then forget the peer. Returns at once, what ends after that."""
        ...


_Reader = TypeVar("_Reader", bound=_Ends)


class Readers(Generic[_Reader]):
    """Owns them: each is ended when its peer is dropped, or has another. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_connecting = 0
        self._none_connecting = threading.Condition(self._lock)
        self._by_peer: dict[Incarnation, _Reader] = {}
        self._ending: list[CopyThread] = []
        self._is_closed = False

    def get(self, peer: Incarnation) -> _Reader | None:
        return self._by_peer.get(peer)

    def all(self) -> list[_Reader]:
        with self._lock:
            return list(self._by_peer.values())

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """A reader is made, and put: close() waits for that. PeerGone once this is closed."""
        with self._lock:
            self.check_open()
            self._num_connecting += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_connecting -= 1
                self._none_connecting.notify_all()

    def check_open(self) -> None:
        """PeerGone once this is being closed. To be asked before a reader gets hold of memory."""
        if self._is_closed:
            raise PeerGone("the transfer engine is closed")

    def put(self, peer: Incarnation, reader: _Reader) -> None:
        """It was started. Once this is closed it is ended at once."""
        with self._lock:
            previous = self._by_peer.pop(peer, None)
            if previous is not None:
                self._end(previous)
            self._by_peer[peer] = reader
            if self._is_closed:
                self._end(reader)

    def end(self, reader: _Reader) -> None:
        """One that was not put."""
        with self._lock:
            self._end(reader)

    def drop(self, peer: Incarnation) -> None:
        with self._lock:
            reader = self._by_peer.pop(peer, None)
            if reader is not None:
                self._end(reader)

    def close(self) -> None:
        """End all after what was posted. Blocks until then.

        No reader gets hold of memory from now on, and none does so while this returns.
        """
        with self._lock:
            self._is_closed = True
            if not self._none_connecting.wait_for(
                lambda: not self._num_connecting, timeout=CONNECTING_S
            ):
                _log.error("reader_still_connects", count=self._num_connecting)
            for reader in self._by_peer.values():
                self._end(reader)
            ending = self._ending
        for thread in ending:
            thread.join()

    def _end(self, reader: _Reader) -> None:
        self._ending = [one for one in self._ending if one.is_alive()] + [reader.end()]
