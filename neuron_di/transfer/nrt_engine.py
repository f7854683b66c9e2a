"""The transfer engine of Neuron devices: KV goes from core to core, by the runtime's send/receive.

    post_send     offers it over the control connection, and posts it once it is accepted
    post_receive  is matched with an offer by tag; its receives are posted, and the offer accepted

What the device is told cannot be called off. So it is told nothing before both ends agreed, and a
peer that is lost behind that takes this worker's device along (nrt_exchange.py). By what it is told
is found out at the start (nrt_cores.py).

So far this has run on a simulator of libnrt only.

Next: neuron_di/transfer/nrt_frames.py, neuron_di/transfer/nrt_links.py
"""

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from neuron_di.clock import Deadline
from neuron_di.config import TransferOptions
from neuron_di.errors import (
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    PeerRefused,
    RemoteProtocolError,
)
from neuron_di.kv import DeviceKv, KvGeometry, KvLayout, KvPool, Memory
from neuron_di.obs import get_logger
from neuron_di.transfer.copy_thread import CopyThread
from neuron_di.transfer.data_address import data_address
from neuron_di.transfer.nrt_connections import PROBE_BYTES, Connections
from neuron_di.transfer.nrt_cores import neuron_pool, open_driver
from neuron_di.transfer.nrt_exchange import NrtTimes
from neuron_di.transfer.nrt_links import Guest, NrtLinks
from neuron_di.transfer.nrt_plan import DevicePlan, Moves, device_geometry, region_of
from neuron_di.transfer.nrt_poster import Poster
from neuron_di.transfer.nrt_receiver import NrtReceiver
from neuron_di.transfer.nrt_sender import NrtSender
from neuron_di.transfer.run_bounds import slot_refusal
from neuron_di.transfer.tcp_proof import pair_secret
from neuron_di.transfer.tcp_tls import open_tls
from neuron_di.transfer.transfer_engine import Receive, Send, TransferToken
from neuron_di.types import Incarnation
from neuron_di.wire import NrtRegion, Region
from neuron_di_bindings.nrt import NrtWorkerError

_log = get_logger(__name__)

_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Connected:
    """A prefill worker whose device this one's is linked to."""

    receiver: NrtReceiver
    plan: DevicePlan
    num_blocks: int


class NrtEngine:
    """Owns send and receive of the device's cores, threads, and, once a decode worker was accepted,
    a port. Borrows the pool and its tensors, which may be freed after close().

    `host`, `announced_host` and `why_refused` are as a TcpEngine's. `how` is by what it sends and
    receives, for operators. ConfigError where the pool's device cannot; it says why.
    """

    name = "nrt"
    is_one_sided = False

    def __init__(
        self,
        pool: KvPool,
        options: TransferOptions | None = None,
        *,
        host: str = "127.0.0.1",
        announced_host: str | None = None,
        why_refused: Callable[[str, int], str] = lambda _host, _port: "",
        times: NrtTimes | None = None,
    ) -> None:
        self._pool = neuron_pool(pool)
        self._options = options or TransferOptions()
        self._host, self._announced_host = data_address(self._options, host, announced_host)
        self._why_refused = why_refused
        self._times = times or NrtTimes()
        self._tls = open_tls(self._options)
        self._device = device = self._pool.device
        geometry = replace(device.geometry, num_blocks=pool.num_blocks)
        self._geometry = DeviceKv.used_part(geometry, pool.layout.block_size)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._lock = threading.Lock()
        self._is_closed = False
        self._guests: dict[Incarnation, Guest] = {}  # who were accepted
        self._connected: dict[Incarnation, _Connected] = {}
        self._region(Incarnation(""), 0)  # a device that no peer can be told of is refused now
        self._driver = open_driver(device, PROBE_BYTES)
        self.how = self._driver.how
        self._connections = Connections(self._driver, device.lncs)
        self._tokens = CopyThread("kv-nrt-done")
        self._poster = Poster("kv-nrt", self._driver.flush, self._device_failed)
        self._links = NrtLinks(
            self._pool,
            self._driver,
            self._connections,
            self._poster,
            self._times,
            secret=self._secret,
            tls=self._tls,
        )

    def local_region(self, peer: Incarnation) -> Region:
        """With a secret for this peer, which is of no use to another."""
        return self._region(peer, self._links.port)

    def _region(self, peer: Incarnation, port: int) -> NrtRegion:
        return region_of(
            self._device,
            self._pool.num_blocks,
            host=self._announced_host,
            port=port,
            secret=pair_secret(self._secret, peer),
            is_tls=self._tls is not None,
        )

    def register(self, memory: Memory) -> None:
        """Nothing to do: nothing is received outside of the device's slots."""

    def connect(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        """Dial, prove and be proved, then the same through the device. Replaces an earlier link."""
        if not isinstance(region, NrtRegion) or not region.port:
            raise PeerRefused("it has no Neuron device at a control port")
        if reason := self._why_refused(region.host, region.port):
            raise PeerRefused(f"its control port is where nobody connects: {reason}")
        plan = DevicePlan(self._geometry_of(region, layout), self._geometry)
        pairs = [(own, region.lncs[its]) for its, own in plan.pairs]
        exchange = self._links.dial(peer, region, pairs)
        receiver = NrtReceiver(exchange, self._mark, self._complete)
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._connected[peer] = _Connected(receiver, plan, region.num_blocks)
        self._links.hear(exchange, receiver)
        if is_closed:  # meanwhile; then the links end it
            raise PeerGone("this worker's transfer engine is closed")

    def accept(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        """Let it link with its secret, from any address. The first peer opens the port."""
        if not isinstance(region, NrtRegion):
            raise PeerRefused("it has no Neuron device")
        plan = DevicePlan(self._geometry, self._geometry_of(region, layout))
        pairs = [(own, region.lncs[its]) for own, its in plan.pairs]
        self._links.listen(self._host, self._options.nrt_control_port, self._guests.get)
        # The runtime connects there, at a port that no peer names: only the host is in question.
        if reason := self._why_refused(region.host, self._links.port):
            raise PeerRefused(f"its device is where nobody connects: {reason}")
        with self._lock:
            known = self._guests.get(peer)
            if known is not None and known.region == region:
                return
            sender = NrtSender(self._times, self._complete)
            self._guests[peer] = Guest(region, plan, pairs, sender)
        if known is not None:
            self._links.finish(known.sender.exchange, PeerGone("it has another secret now"))

    def post_send(self, peer: Incarnation, send: Send) -> TransferToken:
        """The token ends, at the latest, when nobody accepts the offer in time."""
        guest = self._guests.get(peer)
        if guest is None:
            return TransferToken.over(PeerGone("no such decode worker was accepted"))
        token, sender = TransferToken(), guest.sender
        make_moves = partial(self._moves_out, guest.plan, send)
        self._call(
            token,
            lambda: sender.post(send.tag, token, make_moves),
            lambda error: sender.fail(token, error),
        )
        return token

    def post_receive(self, peer: Incarnation, receive: Receive) -> TransferToken:
        connected = self._connected.get(peer)
        if connected is None:
            return TransferToken.over(PeerGone("no connection to the prefill worker's device"))
        refusal = slot_refusal(receive, self._pool, connected.num_blocks)
        if refusal is not None:
            return TransferToken.over(refusal)
        token, source_ids = TransferToken(), receive.source.block_ids
        make_moves = partial(
            connected.plan.moves, source_ids, receive.block_ids, receive.num_tokens
        )
        receiver = connected.receiver
        self._call(
            token,
            lambda: receiver.post(receive, token, make_moves),
            lambda error: receiver.fail(token, error),
        )
        return token

    def cancel(self, peer: Incarnation, tag: int) -> None:
        """At once where its offer was not accepted. Else nothing: the device has it."""
        connected = self._connected.get(peer)
        if connected is not None:
            self._poster.call(lambda: connected.receiver.cancel(tag))

    def fence(self, peer: Incarnation) -> None:
        """Nothing to do: no token is done before the cores that received were flushed."""

    def commit(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:  # noqa: ARG002
        """Fill the other replicas of each head, with what was verified.

        The prefill worker keeps a send's blocks until all of it is sent.
        """
        return self._pool.fill_replicas(receive.block_ids, receive.num_tokens)

    def abandon(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:  # noqa: ARG002
        return None

    def disconnect(self, peer: Incarnation) -> None:
        """What both ends agreed on goes on; everything else of this peer's ends."""
        with self._lock:
            connected = self._connected.pop(peer, None)
            guest = self._guests.pop(peer, None)
        error = PeerGone("the peer was disconnected")
        if connected is not None:
            self._links.finish(connected.receiver.exchange, error)
        if guest is not None:
            self._links.finish(guest.sender.exchange, error)

    def close(self) -> None:
        deadline = Deadline.after(self._times.close_s)
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            idle = [each.receiver.idle for each in self._connected.values()]
            idle += [each.sender.idle for each in self._guests.values()]
        for event in idle:
            event.wait(deadline.remaining_s())
        with self._lock:
            self._connected.clear()
            self._guests.clear()
        self._links.close(Deadline.after(self._times.close_s))  # for what was agreed on meanwhile
        deadline = Deadline.after(self._times.close_s)
        self._poster.end(deadline)
        self._tokens.end()
        self._tokens.join(deadline.remaining_s())
        self._driver.close()

    def _geometry_of(self, region: NrtRegion, layout: KvLayout) -> KvGeometry:
        if region.is_tls != (self._tls is not None):
            raise PeerRefused("one end of the control connection has TLS, the other has not")
        if layout != self._pool.layout:
            raise PeerRefused("its slots are of another length, or its model's KV another")
        return device_geometry(region, layout)

    def _moves_out(self, plan: DevicePlan, send: Send) -> Moves:
        """What is sent. On the poster's thread; the slots have the KV when it returns."""
        if not len(send.exchange):
            raise RemoteProtocolError("the decode worker named no slots to send to")
        moves = plan.moves(send.block_ids, send.exchange, send.num_tokens)
        self._pool.end_fill(send.block_ids, send.num_tokens)  # what came by way of the host
        return moves

    def _mark(self, receive: Receive) -> None:
        self._pool.mark_on_device(receive.block_ids)

    def _call(
        self,
        token: TransferToken,
        action: Callable[[], object],
        fail: Callable[[NeuronDiError], object],
    ) -> None:
        """On the poster's thread, or end the token. `fail` is told of a bug: the device may have
        the transfer by then."""

        def guarded() -> None:
            try:
                action()
            except Exception as bug:
                _log.exception("nrt_transfer_failed")
                name = type(bug).__name__
                fail(LocalProtocolError(f"a transfer engine failed: {name}"))

        if self._is_closed or not self._poster.call(guarded):
            token.complete(LocalProtocolError("a transfer was posted to a closed engine"))

    def _complete(self, token: TransferToken, error: NeuronDiError | None) -> None:
        self._tokens.complete(token, error, is_short=error is not None)

    def _device_failed(self, error: NrtWorkerError) -> None:
        self._links.device_failed(error)
