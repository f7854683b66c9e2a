"""Legs over the simulated network: the proxy's `Workers`, and the leg link of each worker.

What `worker_client` and a worker's server do over TCP, the same errors included. All legs of a
proxy process at a worker process share one connection: refused when nobody listens, gone when
either end dies, silent when the worker is frozen or the way is cut. Closing a leg cancels it at
its worker a little later. Faults reset connections, let them fall silent, and refuse them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from neuron_di.errors import (
    LocalProtocolError,
    NeuronDiError,
    PeerError,
    PeerGone,
    PeerTimeout,
)
from neuron_di.testing.network import Network, Wire
from neuron_di.testing.sim_lane import relayed
from neuron_di.testing.sim_rpc import ask
from neuron_di.testing.virtual_loop import Process
from neuron_di.wire import (
    Failed,
    Finished,
    LegEvent,
    Released,
    Token,
    WorkerRecord,
    WorkerStatus,
    encode_json,
    leg_event_decoder,
)
from neuron_di.worker import Worker
from neuron_di.worker.leg_report import failed
from neuron_di.worker.server import LegAnswers, runs_of
from neuron_di_proxy.failure import LegFailed
from neuron_di_proxy.token_lane import Lane
from neuron_di_proxy.workers import STATUS_TIMEOUT_S, Hear, LegKind, Said

ORPHAN_S = 15.0  # until a worker notices that the proxy of a link vanished without a word


@dataclass(slots=True)
class Server:
    """A worker's port, once it listens. `crashed` is told of exceptions nobody foresaw, and
    `took_late` of legs that were taken after the worker had said that it drains.
    """

    process: Process
    worker: Worker
    crashed: Callable[[Exception], None]
    took_late: Callable[[LegKind], None]
    links: "set[_LegLink]" = field(default_factory=set)

    async def close(self) -> None:
        """End every link, and with it its legs. Returns when they have let go."""
        tasks = [task for link in list(self.links) for task in link.hang_up()]
        if tasks:
            await asyncio.wait(tasks)

    async def answer(self, kind: LegKind, body: bytes) -> AsyncGenerator[LegEvent, None]:
        """The events of one leg, and Failed as the last one if it fails."""
        worker = self.worker
        is_late = worker.record().state == "draining"
        answers = LegAnswers(runs_of(worker), lambda: worker.is_draining)
        try:
            async with aclosing(answers.events(kind, body)) as events:
                async for event in events:
                    if is_late:
                        self.took_late(kind)
                    yield event
        except NeuronDiError as error:
            yield failed(error)
        except Exception as error:
            self.crashed(error)
            yield failed(LocalProtocolError("internal error"))


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
        self._links: dict[tuple[str, int, str], _LegLink] = {}

    def server_of(self, record: WorkerRecord) -> Server | None:
        """Who listens at a record's address, if its process lives."""
        server = self.servers.get((record.host, record.api_port))
        return None if server is None or server.process.is_dead else server

    def open_leg(self, record: WorkerRecord, kind: LegKind, leg: msgspec.Struct) -> "SimLeg":
        return SimLeg(self, record, kind, leg)

    def link_to(self, record: WorkerRecord) -> "_LegLink":
        """The link to a worker process: a new one when there is none, or it ended."""
        key = record.host, record.api_port, record.incarnation
        link = self._links.get(key)
        if link is None or link.has_ended:
            link = self._links[key] = _LegLink(self, record)
        return link

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
        self.kind: LegKind = kind
        self.document: Any = leg
        self._workers = workers
        self._record = record
        self._link: _LegLink | None = None
        self._hear: Hear | None = None  # while it is open
        self._lane: Lane | None = None

    def open(self, hear: Hear) -> None:
        self._hear = hear
        self._link = self._workers.link_to(self._record)
        self._link.open(self)

    def relay(self, lane: Lane) -> None:
        self._lane = lane

    def close(self) -> None:
        if self._hear is not None and self._link is not None:
            self._hear = None
            self._link.close(self)

    def arrive(self, line: bytes) -> None:
        """An event came."""
        event = leg_event_decoder.decode(line)
        self.say(LegFailed(event) if isinstance(event, Failed) else event)

    def say(self, said: Said) -> None:
        """Tell who listens, unless it is over already."""
        hear, lane = self._hear, self._lane
        if hear is not None:
            if lane is not None and type(said) is Token and relayed(said, lane):
                return
            if isinstance(said, Exception | Finished | Released):
                self._hear = None
            hear(said)


class _LegLink:
    """One connection of a proxy process to a worker process, both of its ends."""

    def __init__(self, workers: SimWorkers, record: WorkerRecord) -> None:
        self.has_ended = False  # at the proxy's end
        self._workers = workers
        self._network = workers.network
        self._proxy = workers.process
        self._record = record
        self._legs: dict[SimLeg, None] = {}  # open ones, in the order they were opened
        self._server: Server
        self._up: Wire | None = None  # while connected
        self._down: Wire
        self._tasks: dict[SimLeg, asyncio.Task[None]] = {}  # the worker's
        self._is_stalled = False
        self._is_watched = False  # by a timer
        self._heard_s = 0.0
        self._proxy.call_later(self._network.latency_s(), self._connect)

    def open(self, leg: SimLeg) -> None:
        if not self._legs:
            self._heard_s = self._network.loop.now_s
        if not self._is_watched:
            self._is_watched = True
            self._proxy.call_later(self._workers.idle_timeout_s, self._check_silence)
        self._legs[leg] = None
        if self._up is not None:
            self._send_up(self._begin, leg, encode_json(leg.document))

    def close(self, leg: SimLeg) -> None:
        self._legs.pop(leg, None)
        if self._up is not None:
            self._send_up(self._cancel, leg)

    # The proxy's end.

    def _connect(self) -> None:
        network, workers = self._network, self._workers
        server = workers.server_of(self._record)
        worker_id = self._record.worker_id
        if server is None or network.faults.strikes("connection refused"):
            self._end(PeerGone(f"worker {worker_id} is gone (refused)"))
            return
        ours, theirs = self._proxy.name, server.process.name
        if network.is_cut(ours, theirs) or network.is_cut(theirs, ours):
            late = PeerTimeout(f"worker {worker_id} cannot be reached in time")
            self._proxy.call_later(workers.connect_timeout_s, self._end, late)
            return
        self._server = server
        self._up = Wire(network, ours, theirs, server.process)
        self._down = Wire(network, theirs, ours, self._proxy)
        server.links.add(self)
        network.on_death(theirs, self._worker_died)
        network.on_death(ours, self._proxy_died)
        self._heard_s = network.loop.now_s
        for leg in self._legs:
            self._send_up(self._begin, leg, encode_json(leg.document))

    def _arrive(self, leg: SimLeg, line: bytes) -> None:
        self._heard_s = self._network.loop.now_s
        leg.arrive(line)

    def _check_silence(self) -> None:
        """End what has legs and says nothing. A link that is only idle says that it lives."""
        now_s, idle_s = self._network.loop.now_s, self._workers.idle_timeout_s
        self._is_watched = not self.has_ended and bool(self._legs)
        if not self._is_watched:
            return
        if now_s >= self._heard_s + idle_s:
            if self._up is None or self._is_silent():
                self._end(PeerTimeout(f"worker {self._record.worker_id} did not answer in time"))
                return
            self._heard_s = now_s
        self._proxy.call_later(self._heard_s + idle_s - now_s, self._check_silence)

    def _is_silent(self) -> bool:
        worker = self._server.process
        is_cut = self._network.is_cut(worker.name, self._proxy.name)
        return self._is_stalled or worker.is_halted or is_cut

    def _end(self, error: PeerError) -> None:
        """Close the connection at the proxy's end. The worker notices, sooner or later."""
        if self.has_ended:
            return
        self.has_ended = True
        if self._up is not None:
            self._leave()
        legs, self._legs = self._legs, {}
        for leg in legs:
            leg.say(error)

    def _send_up(self, deliver: Callable[..., None], *args: object) -> None:
        assert self._up is not None, "it is connected"
        if self._network.is_lossy(self._proxy.name, self._server.process.name):
            self._stall()
        self._up.send(deliver, *args)

    # The worker's end.

    def _begin(self, leg: SimLeg, body: bytes) -> None:
        task = self._network.loop.create_task(self._run(leg, body))
        self._tasks[leg] = task
        task.add_done_callback(lambda _: self._tasks.pop(leg, None))

    async def _run(self, leg: SimLeg, body: bytes) -> None:
        network = self._network
        async with aclosing(self._server.answer(leg.kind, body)) as events:
            async for event in events:
                if network.faults.strikes("leg reset"):
                    self._reset()
                elif network.faults.strikes("leg stalls"):
                    self._stall()
                name = self._server.process.name
                network.note("leg", name, leg.kind, leg.document, event)
                self._send_down(self._arrive, leg, encode_json(event))
        self._send_down(leg.say, PeerGone("the worker hung up"))  # unless it said its end

    def _send_down(self, deliver: Callable[..., None], *args: object) -> None:
        if self._network.is_lossy(self._server.process.name, self._proxy.name):
            self._stall()
        self._down.send(deliver, *args)

    def _cancel(self, leg: SimLeg) -> None:
        if leg in self._tasks:
            self._tasks[leg].cancel()

    def _cancel_all(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    # The connection.

    def _leave(self) -> None:
        """The proxy closes the connection, or is gone."""
        self._forget()
        assert self._up is not None, "it was connected"
        self._up.is_closed = self._down.is_closed = True
        is_cut = self._network.is_cut(self._proxy.name, self._server.process.name)
        unseen = is_cut or self._is_stalled
        self._server.process.call_later(
            ORPHAN_S if unseen else self._network.latency_s(), self._cancel_all
        )

    def _reset(self) -> None:
        self._down.send(self._end, PeerGone("the connection was reset"))
        self._server.process.call_soon(self._cancel_all)

    def _stall(self) -> None:
        """Nothing arrives any more, at either end, and neither hears of it.

        Also where what was sent is lost: TCP lets nothing pass that follows it.
        """
        if not self._is_stalled:
            assert self._up is not None, "it was connected"
            self._is_stalled = self._up.is_closed = self._down.is_closed = True
            self._server.process.call_later(ORPHAN_S, self._cancel_all)

    def hang_up(self) -> list["asyncio.Task[None]"]:
        """The worker closes the connection. The legs that end now."""
        tasks = list(self._tasks.values())
        self._cancel_all()
        self._worker_died()
        return tasks

    def _worker_died(self) -> None:
        self._forget()
        if self._network.is_cut(self._server.process.name, self._proxy.name):
            self._stall()
        else:
            self._down.send(self._end, PeerGone("the worker's process ended"))

    def _proxy_died(self) -> None:
        self._leave()

    def _forget(self) -> None:
        self._server.links.discard(self)
        self._network.forget_death(self._server.process.name, self._worker_died)
        self._network.forget_death(self._proxy.name, self._proxy_died)
