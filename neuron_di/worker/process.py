"""The worker process: load, announce, serve legs, drain, end.

Next: neuron_di/worker/role_epochs.py
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import uvloop

from neuron_di.config import (
    WorkerOptions,
    is_loopback,
    raise_descriptor_limit,
    require_address,
    require_threads,
)
from neuron_di.errors import ConfigError
from neuron_di.etcd import RegistryLike, open_registry
from neuron_di.kv import PoolMaker
from neuron_di.obs import LaunchReport, get_logger, say
from neuron_di.obs.hang_watch import watching_for_hangs
from neuron_di.registry import Announcer, keep_s_for
from neuron_di.registry.announcer import ANNOUNCE_TTL_S
from neuron_di.stop_signals import stop_on_signals
from neuron_di.transfer import is_signal_key
from neuron_di.types import Role, WorkerId
from neuron_di.worker.announced_host import announced_host, as_announced
from neuron_di.worker.model import LoadedModel, load_model, renewed, why_impossible
from neuron_di.worker.orders import Orders, RoleImpossible
from neuron_di.worker.peers import following_peers
from neuron_di.worker.role_epochs import EpochParts, run_epochs
from neuron_di.worker.server import bind, listening
from neuron_di.worker.worker import Worker

_log = get_logger(__name__)


def run_worker(options: WorkerOptions) -> None:
    """Run one worker until SIGTERM or SIGINT; it drains first. ConfigError if it cannot start."""
    _check(options)
    require_address(options.host)
    if not options.insecure and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines, and a worker does whatever "
            "it is asked: listen on loopback, or say --insecure where that network is trusted"
        )
    _check_ports(_given_ports(options))
    raise_descriptor_limit()
    if options.core is not None:
        _pin(options.core, options.engine.tp)
    require_threads(computes=True)
    is_child = options.parent_pid is not None

    def on_progress(done_bytes: int, total_bytes: int) -> None:
        if is_child:
            say(LaunchReport(event="loading", done_bytes=done_bytes, total_bytes=total_bytes))

    model = load_model(
        options.model,
        options.model_name,
        options.role,
        options.engine,
        num_siblings=options.num_siblings,
        on_progress=on_progress,
        arena=_arena(options),
    )
    sock = bind(options.host, options.port)
    with sock:
        options = _with_addresses(options, sock)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            was_ordered = runner.run(_serve(options, model, sock))
    if is_child and was_ordered:
        say(LaunchReport(event="drained"))


def _arena(options: WorkerOptions) -> PoolMaker | None:
    """Where `neuron-di serve` gave its workers an arena for their pools."""
    if options.kv_arena_fd is None or options.worker_id is None:
        return None
    return PoolMaker(options.kv_arena_fd, WorkerId(options.worker_id))


def _check(options: WorkerOptions) -> None:
    limits, key = options.hand_over, options.static_peer_key
    if key is not None and not is_signal_key(key):
        raise ConfigError(
            "--static-peer-key has 40 characters of Z85: signal_key in the partner's /status"
        )
    if limits.peer_silence_s < 2 * limits.heartbeat_s:
        raise ConfigError(
            f"--peer-silence-s {limits.peer_silence_s:g} is less than two heartbeats "
            f"(--heartbeat-s {limits.heartbeat_s:g}): every link would break"
        )
    if limits.kv_lease_s < 2 * limits.heartbeat_s:
        raise ConfigError(
            f"--kv-lease-s {limits.kv_lease_s:g} is less than two heartbeats (--heartbeat-s "
            f"{limits.heartbeat_s:g}), which keep it: requests that wait for a slot would lose "
            "their KV"
        )


def _with_addresses(options: WorkerOptions, sock: socket.socket) -> WorkerOptions:
    """Where this worker is, and its only partner, in numbers. ConfigError where nobody can tell."""
    static_peer = options.static_peer
    if static_peer is not None and options.role == "decode":
        static_peer = as_announced(static_peer)
    return replace(
        options,
        # A name may mean an IPv6 address to others who bind to it, which is not announced.
        host=str(sock.getsockname()[0]),
        port=sock.getsockname()[1],
        announce_host=announced_host(options, sock),
        static_peer=static_peer,
    )


def _pin(core: int, count: int) -> None:
    """To this core and those after it, one for each rank: the other ranks inherit them."""
    cores = sorted(os.sched_getaffinity(0))
    try:
        first = cores.index(core) if core in cores else 0
        others = {cores[(first + step) % len(cores)] for step in range(1, count)}
        os.sched_setaffinity(0, {core} | others)
    except (OSError, OverflowError):
        raise ConfigError(
            f"cannot pin this worker to core {core}: it may run on {', '.join(map(str, cores))}",
            param="core",
        ) from None


def _check_ports(places: list[tuple[str, int]]) -> None:
    """What is taken is said now, not when it is needed: also by another port of this worker."""
    with contextlib.ExitStack() as stack:
        for number, (host, port) in enumerate(places):
            if port and (host, port) in places[:number]:
                raise ConfigError(
                    f"port {port} is given twice: each of --port, --signal-port, --transfer-port "
                    "and --nrt-control-port is one of its own"
                )
            stack.enter_context(bind(host, port))


def _given_ports(options: WorkerOptions) -> list[tuple[str, int]]:
    """Where it must listen sooner or later. Any free port of --host will be there."""
    host = options.host
    ports = [(host, options.port)]
    if options.role == "prefill":
        transfer = options.kv_transfer
        data_host = transfer.transfer_host or host
        ports.append((host, options.signal_port))
        ports.append((data_host, transfer.transfer_port))
        ports.append((data_host, transfer.nrt_control_port))
    return [(at, port) for at, port in ports if port or at != host]


async def _serve(options: WorkerOptions, model: LoadedModel, sock: socket.socket) -> bool:
    """Serve until the process is told to end. True: by an operator's drain."""
    stop = asyncio.Event()
    stop_on_signals(stop)
    async with open_registry(options.registry, options.etcd) as registry:
        process = _Process(options, model, sock, registry)
        orders = Orders(process.check_role, drain_timeout_s=options.drain_timeout_s)
        parts = EpochParts(
            assemble=process.assemble,
            listening=process.listening,
            announced=process.announced,
            on_ready=process.tell_ready,
        )
        async with watching_for_hangs(process.busy_since_s, options.hang_timeout_s):
            return await run_epochs(options.role, orders, parts, stop)


class _Process:
    """What all workers share that live in this process, one after another."""

    def __init__(
        self,
        options: WorkerOptions,
        model: LoadedModel,
        sock: socket.socket,
        registry: RegistryLike | None,
    ) -> None:
        self._options = options
        self._model = model
        self._sock = sock
        self._registry = registry
        self._num_assembled = 0
        self._worker: Worker | None = None
        self._announcer: Announcer | None = None  # of the worker, while it has one

    def busy_since_s(self) -> float | None:
        """As the worker of the present epoch says."""
        return None if self._worker is None else self._worker.busy_since_s

    async def assemble(self, role: Role) -> Worker:
        """A worker of this role. The first one has the pool that was loaded with the weights."""
        options, self._worker = self._options, None
        if self._num_assembled:
            loop = asyncio.get_running_loop()
            self._model = await loop.run_in_executor(None, renewed, self._model, role)
            options = replace(options, role=role)
        self._num_assembled += 1
        worker = Worker(options, self._model)
        try:
            await worker.prompts.prepare_rules()
        except BaseException:  # such as that there is no further thread
            await worker.close(keeps_weights=True)
            raise
        self._worker = worker
        # Its name stays, whatever it does.
        self._options = replace(options, worker_id=worker.worker_id)
        return worker

    def check_role(self, role: Role) -> None:
        """Raise RoleImpossible where this process cannot take a role."""
        if self._options.static_peer is not None:
            raise RoleImpossible("this worker is bound to one partner by --static-peer")
        if self._announcer is not None and (reason := self._announcer.trouble()):
            raise RoleImpossible(f"it could not tell the registry of another role: {reason}")
        if reason := why_impossible(self._model, role):
            raise RoleImpossible(reason)

    @contextlib.asynccontextmanager
    async def listening(self, worker: Worker, orders: Orders) -> AsyncIterator[None]:
        options = self._options
        async with listening(worker, options.host, options.port, orders=orders, sock=self._sock):
            yield

    @contextlib.asynccontextmanager
    async def announced(self, worker: Worker) -> AsyncIterator[Announcer | None]:
        if self._registry is None:
            yield None
            return
        options = self._options
        ttl_s = options.etcd.etcd_ttl_s if options.etcd.etcd else ANNOUNCE_TTL_S
        async with (
            Announcer(
                self._registry, worker.record, ttl_s=ttl_s, on_trouble=self._tell_unannounced
            ) as announcer,
            # Its peers let it in by what it announces.
            following_peers(
                worker, self._registry, addresses=options.addresses, keep_s=keep_s_for(ttl_s)
            ),
        ):
            self._announcer = announcer
            try:
                yield announcer
            finally:
                self._announcer = None  # it knows this worker, and so its pool

    def _tell_unannounced(self, reason: str) -> None:
        if self._options.parent_pid is not None:
            say(LaunchReport(event="unannounced", message=reason))

    def tell_ready(self, worker: Worker) -> None:
        worker_id, role, url = worker.worker_id, worker.record().role, worker.record().url()
        _log.info("ready", worker=worker_id, role=role, url=url)
        if self._registry is None:
            hint = "nobody hears of this worker: give its URL to a proxy (--prefill-urls, "
            hint += "--decode-urls), or give it --registry or --etcd"
            _log.info("not_announced", url=url, hint=hint)
        if self._options.parent_pid is not None:
            say(LaunchReport(event="ready", url=url, worker_id=worker_id, role=role))
