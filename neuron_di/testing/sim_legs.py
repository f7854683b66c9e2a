"""Legs over the simulated network: the proxy's `Workers`, and each worker's HTTP front.

What `worker_client` and `worker/server` do over HTTP, the same errors included: refused when
nobody listens, gone when the process or the connection dies, silent when it is frozen or the way
is cut. Closing a leg cancels it at its worker a little later. Faults reset connections, let
them fall silent, and refuse them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from neuron_di.errors import (
    CapacityError,
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    PeerTimeout,
)
from neuron_di.testing.network import Network, Wire
from neuron_di.testing.sim_rpc import ask
from neuron_di.testing.virtual_loop import Process
from neuron_di.wire import (
    Failed,
    LegEvent,
    WorkerRecord,
    WorkerStatus,
    decode_leg_decoder,
    encode_json,
    leg_event_decoder,
    prefill_leg_decoder,
)
from neuron_di.worker import Worker
from neuron_di.worker.leg_report import failed
from neuron_di_proxy.failure import LegFailed
from neuron_di_proxy.workers import STATUS_TIMEOUT_S, LegKind, Progress

ORPHAN_S = 15.0  # until a worker notices that the proxy of a leg vanished without a word

_HANG_UP = PeerGone("the worker hung up")


@dataclass(slots=True)
class Server:
    """A worker's HTTP front, once it listens. `crashed` is told of exceptions nobody foresaw."""

    process: Process
    worker: Worker
    crashed: Callable[[Exception], None]

    async def answer(self, kind: LegKind, body: bytes) -> AsyncGenerator[LegEvent, None]:
        """The events of one leg, and Failed as the last one if it fails."""
        worker = self.worker
        try:
            if worker.is_draining:
                raise CapacityError("this worker is draining")
            async with aclosing(_events(worker, kind, body)) as events:
                async for event in events:
                    yield event
        except NeuronDiError as error:
            yield failed(error)
        except Exception as error:
            self.crashed(error)
            yield failed(LocalProtocolError("internal error"))


def _events(worker: Worker, kind: LegKind, body: bytes) -> AsyncGenerator[LegEvent, None]:
    if kind == "prefill" and worker.prefill is not None:
        return worker.prefill.run(prefill_leg_decoder.decode(body))
    if kind == "decode" and worker.decode is not None:
        return worker.decode.run(decode_leg_decoder.decode(body))
    if kind == "whole" and worker.combined is not None:
        return worker.combined.run(prefill_leg_decoder.decode(body))
    raise PeerGone("404: a worker of another role")


class SimWorkers:
    """All workers, as one proxy process reaches them. `servers` is by (host, API port)."""

    def __init__(
        self,
        network: Network,
        process: Process,
        servers: dict[tuple[str, int], Server],
        *,
        idle_timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        self.network = network
        self.process = process
        self.servers = servers
        self.idle_timeout_s = idle_timeout_s
        self.connect_timeout_s = connect_timeout_s

    def server_of(self, record: WorkerRecord) -> Server | None:
        """Who listens at a record's address, if its process lives."""
        server = self.servers.get((record.host, record.api_port))
        return None if server is None or server.process.is_dead else server

    def open_leg(self, record: WorkerRecord, kind: LegKind, leg: msgspec.Struct) -> "SimLeg":
        return SimLeg(self, record, kind, leg)

    async def status(
        self, record: WorkerRecord, timeout_s: float = STATUS_TIMEOUT_S
    ) -> WorkerStatus:
        server = self.server_of(record)
        return await ask(
            self.network,
            self.process,
            None if server is None else server.process,
            lambda: server.worker.status(),  # type: ignore[union-attr]
            timeout_s=timeout_s,
        )


class SimLeg:
    """One leg, at the proxy's end."""

    def __init__(
        self, workers: SimWorkers, record: WorkerRecord, kind: LegKind, leg: msgspec.Struct
    ) -> None:
        self.worker_id = record.worker_id
        self._workers = workers
        self._network = workers.network
        self._record = record
        self._kind: LegKind = kind
        self._leg: Any = leg
        self._connection: _Connection | None = None
        self._arrived: deque[bytes | PeerGone] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._heard_s = 0.0

    async def next(self) -> Progress:
        if self._connection is None:
            await self._connect()
        while not self._arrived:
            await self._wait()
        item = self._arrived.popleft()
        if isinstance(item, PeerGone):
            raise item
        event = leg_event_decoder.decode(item)
        if isinstance(event, Failed):
            raise LegFailed(event)
        return event

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def arrive(self, item: bytes | PeerGone) -> None:
        """A line came, or the end of the connection."""
        self._heard_s = self._network.loop.now_s
        self._arrived.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _connect(self) -> None:
        workers, network = self._workers, self._network
        server = workers.server_of(self._record)
        await asyncio.sleep(network.latency_s())
        if server is None or server.process.is_dead or network.faults.strikes("connection refused"):
            raise PeerGone(f"worker {self.worker_id} is gone (refused)")
        ours, theirs = workers.process.name, server.process.name
        if network.is_cut(ours, theirs) or network.is_cut(theirs, ours):
            await asyncio.sleep(workers.connect_timeout_s)
            raise PeerTimeout(f"worker {self.worker_id} cannot be reached in time")
        self._connection = _Connection(self, network, workers.process, server)
        self._heard_s = network.loop.now_s
        self._connection.start(self._kind, encode_json(self._leg))

    async def _wait(self) -> None:
        loop = self._network.loop
        self._waiter = loop.create_future()
        try:
            async with asyncio.timeout_at(self._heard_s + self._workers.idle_timeout_s):
                await self._waiter
        except TimeoutError:
            if self._connection is None or self._connection.is_silent():
                raise PeerTimeout(f"worker {self.worker_id} did not answer in time") from None
            self._heard_s = loop.now_s  # the empty lines that keep a leg alive have come


class _Connection:
    def __init__(self, leg: SimLeg, network: Network, proxy: Process, server: Server) -> None:
        self._leg = leg
        self._network = network
        self._proxy = proxy
        self._server = server
        self._up = Wire(network, proxy.name, server.process.name, server.process)
        self._down = Wire(network, server.process.name, proxy.name, proxy)
        self._task: asyncio.Task[None] | None = None
        self._is_stalled = False
        self._is_reset = False
        network.on_death(server.process.name, self._worker_died)
        network.on_death(proxy.name, self._proxy_died)

    def start(self, kind: LegKind, body: bytes) -> None:
        self._up.send(self._begin, kind, body)

    def close(self) -> None:
        """At the proxy's end: nothing more arrives here, and the worker notices."""
        if self._down.is_closed:
            return
        self._down.is_closed = True
        self._forget()
        if self._network.is_cut(self._proxy.name, self._server.process.name) or self._is_stalled:
            self._server.process.call_later(ORPHAN_S, self._cancel)
        else:
            self._up.send(self._cancel)

    def is_silent(self) -> bool:
        """No empty lines come, either."""
        worker = self._server.process
        is_cut = self._network.is_cut(worker.name, self._proxy.name)
        return self._is_stalled or worker.is_halted or is_cut

    def _begin(self, kind: LegKind, body: bytes) -> None:
        self._task = self._network.loop.create_task(self._run(kind, body))

    async def _run(self, kind: LegKind, body: bytes) -> None:
        network = self._network
        async with aclosing(self._server.answer(kind, body)) as events:
            async for event in events:
                if network.faults.strikes("leg reset"):
                    self._reset()
                elif network.faults.strikes("leg stalls"):
                    self._stall()
                self._say(event)
        self._down.send(self._leg.arrive, _HANG_UP)
        self._forget()

    def _say(self, event: LegEvent) -> None:
        leg = self._leg
        if self._is_reset:
            return
        self._network.note("leg", self._server.process.name, leg._kind, leg._leg, event)  # noqa: SLF001 - the other half
        self._down.send(leg.arrive, encode_json(event))

    def _reset(self) -> None:
        self._down.send(self._leg.arrive, PeerGone("the connection was reset"))
        self._is_reset = True
        self._forget()
        self._server.process.call_soon(self._cancel)

    def _stall(self) -> None:
        self._is_stalled = self._down.is_closed = True
        self._forget()
        self._server.process.call_later(ORPHAN_S, self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _worker_died(self) -> None:
        self._forget()
        if not self._network.is_cut(self._server.process.name, self._proxy.name):
            self._down.send(self._leg.arrive, PeerGone("the worker's process ended"))
        else:
            self._is_stalled = True

    def _proxy_died(self) -> None:
        self._forget()
        is_cut = self._network.is_cut(self._proxy.name, self._server.process.name)
        delay_s = ORPHAN_S if is_cut else self._network.latency_s()
        self._server.process.call_later(delay_s, self._cancel)

    def _forget(self) -> None:
        self._network.forget_death(self._server.process.name, self._worker_died)
        self._network.forget_death(self._proxy.name, self._proxy_died)
