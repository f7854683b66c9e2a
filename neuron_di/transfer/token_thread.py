"""A thread that tells whoever waits for a receive, who may verify and place what came: for seconds.

The threads that read from connections would leave them unread meanwhile, and the peer would take
that for a break. A short receive is verified about as soon as a thread wakes: where nothing waits,
it is completed right away.
"""

import queue
import threading

from neuron_di.clock import Deadline
from neuron_di.errors import NeuronDiError
from neuron_di.obs import get_logger
from neuron_di.transfer.transfer_engine import TransferToken
from neuron_di_bindings.process import lower_thread_priority

_log = get_logger(__name__)

_NICE = 5  # running streams go first where cores are scarce
_Ended = tuple[TransferToken, NeuronDiError | None]


class TokenThread:
    """Completes tokens in order. Thread-safe.

    What waits is bounded by the memory that receives go to: a token's is not used again before.
    """

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._is_ending = False
        self._num_open = 0  # waiting, or being completed by the thread
        self._ended: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def complete(
        self, token: TransferToken, error: NeuronDiError | None, *, is_short: bool
    ) -> None:
        """With short callbacks: on the caller's thread, where this one has nothing to do."""
        with self._lock:
            is_here = self._is_ending or (is_short and not self._num_open)
            if not is_here:
                self._num_open += 1
                self._ended.put((token, error))
        if is_here:
            complete_token(token, error)

    def end(self) -> None:
        """End after what waits. Returns at once. What comes later its callers complete."""
        with self._lock:
            if not self._is_ending:
                self._is_ending = True
                self._ended.put(None)

    def join(self, deadline: Deadline) -> None:
        """Wait for the end, until the deadline."""
        self._thread.join(deadline.remaining_s())

    def _run(self) -> None:
        lower_thread_priority(_NICE)
        while (ended := self._ended.get()) is not None:
            complete_token(*ended)
            del ended  # it keeps memory, and the next one may be long in coming
            with self._lock:
                self._num_open -= 1


def complete_token(token: TransferToken, error: NeuronDiError | None) -> None:
    """Tell whoever waits, without any lock. The thread lives on, whatever they do."""
    try:
        token.complete(error)
    except Exception:
        _log.exception("transfer_callback_failed")
