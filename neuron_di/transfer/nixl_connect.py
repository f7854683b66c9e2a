"""Reaching a peer through NIXL, for no longer than it may take.

NIXL's LIBFABRIC never ends its attempts to reach one that died or stands still, and each keeps a
core busy. So they are made on a thread that can be given up, and after a few of those no more.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from neuron_di.errors import PeerGone, PeerTimeout
from neuron_di.obs import get_logger

GIVEN_UP_MAX = 2  # of this process, each a core

_log = get_logger(__name__)
_lock = threading.Lock()
_given_up: list[threading.Thread] = []


@dataclass(slots=True)
class Attempt:
    """To load a peer's metadata, and to connect to it. `names` are those that it is of."""

    names: set[bytes] = field(default_factory=set)
    error: str | None = None

    def run(
        self,
        native: Any,
        agent: str,
        metadata: Sequence[bytes],
        failures: tuple[type[Exception], ...],
    ) -> None:
        try:
            for part in metadata:
                self.names.add(native.loadRemoteMD(part))
            if self.names == {agent.encode()}:
                # Else the first transfer does it, on its caller's thread, for a minute.
                native.makeConnection(agent, [])
        except failures as error:
            self.error = str(error)  # the error itself has a traceback, which has the agent


def check_given_up() -> None:
    """PeerGone where too many attempts were given up, and still go on."""
    with _lock:
        _given_up[:] = [thread for thread in _given_up if thread.is_alive()]
        if (count := len(_given_up)) < GIVEN_UP_MAX:
            return
    raise PeerGone(
        f"NIXL still tries to reach {count} workers that this one gave up, a core for each: "
        "start this worker again"
    )


def finish(thread: threading.Thread, timeout_s: float) -> None:
    """Wait for an attempt's thread. PeerTimeout: it was given up, and keeps its agent."""
    thread.join(timeout_s)
    if not thread.is_alive():
        return
    with _lock:
        _given_up.append(thread)
        count = len(_given_up)
    _log.error("nixl_connect_given_up", count=count, limit=GIVEN_UP_MAX, costs="a core each")
    raise PeerTimeout("NIXL does not reach the prefill worker")
