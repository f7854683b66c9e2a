"""Whether what computes, or has the KV, can still be used, and who is told when it cannot."""

import threading
from collections.abc import Callable

from neuron_di.errors import BackendLost


class Loss:
    """Of a pool whose blocks lie on a device, before KvPool, or of what computes. Thread-safe."""

    def __init__(self, *arguments: object, **fields: object) -> None:
        super().__init__(*arguments, **fields)
        self._loss_lock = threading.Lock()
        self._lost: BackendLost | None = None
        self._on_lost: Callable[[BackendLost], object] = lambda _: None

    def watch_loss(self, on_lost: Callable[[BackendLost], object]) -> None:
        """Call back, once and on any thread, should it be lost; at once if it is.

        Whoever asked last is called.
        """
        with self._loss_lock:
            self._on_lost = on_lost
            lost = self._lost
        if lost is not None:
            on_lost(lost)

    def lose(self, error: BackendLost) -> bool:
        """It cannot be used any more: only a new process's can. The first reason counts: whether
        this is it."""
        with self._loss_lock:
            if self._lost is not None:
                return False
            self._lost = error
            on_lost = self._on_lost
        on_lost(error)
        return True

    @property
    def lost(self) -> BackendLost | None:
        """Why it cannot be used any more."""
        return self._lost

    def require_not_lost(self) -> None:
        """Raise BackendLost where it cannot."""
        if self._lost is not None:
            raise BackendLost(self._lost.message)
