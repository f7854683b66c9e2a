"""A proxy and its workers on one machine, as child processes: `neuron-di serve`.

The proxy starts first, because workers announce themselves to the registry it holds, or to the
etcd it starts. Each child reports on its standard output; its logs go to our standard error.
Children sit in sessions of their own, so Ctrl-C reaches this process only, and end when it ends.
A worker that ends by itself is started again, in the role that it had at last, on the NeuronCores
that it had; without the proxy, or any worker of a role, there is nothing to go on with.
"""

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Self

import aiohttp

from neuron_di.child import Child, OnReport, Tell, end, reap_adopted, run_together
from neuron_di.clock import Deadline
from neuron_di.config import (
    CudaOptions,
    ProxyOptions,
    ServeOptions,
    WorkerAddressOptions,
    WorkerOptions,
    child_environment,
    flags_of,
    local_folder,
    model_name_of,
    usable_cores,
)
from neuron_di.cuda_devices import count_devices, share_devices
from neuron_di.errors import ConfigError
from neuron_di.kv import create_arena
from neuron_di.neuron_cores import (
    LOAD_TIMEOUT_S,
    allowed_cores,
    as_text,
    count_host_cores,
    share_cores,
    worker_environment,
)
from neuron_di.obs import LaunchReport, get_logger
from neuron_di.types import Role

_log = get_logger(__name__)

PROXY_START_TIMEOUT_S = 30.0
WORKER_START_TIMEOUT_S = 600.0  # a large checkpoint on a slow disk
ASK_TIMEOUT_S = 3.0  # an answer of the proxy's, which may ask every worker for it
END_TIMEOUT_S = 5.0  # from the end of the drain to the end of the process


class Fleet:
    """Runs while entered: ready on entry, drained and gone on exit.

    `url` is where the proxy serves. Entering raises ConfigError with the words of the child
    that could not start; nothing is left running then. `tell` gets a line when a worker ended
    by itself, one when it is back, under the same name and with the same options, and one when an
    operator has changed its role.
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
        self._registry: str | None = None
        self._etcd = options.etcd
        self._proxy = Child("proxy", self._proxy_command)
        self._roles = self._roles_asked_for()  # by name; what each worker is now
        self._tps = {name: self._tp_of(role) for name, role in self._roles.items()}  # they stay
        self._workers = [
            Child(
                name,
                partial(self._worker_command, index, name),
                on_said=self._note_report,
                pass_fds=lambda: () if self._arena_fd is None else (self._arena_fd,),
                environment=partial(self._environment_of, name),
            )
            for index, name in enumerate(self._roles)
        ]
        # Others may serve under the same etcd: their workers' names must not be ours.
        is_shared = bool(options.etcd.etcd) and not options.etcd.is_auto
        self._suffix = f"-{secrets.token_hex(3)}" if is_shared else ""
        self._arena_fd: int | None = None  # in which the workers' pools lie
        self._neuron_cores: dict[str, range] = {}  # by worker; empty on other devices
        self._gpus: Mapping[str, int] = {}  # the same
        self._watches: list[asyncio.Task[str]] = []
        self._unannounced: dict[str, str] = {}  # by worker: why no registry has it, or ""
        self._why_not = ""  # what the proxy said last of why it does not serve
        self.url = ""
        self.model_name = options.model_name or model_name_of(options.model)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop(drain_timeout_s=0.0)
            raise
        self._watches = [
            asyncio.create_task(self._proxy.life()),
            *(asyncio.create_task(self._keep_up(worker)) for worker in self._workers),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop(drain_timeout_s=self._options.limits.drain_timeout_s)

    def pids(self) -> dict[str, int]:
        """Process ids by name, the proxy first. A worker that is being restarted has none."""
        children = [self._proxy, *self._workers]
        return {child.name: child.pid for child in children if child.pid is not None}

    async def wait_lost(self) -> str:
        """Wait until this fleet cannot go on. Returns why.

        The proxy ended by itself, or a worker says again and again that it cannot start, and no
        other has its role.
        """
        done, _ = await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    def kill(self) -> None:
        """End every process at once, whatever it does. Leave the fleet then."""
        self._stop_watching()  # nothing is started again
        for child in (self._proxy, *self._workers):
            child.kill()

    async def _start(self) -> None:
        local_folder(self._options.model)  # a wrong path is said before anything is started
        self._options.addresses.require_free_ports()
        if self._options.engine.device == "neuron":
            self._share_neuron_cores()
        if self._options.engine.device == "cuda":
            self._share_gpus()
        proxy = await self._proxy.start(Deadline.after(PROXY_START_TIMEOUT_S), self._on_report)
        self.url, self._registry = proxy.url, proxy.registry or None
        self._etcd = replace(self._options.etcd, etcd=proxy.etcd)
        if self._shares_blocks():
            self._arena_fd = create_arena()
        await self._proxy.while_it_lives(self._start_workers())

    async def _start_workers(self) -> None:
        deadline = Deadline.after(self._worker_start_timeout_s)
        await run_together(
            self._start_in_turn(workers, deadline) for workers in self._started_together()
        )
        await self._reachable(Deadline.after(PROXY_START_TIMEOUT_S))

    def _started_together(self) -> list[list[Child]]:
        """Groups of workers, each of which starts by itself. Those on one GPU are a group: one
        counts the memory that is free there when the one before it has taken its part."""
        by_gpu: dict[int | str, list[Child]] = {}
        for worker in self._workers:
            by_gpu.setdefault(self._gpus.get(worker.name, worker.name), []).append(worker)
        return list(by_gpu.values())

    async def _keep_up(self, worker: Child) -> str:
        """Start it again whenever it ends. Returns why, once the others cannot do without it."""
        start_timeout_s = self._worker_start_timeout_s
        is_missed = partial(self._is_missed, worker.name)
        return await worker.keep_up(start_timeout_s, self._tell, gives_up=is_missed)

    def _is_missed(self, name: str) -> bool:
        """Whether no worker that is ready does what this one should."""
        roles = (self._roles[name], "both")
        return not any(each.is_ready and self._roles[each.name] in roles for each in self._workers)

    async def _start_in_turn(self, workers: list[Child], deadline: Deadline) -> None:
        for worker in workers:
            await worker.start(deadline, self._on_report)

    @property
    def _worker_start_timeout_s(self) -> float:
        """Longer than the worker itself gives its load: then it has said why."""
        is_on_neuron = self._options.engine.device == "neuron"
        return WORKER_START_TIMEOUT_S + (LOAD_TIMEOUT_S if is_on_neuron else 0.0)

    async def _reachable(self, deadline: Deadline) -> None:
        """Wait until the proxy knows its workers: they announce themselves once they are ready.

        It may serve without some of them, or, under an etcd that others have, too, without any.
        """
        ours = {name + self._suffix for name in self._roles}
        timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not deadline.has_passed():
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    if await self._serves(session) and ours <= await self._known(session, ours):
                        return
                await asyncio.sleep(0.05)
        reasons = [f"{name}: {why}" for name, why in self._unannounced.items() if why]
        why = (reasons or [self._why_not])[0]
        words = "the proxy did not learn of its workers in time"
        raise ConfigError(f"{words}: {why}" if why else words)

    async def _serves(self, session: aiohttp.ClientSession) -> bool:
        # Our own child: whom its certificate names is for others to check.
        async with session.get(f"{self.url}/health", ssl=False) as response:
            self._why_not = (
                "" if response.status == 200 else (await response.json()).get("reason", "")
            )
            return response.status == 200

    async def _known(self, session: aiohttp.ClientSession, ours: set[str]) -> set[str]:
        """Whom the proxy has of these. Where it tells only who has a key: all, perhaps."""
        async with session.get(f"{self.url}/status", ssl=False) as response:
            if response.status != 200:
                return ours
            known = (await response.json())["workers"]
        return ours & {worker["record"]["worker_id"] for worker in known}

    def _shares_blocks(self) -> bool:
        """Whether its workers may give each other blocks instead of copies."""
        options = self._options
        is_wanted = options.kv_transfer.is_auto or "handover" in options.kv_transfer.transfer
        return is_wanted and not options.combined and options.engine.device == "cpu"

    def _share_neuron_cores(self) -> None:
        """Cores for each worker, prefill first, for as long as this fleet runs."""
        allowed = allowed_cores(os.environ, count_host_cores(self._options.engine.neuron.libnrt))
        self._neuron_cores = share_cores(allowed, self._tps)
        for name, cores in self._neuron_cores.items():
            _log.info("worker_cores", worker=name, cores=as_text(cores))

    def _share_gpus(self) -> None:
        """A GPU for each worker, prefill first, for as long as this fleet runs."""
        wanted = self._options.engine.cuda.cuda_devices
        self._gpus = share_devices(wanted, count_devices(), list(self._roles))
        for name, gpu in self._gpus.items():
            _log.info("worker_gpu", worker=name, gpu=gpu)

    def _cuda_options(self, name: str) -> CudaOptions:
        """Its GPU, and with how many workers it divides what is free there now. Those that are
        ready have taken theirs."""
        gpu = self._gpus[name]
        starting = [each.name for each in self._workers if not each.is_ready]
        return replace(
            self._options.engine.cuda,
            cuda_devices=(str(gpu),),
            cuda_share=max(1, sum(self._gpus[each] == gpu for each in starting)),
        )

    def _environment_of(self, name: str) -> dict[str, str]:
        environ, cores = child_environment(), self._neuron_cores.get(name)
        return environ if cores is None else worker_environment(environ, cores)

    def _roles_asked_for(self) -> dict[str, Role]:
        options = self._options
        if options.combined:
            return {"combined-0": "both"}
        roles: dict[str, Role] = {f"prefill-{i}": "prefill" for i in range(options.prefill)}
        roles |= {f"decode-{i}": "decode" for i in range(options.decode)}
        return roles

    def _tp_of(self, role: Role) -> int:
        options = self._options
        by_role = {"prefill": options.prefill_tp, "decode": options.decode_tp, "both": None}
        return by_role[role] or options.engine.tp

    def _note_report(self, name: str, report: LaunchReport) -> None:
        """A worker serves: in another role than before where an operator wanted that. Or the
        registry does not take it."""
        if report.event == "unannounced":
            self._unannounced[name] = report.message
        reap_adopted(self.pids().values())  # the ranks of one that was killed before
        role = report.role
        if report.event == "ready" and role is not None and role != self._roles[name]:
            self._roles[name] = role
            _log.info("worker_role", worker=name, role=role)
            self._tell(f"{name} is a {role} worker now; should it end, it is started again as one")

    def _proxy_command(self) -> list[str]:
        options = self._options
        proxy = ProxyOptions(
            host=options.host,
            port=options.port,
            etcd=options.etcd,
            hang_timeout_s=options.hang_timeout_s,
            parent_pid=os.getpid(),
            front=options.front,
            limits=options.limits,
            routing=options.routing,
            addresses=self._addresses(),
            log=options.log,
        )
        return [sys.executable, "-m", "neuron_di", "proxy", *flags_of(proxy)]

    def _addresses(self) -> WorkerAddressOptions:
        """Where workers may be: those of this serve are on loopback, whatever else is allowed."""
        networks = self._options.addresses.worker_networks
        given = (*networks, "127.0.0.0/8") if networks else ()
        return replace(self._options.addresses, worker_networks=given)

    def _worker_command(self, index: int, name: str) -> list[str]:
        options = self._options
        cores = sorted(os.sched_getaffinity(0))
        # Several workers share the cores: more threads than cores would only wait on each other.
        threads = self._tps[name] if options.pin else max(1, usable_cores() // len(self._roles))
        engine = options.engine
        if engine.threads is None:
            engine = replace(engine, threads=threads)
        engine = replace(engine, tp=self._tps[name])
        if name in self._gpus:
            engine = replace(engine, cuda=self._cuda_options(name))
        first_core = sum(list(self._tps.values())[:index])
        worker = WorkerOptions(
            model=options.model,
            model_name=options.model_name,
            role=self._roles[name],
            worker_id=name + self._suffix,
            registry=self._registry,
            etcd=self._etcd,
            hand_over=options.hand_over,
            kv_transfer=options.kv_transfer,
            drain_timeout_s=options.limits.drain_timeout_s,
            hang_timeout_s=options.hang_timeout_s,
            core=cores[first_core % len(cores)] if options.pin else None,
            parent_pid=os.getpid(),
            # They share the memory that is free now; those that are ready have taken theirs.
            kv_arena_fd=self._arena_fd,
            num_siblings=sum(not each.is_ready for each in self._workers),
            engine=engine,
            addresses=self._addresses(),
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
        if self._arena_fd is not None:
            os.close(self._arena_fd)
            self._arena_fd = None
        for watch in self._watches:
            with contextlib.suppress(asyncio.CancelledError):
                watch.result()  # one that had failed is our own bug: show it

    def _stop_watching(self) -> None:
        for watch in self._watches:
            watch.cancel()
