"""Workers without an engine, and a bare decode worker that says whatever it likes."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Self

import zmq

from neuron_di import clock
from neuron_di.clock import Deadline, now_s
from neuron_di.config import HandOverOptions
from neuron_di.errors import NeuronDiError
from neuron_di.kv import KvIdentity, KvLayout, KvPool
from neuron_di.transfer import (
    ConnectorOptions,
    HandOverCounters,
    LaneSet,
    LocalWorker,
    NeuronConnector,
    RecvBuffer,
    ShmEngine,
    SignalKeys,
    TransferEngine,
    TransferToken,
)
from neuron_di.transfer.geometry import layout_fields
from neuron_di.types import BlockId, Incarnation, RequestId, WorkerId
from neuron_di.wire import (
    SIGNAL_VERSION,
    Done,
    Handshake,
    KvMap,
    KvMapInit,
    LookupAll,
    Offer,
    PeerAddress,
    Ping,
    Pong,
    Pull,
    Ready,
    Region,
    Welcome,
    encode_msgpack,
    from_prefill_decoder,
)

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 16
WAIT_S = 20.0
R = RequestId("request-1")
CONNECTOR_OPTIONS = ("static_peer", "static_peer_key", "signal_port", "keys", "landing_bytes")
# Limits for tests that let time pass.
QUICK = {"heartbeat_s": 0.02, "peer_silence_s": 0.4}


def pull_of(attempt: int = 0, engine: str = "shm", num_held: int = 0) -> Pull:
    return Pull(
        request_id=R,
        attempt=attempt,
        engine=engine,
        block_ids=[0, 1],
        num_held=num_held,
    )


def done_of(attempt: int = 0) -> Done:
    return Done(
        request_id=R,
        attempt=attempt,
        engine="shm",
        form="direct",
        kv_bytes=8,
        transfer_s=0.25,
    )


def kv_map_init(region: Region, engine: str = "shm") -> KvMapInit:
    return KvMapInit(layout=layout_fields(LAYOUT), offers=[Offer.of(engine, region)])


def kv_map(region: Region) -> KvMap:
    return KvMap(layout=layout_fields(LAYOUT), offers=[Offer.of("shm", region)])


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.token_hex(16))


async def until(condition: Callable[[], object]) -> None:
    """Come back when it holds."""
    end_s = now_s() + WAIT_S
    while not condition():
        assert now_s() < end_s, "it never came to hold"
        await asyncio.sleep(0.005)


async def end_of(token: TransferToken) -> TransferToken:
    await until(token.is_done)
    return token


class LeapClock:
    """Real time, and the seconds that a test leaps ahead."""

    def __init__(self) -> None:
        self._real = clock._clock
        self._ahead_s = 0.0

    def leap(self, seconds: float) -> None:
        self._ahead_s += seconds

    def monotonic_s(self) -> float:
        return self._real.monotonic_s() + self._ahead_s

    def unix_s(self) -> float:
        return self._real.unix_s()

    def sleep_s(self, duration_s: float) -> None:
        self._real.sleep_s(duration_s)


async def swept(prefill: "Prefill") -> None:
    """Come back when everything that is overdue now has been dealt with."""
    for _ in range(2):
        before = prefill.buffer._sweeper
        await until(lambda before=before: prefill.buffer._sweeper is not before)


class _Side:
    def __init__(
        self,
        worker_id: str,
        *,
        model_digest: str = "model",
        layout: KvLayout = LAYOUT,
        converts: bool = False,
        context_tokens: int = 0,
        incarnation: Incarnation | None = None,
        make_pool: Callable[[KvLayout, int, Incarnation], KvPool] | None = None,
        make_transfer: Callable[[KvPool], TransferEngine] = ShmEngine,
        more_engines: Sequence[Callable[[KvPool], TransferEngine]] = (),
        **options: Any,
    ) -> None:
        self.local = LocalWorker(
            worker_id=WorkerId(worker_id),
            incarnation=incarnation or new_incarnation(),
            model_digest=model_digest,
            layout=layout,
            converts=converts,
            context_tokens=context_tokens,
        )
        make = make_pool or KvPool.create
        self.pool = make(layout, NUM_BLOCKS, self.local.incarnation)
        self.transfer = make_transfer(self.pool)
        self.lanes = LaneSet([self.transfer, *(make(self.pool) for make in more_engines)])
        connector = {key: options.pop(key) for key in CONNECTOR_OPTIONS if key in options}
        self.keys: SignalKeys | None = connector.get("keys")
        self.connector = NeuronConnector(
            self.local,
            self.lanes,
            self.pool,
            ConnectorOptions(limits=HandOverOptions(**options), **connector),
        )
        self._is_closed = False

    @property
    def counters(self) -> HandOverCounters:
        return self.connector.counters

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.connector.close()
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self.connector.wait_closed)
            await loop.run_in_executor(None, self.lanes.close)
            self.connector.landing.close()
            self.pool.close()


class Prefill(_Side):
    """Block n holds n. `ended` is what the SendBuffer said of parked requests, in order."""

    def __init__(self, worker_id: str = "prefill-0", **options: Any) -> None:
        super().__init__(worker_id, **options)
        self.ended: list[tuple[tuple[RequestId, int], Done | NeuronDiError]] = []
        self.held_by: list[TransferToken | None] = []  # beside `ended`
        self.buffer = self.connector.open_send_buffer(self._on_end)
        tensor = self.pool.tensor()
        for block_id in range(NUM_BLOCKS):
            tensor[block_id] = block_id

    def _on_end(
        self,
        key: tuple[RequestId, int],
        outcome: Done | NeuronDiError,
        held_by: TransferToken | None,
    ) -> None:
        self.ended.append((key, outcome))
        self.held_by.append(held_by)

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(
            worker_id=self.local.worker_id,
            incarnation=self.local.incarnation,
            signal_host="127.0.0.1",
            signal_port=self.buffer.port,
            signal_key=self.keys.public if self.keys is not None else None,
        )

    def identity(self, request_id: RequestId = R, attempt: int = 0) -> KvIdentity:
        return KvIdentity(
            worker_id=self.local.worker_id,
            incarnation=self.local.incarnation,
            request_id=request_id,
            attempt=attempt,
            layout_digest=self.local.layout_digest,
        )

    def ready(
        self,
        request_id: RequestId = R,
        block_ids: tuple[int, ...] = (3, 4),
        attempt: int = 0,
        num_tokens: int | None = None,
    ) -> Ready:
        layout = self.pool.layout
        num_tokens = num_tokens or layout.block_size * len(block_ids)
        return Ready(
            request_id=request_id,
            attempt=attempt,
            worker_id=self.local.worker_id,
            incarnation=self.local.incarnation,
            layout_digest=self.local.layout_digest,
            prompt_ids=[5] * num_tokens,
            generated=[9],
            block_ids=list(block_ids),
            generations=self.pool.generations(block_ids),
            digests=self.pool.digests(block_ids, self.identity(request_id, attempt), num_tokens),
            num_tokens=num_tokens,
        )

    def park(
        self,
        request_id: RequestId = R,
        block_ids: tuple[int, ...] = (3, 4),
        attempt: int = 0,
        num_tokens: int | None = None,
    ) -> Ready:
        ready = self.ready(request_id, block_ids, attempt, num_tokens)
        self.buffer.expect(request_id, attempt)
        self.buffer.park(ready)
        return ready


class Decode(_Side):
    def __init__(self, worker_id: str = "decode-0", **options: Any) -> None:
        super().__init__(worker_id, **options)
        self.lost: list[tuple[tuple[RequestId, int], NeuronDiError]] = []
        for rank in range(self.pool.layout.num_ranks):
            self.pool.tensor(rank).fill_(-1.0)

    def buffer(self, prefill: Prefill) -> RecvBuffer:
        return self.connector.maybe_setup_buffer(prefill.address)

    async def lookup(
        self,
        prefill: Prefill,
        request_id: RequestId = R,
        attempt: int = 0,
        timeout_s: float = WAIT_S,
    ) -> Ready:
        return await self.buffer(prefill).lookup(
            request_id, attempt, Deadline.after(timeout_s), self.on_lost
        )

    def on_lost(self, key: tuple[RequestId, int], error: NeuronDiError) -> None:
        self.lost.append((key, error))

    async def hand_over(
        self, prefill: Prefill, block_ids: list[int], request_id: RequestId = R
    ) -> TransferToken:
        ready = await self.lookup(prefill, request_id)
        pulled = self.buffer(prefill).pull(ready, [BlockId(n) for n in block_ids])
        return await end_of(pulled)


class BareDecode:
    """A decode worker's socket in the hands of a test. With `keys` it encrypts."""

    def __init__(
        self,
        prefill: Prefill,
        identity: bytes | None = None,
        *,
        incarnation: Incarnation | None = None,
        keys: SignalKeys | None = None,
    ) -> None:
        self.prefill = prefill
        self.incarnation = incarnation or new_incarnation()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity or f"{self.incarnation}.1".encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            expected = prefill.address.signal_key
            assert expected is not None
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, expected.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._socket.connect(f"tcp://127.0.0.1:{prefill.buffer.port}")
        self._num_pings = 1000

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def send_raw(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def send(self, message: Any) -> None:
        self.send_raw(encode_msgpack(message))

    async def receive(self) -> Any:
        received: list[bytes] = []

        def has_come() -> bool:
            try:
                received.extend(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return False
            return True

        await until(has_come)
        (frame,) = received
        return from_prefill_decoder.decode(frame)

    async def ask(self, message: Any) -> Any:
        self.send(message)
        return await self.receive()

    async def shake_hands(self, **fields: Any) -> Any:
        local = self.prefill.local
        handshake = {
            "version": SIGNAL_VERSION,
            "worker_id": WorkerId("bare"),
            "incarnation": self.incarnation,
            "expects": local.incarnation,
            "model_digest": local.model_digest,
            "layout_digest": local.exchange_digest,
            **fields,
        }
        return await self.ask(Handshake(**handshake))

    async def exchange_maps(self) -> Any:
        """As a worker does that can be reached as the prefill worker itself can."""
        local = self.prefill.local
        return await self.ask(
            KvMapInit(
                layout=layout_fields(local.layout),
                offers=self.prefill.lanes.offers(local.incarnation),
            )
        )

    async def connect(self) -> None:
        """All that comes before the first request."""
        assert isinstance(await self.shake_hands(), Welcome)
        assert isinstance(await self.exchange_maps(), KvMap)

    async def lookup(self, request_id: RequestId = R, attempt: int = 0) -> Any:
        return await self.ask(LookupAll(request_id=request_id, attempt=attempt))

    async def answers(self, *messages: Any) -> list[Any]:
        """Say these, and hear all that is said until everything has been answered."""
        self._num_pings += 1
        for message in (*messages, Ping(sequence=self._num_pings)):
            self.send(message)
        heard: list[Any] = []
        while (answer := await self.receive()) != Pong(sequence=self._num_pings):
            heard.append(answer)
        return heard

    def hears_nothing(self) -> bool:
        return not self._socket.poll(0)
