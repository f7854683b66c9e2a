"""A thread that makes one copy after the other, and says how each ended; or says only that.

To wake a thread takes longer than a short copy, or about as long: where nothing is under way before
it, whoever posts it makes it. What comes too soon after that is the thread's again: copies take at
most a quarter of the poster's time, who also verifies what it copied.

Whoever is told may verify and place what came: for seconds. Threads that read from connections
would leave them unread meanwhile, and the peer would take that for a break.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from neuron_di.clock import now_s
from neuron_di.errors import LocalProtocolError, NeuronDiError
from neuron_di.obs import get_logger
from neuron_di.transfer.transfer_engine import TransferToken
from neuron_di_bindings.process import lower_thread_priority

_log = get_logger(__name__)

# A worker pinned to one core copies and decodes there: running streams go first, and a large
# copy is spread over several steps.
COPY_NICE = 5
REST = 3  # of whoever made a short copy, from such copies: so many times as long as it took
JOIN_S = 30.0


@dataclass(frozen=True, slots=True)
class _Job:
    end: Callable[[], NeuronDiError | None]  # why it failed
    token: TransferToken


class CopyThread:
    """Copies, and tells, in the order in which that was posted. Thread-safe.

    What waits is bounded by the memory that receives go to: a token's is not used again before.
    """

    def __init__(self, name: str) -> None:
        # Nothing is posted behind the end, and nothing during a short copy.
        self._lock = threading.Lock()
        self._is_ending = False
        self._num_open = 0  # posted to the thread, and not over
        self._rests_until_s = 0.0  # the poster: from short copies
        self._at_end: Callable[[], object] = lambda: None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(
        self,
        copy: Callable[[], NeuronDiError | None],
        num_bytes: int,
        token: TransferToken,
        *,
        is_short: bool = False,
    ) -> None:
        """Call `copy` on the thread; the token gets what it returns, and how long it took.

        A short one is called right here where the thread has nothing else to do, and three times as
        much time has passed since the last one here as that took. It must not post.
        """
        error: NeuronDiError | None
        with self._lock:
            if self._is_ending:
                error = LocalProtocolError("a receive was posted to a closed transfer engine")
            elif is_short and not self._num_open and now_s() >= self._rests_until_s:
                error = _make(copy, num_bytes, token)
                self._rests_until_s = now_s() + REST * token.transfer_s
            else:
                self._put(_Job(partial(_make, copy, num_bytes, token), token))
                return
        token.complete(error)

    def complete(
        self, token: TransferToken, error: NeuronDiError | None, *, is_short: bool
    ) -> None:
        """Tell whoever waits for a transfer that ended. Right here where they make it short and the
        thread has nothing to do, and after its end."""
        with self._lock:
            is_here = self._is_ending or (is_short and not self._num_open)
            if not is_here:
                self._put(_Job(lambda: error, token))
        if is_here:
            complete_token(token, error)

    def _put(self, job: _Job) -> None:
        """Under the lock."""
        self._num_open += 1
        self._jobs.put(job)

    def end(self, at_end: Callable[[], object] = lambda: None) -> None:
        """End after what was posted, and call `at_end` on the thread. Returns at once."""
        with self._lock:
            if not self._is_ending:
                self._is_ending, self._at_end = True, at_end
                self._jobs.put(None)

    def join(self, timeout_s: float | None = None) -> None:
        """After end(): wait for the end, though not for ever: a callback may hang."""
        self._thread.join(JOIN_S if timeout_s is None else timeout_s)
        if self._thread.is_alive():
            _log.error("copy_thread_did_not_end", thread=self._thread.name)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        lower_thread_priority(COPY_NICE)
        while (job := self._jobs.get()) is not None:
            token = job.token
            error = job.end()
            del job  # it keeps a peer's pool mapped, and the next one may be long in coming
            complete_token(token, error)
            del token, error  # likewise
            with self._lock:  # behind the callback: what it posts comes after it
                self._num_open -= 1
        self._at_end()


def complete_token(token: TransferToken, error: NeuronDiError | None) -> None:
    """Tell whoever waits, without any lock. The thread lives on, whatever they do."""
    try:
        token.complete(error)
    except Exception:
        _log.exception("transfer_callback_failed")


def _make(
    copy: Callable[[], NeuronDiError | None], num_bytes: int, token: TransferToken
) -> NeuronDiError | None:
    """Why it failed; None where it did not."""
    start_s = now_s()
    error: NeuronDiError | None
    try:
        error = copy()
    except Exception as unexpected:  # who makes it serves every request, and must live on
        error = LocalProtocolError(f"KV copy failed: {unexpected!r}")
    token.transfer_s = now_s() - start_s
    token.kv_bytes = num_bytes if error is None else 0
    return error
