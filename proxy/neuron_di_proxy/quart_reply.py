"""A Reply whose bytes Quart sends: for every server that speaks ASGI."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from neuron_di.errors import LocalProtocolError
from neuron_di_proxy.reply import LARGE_PIECE_BYTES, PING, UNREAD_BYTES_MAX, Headers


class QuartReply:
    """Written by the task that answers, read by the one that Quart sends from.

    A client that leaves more unread than is kept for it loses its connection.
    """

    def __init__(self, ping_interval_s: float) -> None:
        self.has_begun = False
        self.status = 0
        self.headers: Headers = []
        self.length: int | None = None
        self._ping_interval_s = ping_interval_s or None
        self._unread: deque[bytes] = deque()
        self._num_unread_bytes = 0  # of pieces that are not large
        self._is_over = False
        self._is_broken = False
        self._changed = asyncio.Event()

    def begin(
        self, status: int, headers: Headers, *, length: int | None, first: bytes = b""
    ) -> None:
        self.has_begun = True
        self.status, self.headers, self.length = status, headers, length
        self._changed.set()
        if first:
            self.write(first)

    def write(self, data: bytes) -> None:
        self._unread.append(data)
        if len(data) <= LARGE_PIECE_BYTES:
            self._num_unread_bytes += len(data)
        if self._num_unread_bytes > UNREAD_BYTES_MAX and self.length is None:
            self.abort()
        self._changed.set()

    def end(self, last: bytes = b"") -> None:
        if last:
            self.write(last)
        self._is_over = True
        self._changed.set()

    def first_lane(self, *_: object) -> None:
        """None: Quart writes."""

    def lane(self, *_: object) -> None:
        """There is none: Quart sends the bytes."""

    def abort(self) -> None:
        """Break the response off, unless it is complete: the client must see that it is not."""
        if self._is_over:
            return
        self._is_broken = True
        self._changed.set()

    async def head(self, answering: "asyncio.Task[None]") -> None:
        """Wait until the status and headers are known. Raises where `answering` never says."""
        waiting = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait((waiting, answering), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not self.has_begun:
            raise LocalProtocolError("a request was not answered")

    def whole(self) -> bytes:
        """The body of an answer that is not streamed; it is complete when its head is known."""
        return b"".join(self._unread)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The body, piece by piece, with a comment now and then where nothing comes.

        Raises ConnectionError, which ends the response early, when it was aborted.
        """
        while True:
            while self._unread and not self._is_broken:
                piece = self._unread.popleft()
                if len(piece) <= LARGE_PIECE_BYTES:
                    self._num_unread_bytes -= len(piece)
                yield piece
            if self._is_broken:
                raise ConnectionAbortedError("the answer was broken off")
            if self._is_over:
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(self._ping_interval_s):
                    await self._changed.wait()
            except TimeoutError:
                yield PING
