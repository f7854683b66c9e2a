"""The one thread that posts messages to the device, and finds out which are done.

Everything that an engine's pairs know of transfers is read and changed here and nowhere else, so it
needs no lock, and the order of posts is the order in which things were said. While nothing is under
way the thread sleeps; while something is it looks again after a pause, the longer the less happens:
the runtime tells nobody when a message is done.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from neuron_di.clock import Deadline
from neuron_di.errors import LocalProtocolError, PeerGone
from neuron_di.obs import get_logger
from neuron_di.transfer.nrt_channel import Channel, Movement
from neuron_di_bindings.nrt import NrtError, NrtMisuse, NrtWorkerError

_log = get_logger(__name__)

_PAUSE_S_MIN = 0.0001
_PAUSE_S_MAX = 0.002
_PAUSE_GROWTH = 1.5
_AFTER_BUG_S = 1.0


class Agent(Protocol):
    """What the poster keeps an eye on. All methods are called on its thread."""

    def busy_channels(self) -> Sequence[Channel]:
        """Those on which something is posted, or waits to be."""
        ...

    def moved(self) -> None:
        """Something happened on one of its channels."""
        ...

    def tick(self) -> Deadline | None:
        """Look at deadlines. When to come again at the latest; None: when something is said."""
        ...


class Poster:
    """Owns the thread. `flush` makes visible what a core has received; `on_lost` is told when the
    device fails."""

    def __init__(
        self,
        name: str,
        flush: Callable[[int], object],
        on_lost: Callable[[NrtWorkerError], object],
    ) -> None:
        self._flush = flush
        self._on_lost = on_lost
        self._lock = threading.Condition()
        self._actions: list[Callable[[], object]] = []
        self._is_ending = False
        self._agents: list[Agent] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, action: Callable[[], object]) -> bool:
        """Have it done on the thread, in the order of calls. False: the thread has ended."""
        with self._lock:
            if self._is_ending:
                return False
            self._actions.append(action)
            self._lock.notify_all()
            return True

    def add(self, agent: Agent) -> None:
        """On the thread."""
        self._agents.append(agent)

    def remove(self, agent: Agent) -> None:
        """On the thread. Nothing where it is not there."""
        if agent in self._agents:
            self._agents.remove(agent)

    def end(self, deadline: Deadline) -> None:
        """Do what was called for, and end. Blocks, at most until the deadline."""
        with self._lock:
            self._is_ending = True
            self._lock.notify_all()
        self._thread.join(deadline.remaining_s())

    def step(self, agents: Sequence[Agent] | None = None) -> bool:
        """On the thread: look at these agents' channels, or at all. Whether anything happened."""
        over: list[Movement] = []
        has_moved = False
        for agent in list(self._agents if agents is None else agents):
            for channel in agent.busy_channels():
                try:
                    is_moving = channel.step(over)
                except NrtWorkerError as error:
                    is_moving = True
                    _guard(partial(self._on_lost, error))
                except Exception as bug:  # of one channel: the others go on
                    is_moving = True
                    _log.exception("nrt_channel_failed")
                    name = type(bug).__name__
                    channel.error = LocalProtocolError(f"a transfer engine failed: {name}")
                if is_moving:
                    has_moved = True
                    _guard(agent.moved)
        self.finish(over)
        return has_moved

    def finish(self, over: Sequence[Movement]) -> None:
        """On the thread: these movements are over. What they received is visible before anybody
        learns of it: also what came of one that failed, or it would come later, into a slot that is
        another request's by then. And where the device still has some of it, the device is lost
        before; should even that fail, nobody ever learns of it, and its slots stay taken."""
        posted = [each for each in over if each.num_posted]
        for lnc in sorted(set[int]().union(*(each.lncs for each in posted))):
            try:
                self._flush(lnc)
            except Exception as error:
                if not isinstance(error, NrtError | NrtMisuse):
                    _log.exception("nrt_flush_failed")
                for each in posted:
                    each.fail(PeerGone(f"what was received cannot be made visible: {error}"))
                    # It may become visible at any later flush: nobody can have these slots.
                    each.num_stuck = each.num_stuck or each.num_posted
                if isinstance(error, NrtWorkerError):
                    _guard(partial(self._on_lost, error))
        stuck = [each for each in over if each.num_stuck]
        taken = [each for each in stuck if not _guard(partial(each.on_stuck, each.num_stuck))]
        for each in over:
            if each not in taken:
                _guard(partial(each.on_over, each))

    def _run(self) -> None:
        pause_s = _PAUSE_S_MIN
        timeout_s: float | None = 0.0
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._actions or self._is_ending, timeout_s)
                actions, self._actions = self._actions, []
                if self._is_ending and not actions:
                    return
            for action in actions:
                _guard(action)
            has_moved, deadlines = self._look()
            if any(agent.busy_channels() for agent in self._agents):
                is_new = has_moved or bool(actions)
                pause_s = _PAUSE_S_MIN if is_new else min(pause_s * _PAUSE_GROWTH, _PAUSE_S_MAX)
                timeout_s = pause_s
            else:
                timeout_s = min((each.remaining_s() for each in deadlines), default=None)

    def _look(self) -> tuple[bool, list[Deadline]]:
        """At all agents: whether anything happened, and when to come again at the latest."""
        has_moved = self.step()
        deadlines = []
        for agent in list(self._agents):
            try:
                deadline = agent.tick()
            except Exception:  # a bug, of one pair
                _log.exception("nrt_agent_failed")
                deadline = Deadline.after(_AFTER_BUG_S)
            if deadline is not None:
                deadlines.append(deadline)
        return has_moved, deadlines


def _guard(action: Callable[[], object]) -> bool:
    """The thread serves every pair: it lives on. False: the action failed."""
    try:
        action()
    except Exception:
        _log.exception("nrt_poster_action_failed")
        return False
    return True
