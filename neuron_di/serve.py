"""A proxy and its workers on one machine, as child processes: `neuron-di serve`.

The proxy starts first, because workers announce themselves to the registry it holds. Each
child reports on its standard output; its logs go to our standard error. Children sit in
sessions of their own, so Ctrl-C reaches this process only, and end when it ends.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import aiohttp

from neuron_di.clock import Deadline
from neuron_di.config import ProxyOptions, ServeOptions, WorkerOptions, flags_of
from neuron_di.errors import ConfigError, NeuronDiError, PeerGone, PeerTimeout
from neuron_di.obs import LaunchReport, heard
from neuron_di.types import Role

PROXY_START_TIMEOUT_S = 30.0
WORKER_START_TIMEOUT_S = 600.0  # a large checkpoint on a slow disk
END_TIMEOUT_S = 5.0  # from the end of the drain to the end of the process

OnReport = Callable[[str, LaunchReport], None]  # the child's name and what it said


@dataclass(frozen=True, slots=True)
class Child:
    """One process of the fleet."""

    name: str
    process: asyncio.subprocess.Process


class Fleet:
    """Runs while entered: ready on entry, drained and gone on exit.

    `url` is where the proxy serves. Entering raises ConfigError with the words of the child
    that could not start; nothing is left running then.
    """

    def __init__(self, options: ServeOptions, on_report: OnReport | None = None) -> None:
        self._options = options
        self._on_report = on_report or (lambda _name, _report: None)
        self._proxy: Child | None = None
        self._workers: list[Child] = []
        self._readers: list[asyncio.Task[None]] = []
        self.url = ""
        self.model_name = options.model_name or os.path.basename(os.path.normpath(options.model))

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop(drain_timeout_s=0.0)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stop(drain_timeout_s=self._options.limits.drain_timeout_s)

    def pids(self) -> dict[str, int]:
        """Process ids by name, the proxy first."""
        children = [self._proxy, *self._workers] if self._proxy is not None else self._workers
        return {child.name: child.process.pid for child in children}

    async def wait_lost(self) -> str:
        """Return the name of the first child that ends by itself."""
        assert self._proxy is not None
        waits = {
            asyncio.create_task(child.process.wait()): child.name
            for child in (self._proxy, *self._workers)
        }
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        return waits[done.pop()]

    async def _start(self) -> None:
        self._proxy = await self._spawn("proxy", ["proxy", *flags_of(self._proxy_options())])
        ready = await self._ready(self._proxy, Deadline.after(PROXY_START_TIMEOUT_S))
        self.url = ready.url
        for index, (name, role) in enumerate(self._roles()):
            options = self._worker_options(index, name, role, ready.registry)
            self._workers.append(await self._spawn(name, ["worker", *flags_of(options)]))
        deadline = Deadline.after(WORKER_START_TIMEOUT_S)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(self._ready(worker, deadline))
        except* NeuronDiError as failures:
            raise failures.exceptions[0] from None  # one worker's reason says it all
        await self._reachable(Deadline.after(PROXY_START_TIMEOUT_S))

    async def _reachable(self, deadline: Deadline) -> None:
        """Wait until the proxy knows its workers: they announce themselves once they are ready."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
            while not deadline.has_passed():
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{self.url}/health") as response:
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

    def _proxy_options(self) -> ProxyOptions:
        options = self._options
        return ProxyOptions(
            host=options.host,
            port=options.port,
            parent_pid=os.getpid(),
            limits=options.limits,
            log=options.log,
        )

    def _worker_options(self, index: int, name: str, role: Role, registry: str) -> WorkerOptions:
        options = self._options
        cores = sorted(os.sched_getaffinity(0))
        # Several workers share the cores: more threads than cores would only wait on each other.
        threads = 1 if options.pin else max(1, len(cores) // len(self._roles()))
        engine = options.engine
        if engine.threads is None:
            engine = replace(engine, threads=threads)
        return WorkerOptions(
            model=options.model,
            model_name=options.model_name,
            role=role,
            worker_id=name,
            registry=registry,
            kv_lease_s=options.kv_lease_s,
            drain_timeout_s=options.limits.drain_timeout_s,
            core=cores[index % len(cores)] if options.pin else None,
            parent_pid=os.getpid(),
            num_siblings=len(self._roles()),
            engine=engine,
            log=options.log,
        )

    async def _spawn(self, name: str, arguments: list[str]) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "neuron_di",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return Child(name, process)

    async def _ready(self, child: Child, deadline: Deadline) -> LaunchReport:
        """Follow a child's reports until it is ready. ConfigError when it cannot start."""
        assert child.process.stdout is not None
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                while line := await child.process.stdout.readline():
                    report = heard(line)
                    if report is None:
                        continue
                    self._on_report(child.name, report)
                    if report.event == "failed":
                        raise ConfigError(f"{child.name}: {report.message}")
                    if report.event == "ready":
                        self._readers.append(asyncio.create_task(_discard(child.process.stdout)))
                        return report
        except TimeoutError:
            raise PeerTimeout(f"{child.name} was not ready in time") from None
        code = await child.process.wait()
        raise PeerGone(f"{child.name} ended with code {code} before it was ready")

    async def _stop(self, drain_timeout_s: float) -> None:
        """The proxy first: it ends its requests while the workers still compute them."""
        proxy = [self._proxy] if self._proxy is not None else []
        await _end(proxy, drain_timeout_s + END_TIMEOUT_S)
        await _end(self._workers, END_TIMEOUT_S)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)


async def _end(children: list[Child], timeout_s: float) -> None:
    """Ask children to end, wait, then end those that did not."""
    running = [child.process for child in children if child.process.returncode is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    if running:
        _, late = await asyncio.wait(
            [asyncio.create_task(process.wait()) for process in running], timeout=timeout_s
        )
        for process in running:
            if process.returncode is None:
                process.kill()
        if late:
            await asyncio.wait(late)


async def _discard(stream: asyncio.StreamReader) -> None:
    """Read on, so that a child that prints never blocks on a full pipe."""
    while await stream.read(65536):
        pass
