"""Several proxy processes on one port. The first starts the others, and starts them again.

Each has its own connections to every worker and takes its part of what the operator allows.
The system spreads clients' connections over them (SO_REUSEPORT).
"""

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

from neuron_di.child import Child, end, run_together
from neuron_di.clock import Deadline
from neuron_di.config import ProxyOptions, flags_of
from neuron_di.errors import ConfigError
from neuron_di.obs import LaunchReport, get_logger
from neuron_di.own_folder import OwnFolder
from neuron_di_proxy.siblings import SiblingPlace, is_silent
from neuron_di_proxy.tenant import share_of

START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0  # beside the drain
LOOK_INTERVAL_S = 5.0  # between two questions whether a process answers: each costs both a wake
AGAIN_INTERVAL_S = 1.0  # where it did not answer the last one
SILENT_MAX = 4  # in a row: it is frozen
FOLDER_PREFIX = "neuron-di-proxy-"
_FOLDER_CHARS_MAX = 107 - len("/63.socket")  # Linux' sun_path, less its end

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where workers announce themselves: a registry of ours, members of an etcd, or nowhere."""

    registry: str = ""
    etcd: tuple[str, ...] = ()

    def words(self) -> dict[str, str]:
        """For a log."""
        return {"etcd": ",".join(self.etcd)} if self.etcd else {"registry": self.registry}

    def report(self, url: str) -> LaunchReport:
        """For the launcher: ready at `url`."""
        return LaunchReport(event="ready", url=url, registry=self.registry, etcd=self.etcd)


class FurtherProcesses:
    """The processes beside the first one, while entered. The first one's own end ends them."""

    def __init__(self, options: ProxyOptions, port: int, meeting: Meeting) -> None:
        self._options = options
        self._port = port
        self._meeting = meeting
        self._watches: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Self:
        """Start them all. Raises what keeps one from starting."""
        async with AsyncExitStack() as stack:
            folder = OwnFolder(FOLDER_PREFIX)
            stack.callback(folder.remove)
            if len(folder.path) > _FOLDER_CHARS_MAX:
                raise ConfigError(
                    f"the folder {folder.path} is too long for the processes' sockets: give "
                    "TMPDIR a shorter one"
                )
            num_processes = self._options.front.processes
            self.place = SiblingPlace(folder=folder.path, index=0, num_processes=num_processes)
            self._children = [self._child(index) for index in range(1, num_processes)]
            stack.push_async_callback(self._end)
            deadline = Deadline.after(START_TIMEOUT_S)
            await run_together(
                child.start(deadline, lambda _name, _report: None) for child in self._children
            )
            # What refuses one now, as a key file that is just being mended, kept no other waiting.
            self._watches = [
                asyncio.create_task(
                    child.keep_up(START_TIMEOUT_S, lambda _words: None, gives_up=lambda: False)
                )
                for child in self._children
            ]
            for index, child in enumerate(self._children, start=1):
                self._watches.append(asyncio.create_task(self._end_frozen(child, index)))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def drain(self) -> None:
        """Ask them to end: they let their requests finish, as the first process does."""
        for watch in self._watches:
            watch.cancel()
        for child in self._children:
            child.terminate()

    async def _end_frozen(self, child: Child, index: int) -> None:
        """End a process that no longer answers, so that it is started again: the system goes on
        giving it its part of the connections, whose clients would wait in vain."""
        num_silent = 0
        while True:
            await asyncio.sleep(AGAIN_INTERVAL_S if num_silent else LOOK_INTERVAL_S)
            was_silent = child.is_ready and await is_silent(self.place, index)
            num_silent = num_silent + 1 if was_silent else 0
            if num_silent == SILENT_MAX:
                _log.warning("process_frozen", child=child.name, pid=child.pid)
                child.kill()

    async def _end(self) -> None:
        for watch in self._watches:
            watch.cancel()
        if self._watches:
            await asyncio.wait(self._watches)
        await end(self._children, self._options.limits.drain_timeout_s + END_TIMEOUT_S)

    def _child(self, index: int) -> Child:
        options = replace(
            self._options,
            port=self._port,
            parent_pid=os.getpid(),
            sibling_index=index,
            sibling_folder=self.place.folder,
            sibling_registry=self._meeting.registry or None,
            etcd=replace(self._options.etcd, etcd=self._meeting.etcd),
        )
        command = [sys.executable, "-m", "neuron_di", "proxy", *flags_of(options)]
        return Child(f"proxy-{index}", lambda: command)


def part_of(options: ProxyOptions) -> ProxyOptions:
    """One process' part of what the operator allows the proxy; at least one of everything."""
    front, limits, num = options.front, options.limits, options.front.processes
    limits = replace(
        limits,
        requests_max=share_of(limits.requests_max, num),
        queue_max=share_of(limits.queue_max, num),
    )
    front = replace(front, connections_max=-(-front.connections_max // num))
    return replace(options, front=front, limits=limits)
