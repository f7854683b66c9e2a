"""The other ranks of a worker, as its first rank sees them: processes it starts, tells and ends.

They are one: when one of them is lost, so are all, and nothing can be computed any more.
"""

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from neuron_di.backends.rank_messages import (
    Channel,
    Failed,
    Order,
    Reply,
    Start,
    reply_decoder,
)
from neuron_di.clock import Deadline
from neuron_di.config import child_environment
from neuron_di.errors import BackendLost, ConfigError, RemoteProtocolError
from neuron_di.kv.loss import Loss
from neuron_di.obs import get_logger

_log = get_logger(__name__)

_SEND_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 3.0
_CAUSE_TIMEOUT_S = 1.0  # from a tensor that did not come to the end of the process that owed it


class Ranks(Loss):
    """Ranks 1 and up."""

    def __init__(self, starts: Sequence[Start], rendezvous_fd: int) -> None:
        super().__init__()
        self._is_lost = threading.Event()
        self._is_closing = False
        self._processes: list[_RankProcess] = []
        try:
            for start in starts:
                self._processes.append(_RankProcess(start, rendezvous_fd, self._lose))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, order: Order, fd: int | None = None) -> None:
        """Tell all of them. BackendLost."""
        self.require_not_lost()
        for process in self._processes:
            try:
                process.channel.send(order, fd)
            except OSError:
                raise self.cause(f"rank {process.rank} takes no orders") from None

    def hear(self, kind: type[Reply], deadline: Deadline) -> None:
        """Wait for this reply of all of them.

        BackendLost, or ConfigError where one says that it cannot start as configured.
        """
        for process in self._processes:
            reply = process.reply(deadline)
            if isinstance(reply, Failed) and reply.is_config:
                raise ConfigError(f"rank {process.rank}: {reply.reason}")
            if not isinstance(reply, kind):
                raise self.cause(f"rank {process.rank} did not answer {kind.__name__} in time")

    def _lose(self, reason: str) -> None:
        """End all of them: they cannot go on. The first reason is the one that is told."""
        error = BackendLost(f"the tensor-parallel ranks are lost: {reason}")
        if self._is_closing or not self.lose(error):
            return
        _log.error("ranks_lost", reason=reason)
        for process in self._processes:
            process.kill()
        self._is_lost.set()

    def cause(self, symptom: str) -> BackendLost:
        """Why they are lost, of which this is how it showed: perhaps one has just ended."""
        self._is_lost.wait(_CAUSE_TIMEOUT_S)
        self._lose(symptom)
        assert self.lost is not None, "they are not asked for anything once closed"
        return BackendLost(self.lost.message)

    def close(self) -> None:
        """End them, and wait until they are gone. Safe to call twice."""
        self._is_closing = True
        for process in self._processes:
            process.kill()  # they have nothing to put in order
        for process in self._processes:
            process.wait_ended()


class _RankProcess:
    """One rank. A thread starts it, hears what it says, and that it ended.

    It ends with the thread that started it, which may not be one of a caller's: a script may load
    its model on a thread that is over then.
    """

    def __init__(self, start: Start, rendezvous_fd: int, on_end: Callable[[str], None]) -> None:
        self.rank = start.rank
        self._on_end = on_end
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes]
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, send_timeout_s=_SEND_TIMEOUT_S)
        started: Future[None] = Future()
        self._listener = threading.Thread(
            target=self._live,
            args=((theirs.fileno(), rendezvous_fd), started),
            name=f"rank-{self.rank}",
            daemon=True,
        )
        try:
            with theirs:
                self._listener.start()
                started.result()
        except BaseException as error:
            self.channel.close()  # and the rank ends, if it was started
            if isinstance(error, OSError | RuntimeError):  # RuntimeError: there are no more threads
                raise ConfigError(f"cannot start rank {self.rank}: {error}") from None
            raise
        with contextlib.suppress(OSError):  # then the listener finds why
            self.channel.send(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    def reply(self, deadline: Deadline) -> Reply | None:
        """Its next words; None: there were none in time."""
        try:
            return self._replies.get(timeout=deadline.remaining_s())
        except queue.Empty:
            return None

    def kill(self) -> None:
        self._process.kill()

    def wait_ended(self) -> None:
        """Wait until nothing of it is left, after it was killed."""
        self._process.wait()
        self._listener.join()
        self.channel.close()

    def _live(self, fds: tuple[int, int], started: "Future[None]") -> None:
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "neuron_di.backends.rank_main", *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # ours is for the launcher's ears
                env=child_environment(),
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C is for the first rank
            )
        except BaseException as error:  # whoever waits for it must hear of it
            started.set_exception(error)
            return
        started.set_result(None)
        self._listen()

    def _listen(self) -> None:
        reason = ""
        try:
            while not reason:
                reply, _ = self.channel.receive(reply_decoder)
                if isinstance(reply, Failed):
                    reason = f"rank {self.rank} failed: {reply.reason}"
                self._replies.put(reply)
        except (EOFError, OSError):
            reason = ""  # it ended
        except RemoteProtocolError as error:
            reason = f"rank {self.rank} said what it should not: {error.message}"
        if not reason:
            self._reap()
            reason = f"rank {self.rank} {_how(self._process.returncode)}"
        self._replies.put(Failed(reason=reason))
        self._on_end(reason)
        self._reap()

    def _reap(self) -> None:
        """Its connection has ended, or was: so does the process."""
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _how(code: int | None) -> str:
    assert code is not None, "it was waited for"
    return f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}"


def open_rendezvous() -> int:
    """A file in memory through which the ranks find each other. The caller closes it."""
    return os.memfd_create("neuron-di-ranks", os.MFD_CLOEXEC)
