"""A TCP relay between a test's two ends: it keeps what passes, and can break what it relays."""

import asyncio
import contextlib
from typing import Self


class TcpRelay:
    """Relays to a port of loopback while entered. `seen` is all that passed, both ways."""

    def __init__(self, port: int) -> None:
        self._to_port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.seen = bytearray()
        self.num_connections = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Break every connection, without a goodbye."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward = await asyncio.open_connection("127.0.0.1", self._to_port)
        self._writers += [writer, onward]
        self.num_connections += 1
        for source, target in ((reader, onward), (onward_reader, writer)):
            task = asyncio.create_task(self._copy(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await source.read(1 << 16):
                self.seen += piece
                target.write(piece)
        target.close()
        with contextlib.suppress(ConnectionError):
            await target.wait_closed()
