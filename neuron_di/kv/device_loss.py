"""Whether a pool's device can still be used, and who is told when it cannot."""

import threading
from collections.abc import Callable

from neuron_di.errors import BackendLost


class DeviceLoss:
    """What a pool whose blocks lie on a device says of it. Mixed in before KvPool. Thread-safe."""

    digested_at_once_bytes = 0  # the device is asked for them, and may let wait

    def __init__(self, *arguments: object, **fields: object) -> None:
        super().__init__(*arguments, **fields)
        self._loss_lock = threading.Lock()
        self._lost: BackendLost | None = None
        self._on_lost: Callable[[BackendLost], object] = lambda _: None

    def watch_loss(self, on_lost: Callable[[BackendLost], object]) -> None:
        """Call back, once and on any thread, should the device be lost; at once if it is.

        Whoever asked last is called.
        """
        with self._loss_lock:
            self._on_lost = on_lost
            lost = self._lost
        if lost is not None:
            on_lost(lost)

    def lose(self, error: BackendLost) -> None:
        """The device cannot be used any more: only a new process's can. The first reason counts."""
        with self._loss_lock:
            if self._lost is not None:
                return
            self._lost = error
            on_lost = self._on_lost
        on_lost(error)

    @property
    def lost(self) -> BackendLost | None:
        """Why the device cannot be used any more."""
        return self._lost
