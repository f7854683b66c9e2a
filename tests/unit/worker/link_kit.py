"""A proxy's end of a leg link, byte by byte."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

from worker_record import make_record

from neuron_di.types import WorkerId
from neuron_di.wire import WorkerStatus
from neuron_di.wire.leg_link import (
    FROM_WORKER_BYTES_MAX,
    MAGIC,
    FrameReader,
    FromProxy,
    Told,
    encode_frame,
    told_decoder,
)
from neuron_di.worker.leg_link_server import LegLinkServer, OpenHere, Say, Status

WAIT_S = 10.0


class RawLink:
    """Connected while entered. `next` passes over the frames that only say `alive`."""

    def __init__(self, port: int, *, greeting: bytes = MAGIC) -> None:
        self._port = port
        self._greeting = greeting
        self._frames = FrameReader(FROM_WORKER_BYTES_MAX)
        self._told: list[Told] = []

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.writer.write(self._greeting)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(self, *messages: FromProxy) -> None:
        self.writer.write(b"".join(encode_frame(message) for message in messages))

    async def next_frame(self) -> Told:
        async with asyncio.timeout(WAIT_S):
            while not self._told:
                data = await self.reader.read(1 << 16)
                if not data:
                    raise ConnectionResetError("the worker ended the link")
                self._told += [told_decoder.decode(each) for each in self._frames.feed(data)]
        return self._told.pop(0)

    async def next(self) -> Told:
        while True:
            told = await self.next_frame()
            if told.tokens or told.events:
                return told

    async def is_ended(self) -> bool:
        """True once the worker has ended the link; waits for it."""
        try:
            while True:
                await self.next_frame()
        except ConnectionError:
            return True


class CountingTransport:
    """A transport that counts writes."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.num_writes = 0

    def write(self, data: bytes) -> None:
        self.num_writes += 1
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class OpenedLeg:
    """A leg as whoever answers it sees it."""

    def __init__(self, kind: str, document: bytes, say: Say) -> None:
        self.kind = kind
        self.document = document
        self.say = say
        self.ended = asyncio.Event()


class LinkServer:
    """The worker's end of links alone: every leg is handed to the test, through `legs`."""

    def __init__(
        self,
        *,
        open_here: OpenHere | None = None,
        status: Status = lambda: None,
    ) -> None:
        self.legs: list[OpenedLeg] = []
        self._opened = asyncio.Event()
        self.server = LegLinkServer(open_here or self._open, asyncio.Protocol, status)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self.server, "127.0.0.1", 0)
        self.port = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()
        self.server.close()

    async def num_opened(self, count: int) -> list[OpenedLeg]:
        async with asyncio.timeout(WAIT_S):
            while len(self.legs) < count:
                self._opened.clear()
                await self._opened.wait()
        return self.legs

    def _open(self, kind: str, document: bytes, say: Say) -> Callable[[], None]:
        leg = OpenedLeg(kind, document, say)
        self.legs.append(leg)
        self._opened.set()
        return leg.ended.set


def make_status(**changes: object) -> WorkerStatus:
    """What some worker says of itself."""
    record = make_record(worker_id=WorkerId("w"), role="both")
    counts: dict[str, object] = {
        "num_blocks": 4,
        "num_blocks_free": 3,
        "num_waiting": 0,
        "num_running": 0,
        "num_transferring": 0,
        "num_steps": 0,
    }
    return WorkerStatus(record=record, **(counts | changes))  # type: ignore[arg-type]


async def next_status(link: RawLink) -> WorkerStatus:
    """What the next frame that says how the worker is says."""
    while (told := await link.next_frame()).status is None:
        assert (told.tokens, told.events) == ([], [])
    return told.status
