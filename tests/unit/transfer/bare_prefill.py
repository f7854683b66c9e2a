"""A bare prefill worker that says whatever it likes."""

from typing import Any, Self

import zmq
from transfer_kit import kv_map, until

from neuron_di.types import WorkerId
from neuron_di.wire import (
    Handshake,
    KvMapInit,
    PeerAddress,
    Region,
    Welcome,
    encode_msgpack,
    from_decode_decoder,
)


class BarePrefill:
    """A prefill worker's socket in the hands of a test: it shakes hands, then says what it may."""

    def __init__(self, region: Region) -> None:
        self.incarnation = region.incarnation
        self._region = region
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = PeerAddress(
            worker_id=WorkerId("prefill-0"),
            incarnation=self.incarnation,
            signal_host="127.0.0.1",
            signal_port=port,
        )
        self.heard: list[Any] = []
        self._identity = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def send_raw(self, *frames: bytes) -> None:
        self._socket.send_multipart([self._identity, *frames])

    def send(self, message: Any) -> None:
        self.send_raw(encode_msgpack(message))

    async def hear(self, kind: type) -> Any:
        """Wait for a message of this kind; the handshake is answered on the way."""
        found: list[Any] = []

        def has_come() -> object:
            try:
                self._identity, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            message = from_decode_decoder.decode(frame)
            self.heard.append(message)
            if isinstance(message, Handshake):
                self.send(
                    Welcome(
                        status="ok",
                        timestamp=0.0,
                        worker_id=WorkerId("prefill-0"),
                        incarnation=self.incarnation,
                    )
                )
            elif isinstance(message, KvMapInit):
                self.send(kv_map(self._region))
            if isinstance(message, kind):
                found.append(message)
            return found

        await until(has_come)
        return found[0]
