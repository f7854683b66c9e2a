"""Workers without an engine, and a bare decode worker that says whatever it likes."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Self

import zmq

from neuron_di.clock import Deadline, now_s
from neuron_di.errors import NeuronDiError
from neuron_di.kv import KvLayout, KvPool
from neuron_di.transfer import (
    ConnectorOptions,
    LocalWorker,
    NeuronConnector,
    RecvBuffer,
    ShmEngine,
    TransferToken,
)
from neuron_di.types import BlockId, Incarnation, RequestId, WorkerId
from neuron_di.wire import (
    SIGNAL_VERSION,
    Done,
    Handshake,
    LookupAll,
    PeerAddress,
    Ready,
    encode_msgpack,
    from_prefill_decoder,
)

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 16
WAIT_S = 20.0
R = RequestId("request-1")


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


class _Side:
    def __init__(
        self,
        worker_id: str,
        *,
        model_digest: str = "model",
        layout_digest: str = LAYOUT.digest(),
        incarnation: Incarnation | None = None,
        **options: Any,
    ) -> None:
        self.local = LocalWorker(
            worker_id=WorkerId(worker_id),
            incarnation=incarnation or new_incarnation(),
            model_digest=model_digest,
            layout_digest=layout_digest,
        )
        self.pool = KvPool.create(LAYOUT, NUM_BLOCKS, self.local.incarnation)
        self.transfer = ShmEngine(self.pool)
        self.connector = NeuronConnector(self.local, self.transfer, ConnectorOptions(**options))
        self._is_closed = False

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.connector.close()
            await asyncio.get_running_loop().run_in_executor(None, self.transfer.close)
            self.pool.close()


class Prefill(_Side):
    """Block n holds n. `ended` is what the SendBuffer said of parked requests, in order."""

    def __init__(self, worker_id: str = "prefill-0", **options: Any) -> None:
        super().__init__(worker_id, **options)
        self.ended: list[tuple[tuple[RequestId, int], Done | NeuronDiError]] = []
        self.buffer = self.connector.open_send_buffer(
            lambda key, outcome: self.ended.append((key, outcome))
        )
        tensor = self.pool.tensor()
        for block_id in range(NUM_BLOCKS):
            tensor[block_id] = block_id

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(
            worker_id=self.local.worker_id,
            incarnation=self.local.incarnation,
            signal_host="127.0.0.1",
            signal_port=self.buffer.port,
        )

    def ready(
        self, request_id: RequestId = R, block_ids: tuple[int, ...] = (3, 4), attempt: int = 0
    ) -> Ready:
        return Ready(
            request_id=request_id,
            attempt=attempt,
            prompt_ids=[5] * (4 * len(block_ids)),
            first_token=9,
            block_ids=list(block_ids),
            generations=self.pool.generations(map(BlockId, block_ids)),
            num_tokens=4 * len(block_ids),
        )

    def park(self, request_id: RequestId = R, block_ids: tuple[int, ...] = (3, 4)) -> Ready:
        ready = self.ready(request_id, block_ids)
        self.buffer.expect(request_id, 0)
        self.buffer.park(ready)
        return ready


class Decode(_Side):
    def __init__(self, worker_id: str = "decode-0", **options: Any) -> None:
        super().__init__(worker_id, **options)
        self.pool.tensor().fill_(-1.0)

    def buffer(self, prefill: Prefill) -> RecvBuffer:
        return self.connector.maybe_setup_buffer(prefill.address)

    async def lookup(self, prefill: Prefill, request_id: RequestId = R) -> Ready:
        return await self.buffer(prefill).lookup(request_id, 0, Deadline.after(WAIT_S))

    async def hand_over(
        self, prefill: Prefill, block_ids: list[int], request_id: RequestId = R
    ) -> TransferToken:
        ready = await self.lookup(prefill, request_id)
        pulled = self.buffer(prefill).pull(ready, [BlockId(n) for n in block_ids])
        return await end_of(pulled)


class BareDecode:
    """A decode worker's socket in the hands of a test."""

    def __init__(self, prefill: Prefill, identity: bytes | None = None) -> None:
        self.prefill = prefill
        self.incarnation = new_incarnation()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity or self.incarnation.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{prefill.buffer.port}")

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
            "layout_digest": local.layout_digest,
            **fields,
        }
        return await self.ask(Handshake(**handshake))

    async def lookup(self, request_id: RequestId = R) -> Any:
        return await self.ask(LookupAll(request_id=request_id, attempt=0))
