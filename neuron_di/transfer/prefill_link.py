"""A decode worker's connection to one prefill worker: shake hands, stay in touch, or break.

    connect()   Handshake -> Welcome, KvMapInit -> KvMap, a lane to its KV chosen
    then        Ping every heartbeat; silence for too long breaks the link

Once broken it stays so; whoever needs the peer again makes another.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from neuron_di.clock import now_s
from neuron_di.config import HandOverOptions
from neuron_di.errors import (
    CapacityError,
    ConfigError,
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    PeerRefused,
    PeerTimeout,
    RemoteProtocolError,
    StaleIncarnation,
)
from neuron_di.kv import KvLayout
from neuron_di.obs import get_logger
from neuron_di.transfer.counters import HandOverCounters
from neuron_di.transfer.geometry import layout_fields, peer_layout
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.kv_plan import is_direct, resharding
from neuron_di.transfer.landing import Landing
from neuron_di.transfer.lanes import Lane, LaneSet, streams_over
from neuron_di.transfer.signal_keys import SignalKeys
from neuron_di.transfer.signal_link import Seal, SignalTransport, endpoint
from neuron_di.wire import (
    SIGNAL_VERSION,
    FromDecode,
    FromPrefill,
    Handshake,
    KvMap,
    KvMapInit,
    Malformed,
    PeerAddress,
    Ping,
    Pong,
    Refused,
    Welcome,
    encode_msgpack,
    from_prefill_decoder,
)

_log = get_logger(__name__)

# From a receive's cancellation to the end of a link whose engine does not end it.
CANCEL_S = 1.0


class PrefillLink:
    """Owns one end of a signal link. Lives on the worker's event loop.

    `connection` is a number that no other link of this process has had. `on_message` gets what
    is said about requests, `on_tick` is called at every heartbeat, `on_connected` once blocks can
    be pulled, `on_broken` when it broke. PeerRefused at once where one end encrypts and the other
    cannot.
    """

    def __init__(
        self,
        local: LocalWorker,
        lanes: LaneSet,
        landing: Landing,
        transport: SignalTransport,
        peer: PeerAddress,
        limits: HandOverOptions,
        counters: HandOverCounters,
        *,
        connection: int,
        keys: SignalKeys | None,
        on_message: Callable[[FromPrefill], None],
        on_tick: Callable[[], None],
        on_connected: Callable[[], None],
        on_broken: Callable[[NeuronDiError], None],
    ) -> None:
        self.peer = peer
        self._local = local
        self._lanes = lanes
        self._landing = landing
        self._limits = limits
        self._counters = counters
        self._on_message = on_message
        self._on_tick = on_tick
        self._on_connected = on_connected
        self._on_broken = on_broken
        self.lane: Lane | None = None  # once connected, as is the layout of the peer's KV
        self.layout: KvLayout | None = None
        self.name = f"{local.incarnation}.{connection}"
        self._address = endpoint(peer.signal_host, peer.signal_port)
        self._loop = asyncio.get_running_loop()
        self._link = transport.connect(
            peer.signal_host,
            peer.signal_port,
            self.name.encode(),
            self._on_frames,
            seal=self._seal(keys),
        )
        self._welcome: asyncio.Future[Welcome] = self._loop.create_future()
        self._kv_map: asyncio.Future[KvMap] = self._loop.create_future()
        self.broken: NeuronDiError | None = None
        self.is_connected = False  # and was once, when it broke
        self._last_heard_s = now_s()
        self._num_pings = 0
        self._heartbeat: asyncio.TimerHandle | None = None
        self._connecting = self._loop.create_task(self._connect())
        # Its error reaches everybody through connect(); that nobody called it is no warning.
        self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())

    def _seal(self, keys: SignalKeys | None) -> Seal | None:
        """How to talk to this peer; None: in the open, as its record says."""
        peer = self.peer
        if peer.signal_key is None:
            return None
        if keys is None:
            raise PeerRefused(f"{peer.worker_id} encrypts its signal link, this worker does not")

        def on_failed(error: PeerGone) -> None:
            self._counters.num_signals_refused += 1
            self.break_off(PeerGone(f"{peer.worker_id} at {self._address}: {error.message}"))

        return Seal(keys, peer.signal_key, on_failed)

    async def connect(self) -> None:
        """Return when blocks can be pulled. Any number of callers; one of them going is fine.

        PeerGone, PeerTimeout, PeerRefused, StaleIncarnation or CapacityError when that cannot be.
        """
        await asyncio.shield(self._connecting)
        if self.broken is not None:
            raise self.broken

    def send(self, message: FromDecode) -> None:
        """Say something; to a broken link: nothing."""
        if self.broken is None and not self._link.send([encode_msgpack(message)]):
            # The queue to a lost peer is full: the silence deadline ends it.
            _log.info("signal_unsent", kind=type(message).__name__)

    def break_off(self, error: NeuronDiError) -> None:
        """The one end of this link. Whoever waits gets the error."""
        if self.broken is not None:
            return
        self.broken = error
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        futures: list[asyncio.Future[Any]] = [self._welcome, self._kv_map]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # a future that nobody awaits is no warning
        self._link.close()
        self._on_broken(error)

    def doubt(self, is_open: Callable[[], bool], patience_s: float = 0.0) -> None:
        """A receive was cancelled. Break off if its engine does not end it: `is_open` still.

        `patience_s` is for what is being written: whoever else uses the link need not suffer.
        """

        def look() -> None:
            if is_open():
                self.break_off(PeerGone("a posted receive lost its send"))

        self._loop.call_later(CANCEL_S + patience_s, look)

    async def _connect(self) -> None:
        try:
            kv_map = await self._shake_hands()
            # From here on the peer forgets us if we are silent, however long connecting takes.
            self._heartbeat = self._loop.call_later(self._limits.heartbeat_s, self._beat)
            await self._reach(kv_map)
        except NeuronDiError as error:
            self.break_off(error)
            raise
        except Exception as error:
            self.break_off(LocalProtocolError(f"connecting failed: {error!r}"))
            raise
        if self.broken is not None:  # meanwhile
            self._on_broken(self.broken)
            raise self.broken
        assert self.lane is not None, "it was chosen"
        self._counters.num_fallbacks += self.lane.is_fallback
        _log.info("connected", peer=self.peer.worker_id, address=self._address, lane=self.lane.name)
        self.is_connected = True
        self._on_connected()

    async def _reach(self, kv_map: KvMap) -> None:
        """Find a way to the peer's KV, and room for it, if it has to be brought into our form."""
        local = self._local
        layout = self.layout = peer_layout(kv_map.layout, local.layout, converts=local.converts)
        if not is_direct(layout, local.layout):
            largest_bytes = resharding(layout, local.layout).landing_bytes(local.context_tokens)
            await self._landing.open(largest_bytes)
        # Mapping or connecting may block, so neither this loop nor the engine does it.
        lanes = self._lanes
        self.lane = await self._loop.run_in_executor(
            lanes.threads, lanes.connect, self.peer.incarnation, kv_map.offers, layout
        )
        if streams_over(self.lane, self._limits):
            try:
                await self._landing.open()
            except ConfigError as error:  # then nothing is streamed
                _log.warning("layers_not_streamed", reason=error.message)

    async def _shake_hands(self) -> KvMap:
        """Say who we are, and learn where the peer's pool lies."""
        timeout_s = self._limits.peer_connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                self._send_handshake()
                await self._welcome
                layout = layout_fields(self._local.layout)
                offers = self._lanes.offers(self.peer.incarnation)
                self.send(KvMapInit(layout=layout, offers=offers))
                return await self._kv_map
        except TimeoutError:
            raise PeerTimeout(
                f"no answer from prefill worker {self.peer.worker_id} at {self._address} "
                f"within {timeout_s:g} s"
            ) from None

    def _send_handshake(self) -> None:
        local = self._local
        self.send(
            Handshake(
                version=SIGNAL_VERSION,
                worker_id=local.worker_id,
                incarnation=local.incarnation,
                expects=self.peer.incarnation,
                model_digest=local.model_digest,
                layout_digest=local.exchange_digest,
            )
        )

    def _on_frames(self, frames: list[bytes]) -> None:
        if self.broken is not None:
            return
        try:
            if len(frames) != 1:
                raise RemoteProtocolError(f"message of {len(frames)} frames")
            message = from_prefill_decoder.decode(frames[0])
            self._last_heard_s = now_s()
            self._take(message)
        except RemoteProtocolError as error:
            self._counters.num_signals_refused += 1
            self.break_off(error)

    def _take(self, message: FromPrefill) -> None:
        if isinstance(message, Welcome):
            if not self._welcome.done():
                self._welcome.set_result(message)
        elif isinstance(message, KvMap):
            if not self._kv_map.done():
                self._kv_map.set_result(message)
        elif isinstance(message, Refused):
            self.break_off(_refusal(message)(f"{self.peer.worker_id} refused: {message.reason}"))
        elif isinstance(message, Malformed):
            raise RemoteProtocolError(f"{self.peer.worker_id}: {message.reason}")
        elif not isinstance(message, Pong):
            self._on_message(message)

    def _beat(self) -> None:
        self._heartbeat = self._loop.call_later(self._limits.heartbeat_s, self._beat)
        silence_s = now_s() - self._last_heard_s
        if silence_s > self._limits.peer_silence_s:
            self.break_off(PeerGone(f"{self.peer.worker_id} said nothing for {silence_s:.1f} s"))
            return
        self._num_pings += 1
        self.send(Ping(sequence=self._num_pings))
        self._on_tick()


def _refusal(message: Refused) -> type[NeuronDiError]:
    if message.is_stale:
        return StaleIncarnation
    return CapacityError if message.is_busy else PeerRefused
