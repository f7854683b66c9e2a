"""A proxy and its workers on one machine, as child processes: `neuron-di serve`.

The proxy starts first, because workers announce themselves to the registry it holds. Each
child reports on its standard output; its logs go to our standard error. Children sit in
sessions of their own, so Ctrl-C reaches this process only, and end when it ends. A worker that
ends by itself is started again; without the proxy there is nothing to go on with.
"""

import asyncio
import contextlib
import os
import sys
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

import aiohttp

from neuron_di.child import Child, OnReport, Tell, end
from neuron_di.clock import Deadline
from neuron_di.config import ProxyOptions, ServeOptions, WorkerOptions, flags_of
from neuron_di.errors import NeuronDiError, PeerTimeout
from neuron_di.types import Role

PROXY_START_TIMEOUT_S = 30.0
WORKER_START_TIMEOUT_S = 600.0  # a large checkpoint on a slow disk
END_TIMEOUT_S = 5.0  # from the end of the drain to the end of the process


class Fleet:
    """Runs while entered: ready on entry, drained and gone on exit.

    `url` is where the proxy serves. Entering raises ConfigError with the words of the child
    that could not start; nothing is left running then. `tell` gets a line when a worker ended
    by itself, and one when it is back: under the same name and with the same options.
    """

    def __init__(
        self,
        options: ServeOptions,
        on_report: OnReport = lambda _name, _report: None,
        tell: Tell = lambda _words: None,
    ) -> None:
        self._options = options
        self._on_report = on_report
        self._tell = tell
        self._registry = ""
        self._proxy = Child("proxy", self._proxy_command)
        self._workers = [
            Child(name, partial(self._worker_command, index, name, role))
            for index, (name, role) in enumerate(self._roles())
        ]
        self._watches: list[asyncio.Task[str]] = []
        self.url = ""
        self.model_name = options.model_name or os.path.basename(os.path.normpath(options.model))

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop(drain_timeout_s=0.0)
            raise
        self._watches = [
            asyncio.create_task(self._proxy.life()),
            *(
                asyncio.create_task(worker.keep_up(WORKER_START_TIMEOUT_S, self._tell))
                for worker in self._workers
            ),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stop(drain_timeout_s=self._options.limits.drain_timeout_s)

    def pids(self) -> dict[str, int]:
        """Process ids by name, the proxy first. A worker that is being restarted has none."""
        children = [self._proxy, *self._workers]
        return {child.name: child.pid for child in children if child.pid is not None}

    async def wait_lost(self) -> str:
        """Wait until this fleet cannot go on. Returns why.

        The proxy ended by itself, or a worker says again and again that it cannot start.
        """
        done, _ = await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    def kill(self) -> None:
        """End every process at once, whatever it does. Leave the fleet then."""
        self._stop_watching()  # nothing is started again
        for child in (self._proxy, *self._workers):
            child.kill()

    async def _start(self) -> None:
        proxy = await self._proxy.start(Deadline.after(PROXY_START_TIMEOUT_S), self._on_report)
        self.url, self._registry = proxy.url, proxy.registry
        deadline = Deadline.after(WORKER_START_TIMEOUT_S)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(worker.start(deadline, self._on_report))
        except* NeuronDiError as failures:
            raise failures.exceptions[0] from None  # one worker's reason says it all
        await self._reachable(Deadline.after(PROXY_START_TIMEOUT_S))

    async def _reachable(self, deadline: Deadline) -> None:
        """Wait until the proxy knows its workers: they announce themselves once they are ready."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
            while not deadline.has_passed():
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    # Our own child: whom its certificate names is for others to check.
                    async with session.get(f"{self.url}/health", ssl=False) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)
        raise PeerTimeout("the proxy did not learn of its workers in time")

    def _roles(self) -> list[tuple[str, Role]]:
        options = self._options
        if options.combined:
            return [("combined-0", "both")]
        prefill: list[tuple[str, Role]] = [
            (f"prefill-{i}", "prefill") for i in range(options.prefill)
        ]
        return prefill + [(f"decode-{i}", "decode") for i in range(options.decode)]

    def _proxy_command(self) -> list[str]:
        options = self._options
        proxy = ProxyOptions(
            host=options.host,
            port=options.port,
            parent_pid=os.getpid(),
            front=options.front,
            limits=options.limits,
            log=options.log,
        )
        return [sys.executable, "-m", "neuron_di", "proxy", *flags_of(proxy)]

    def _worker_command(self, index: int, name: str, role: Role) -> list[str]:
        options = self._options
        cores = sorted(os.sched_getaffinity(0))
        # Several workers share the cores: more threads than cores would only wait on each other.
        threads = 1 if options.pin else max(1, len(cores) // len(self._roles()))
        engine = options.engine
        if engine.threads is None:
            engine = replace(engine, threads=threads)
        worker = WorkerOptions(
            model=options.model,
            model_name=options.model_name,
            role=role,
            worker_id=name,
            registry=self._registry,
            hand_over=options.hand_over,
            drain_timeout_s=options.limits.drain_timeout_s,
            core=cores[index % len(cores)] if options.pin else None,
            parent_pid=os.getpid(),
            # They share the memory that is free now; those that are ready have taken theirs.
            num_siblings=sum(not each.is_ready for each in self._workers),
            engine=engine,
            log=options.log,
        )
        return [sys.executable, "-m", "neuron_di", "worker", *flags_of(worker)]

    async def _stop(self, drain_timeout_s: float) -> None:
        """The proxy first: it ends its requests while the workers still compute them."""
        await end([self._proxy], drain_timeout_s + END_TIMEOUT_S)
        self._stop_watching()
        if self._watches:
            await asyncio.wait(self._watches)
        await end(self._workers, END_TIMEOUT_S)
        for watch in self._watches:
            with contextlib.suppress(asyncio.CancelledError):
                watch.result()  # one that had failed is our own bug: show it

    def _stop_watching(self) -> None:
        for watch in self._watches:
            watch.cancel()
