"""The client of the proxy benchmark, in a process of its own: streams that never pause.

Each stream is a connection that is kept, asks for a completion, reads it to its end and asks again,
so often as it was told. Every token's text is the moment at which a stub worker made it.

What comes in is read with one search per packet: the client must not be what is measured.
"""

import asyncio
import gc
import json
import math
import re
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop

LATE_S = 1.0  # a token that travelled for longer makes its stream a late one
CHARS_PER_TOKEN = 4

_STAMP = re.compile(rb"~(\d{19})~")
_STAMP_BYTES = 21
_OK = b"HTTP/1.1 200"
_END = b"0\r\n\r\n"
_DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. Each of `streams` connections asks `requests` times."""

    port: int
    streams: int
    requests: int
    reply_tokens: int
    prompt_tokens: int
    timeout_s: float

    def request(self) -> bytes:
        body = json.dumps(
            {
                "model": "stub",
                "max_tokens": self.reply_tokens,
                "temperature": 0,
                "stream": True,
                "prompt": "word" * (self.prompt_tokens * CHARS_PER_TOKEN // 4),
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass(slots=True)
class Seen:
    """What came back. Times are nanoseconds; `tokens` is how many came, wherever they belong."""

    tokens: int = 0
    complete: int = 0  # streams that ended as they should, with every token
    short: int = 0  # ended as they should, with fewer or more tokens
    cut: int = 0  # did not end as they should
    refused: int = 0  # answered with another status
    late: int = 0  # complete or not, with a token that was late; or not over in time
    wall_s: float = 0.0
    client_cpu_s: float = 0.0
    travel_ns: dict[str, int] = field(default_factory=dict)
    first_ns: dict[str, int] = field(default_factory=dict)


class Stream(asyncio.Protocol):
    """One connection."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._transport: Any = None
        self._begin()
        self.num_left = run.load.requests

    def _begin(self) -> None:
        self._tail = b""
        self._num_tokens = 0
        self._has_begun = self._is_late = self._is_refused = self._is_done = False
        self._sent_ns = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def ask(self) -> None:
        """Send a request, unless one runs or the connection is just being made anew."""
        if self._sent_ns or self._transport.is_closing():
            return
        self._begin()
        self._sent_ns = time.monotonic_ns()
        self._transport.write(self._run.request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        data = self._tail + data
        if not self._has_begun:
            if len(data) < len(_OK):
                self._tail = data
                return
            self._has_begun = True
            self._is_refused = not data.startswith(_OK)
        read = 0
        for found in _STAMP.finditer(data):
            read = found.end()
            if self._num_tokens == 0:
                self._run.first_ns.append(now_ns - self._sent_ns)
            self._num_tokens += 1
            travel_ns = now_ns - int(found[1])
            self._run.travel_ns.append(travel_ns)
            self._is_late |= travel_ns > LATE_S * 1e9
        self._is_done |= _DONE in data
        # A stamp or an end that this packet has only half of.
        self._tail = data[max(read, len(data) - _STAMP_BYTES) :]
        if (self._is_done and data.endswith(_END)) or (self._is_refused and self._is_whole(data)):
            self._end()

    def connection_lost(self, _: Exception | None) -> None:
        if self._sent_ns:
            self._end(is_cut=not self._is_done)
        elif self.num_left:
            self._run.reconnect(self)

    def _is_whole(self, data: bytes) -> bool:
        return data.endswith((b"}", b"}\n", _END))

    def _end(self, *, is_cut: bool = False) -> None:
        seen, is_full = self._run.seen, self._num_tokens == self._run.load.reply_tokens
        seen.tokens += self._num_tokens
        seen.late += self._is_late
        if self._is_refused:
            seen.refused += 1
        elif is_cut:
            seen.cut += 1
        elif is_full:
            seen.complete += 1
        else:
            seen.short += 1
        self._sent_ns = 0
        self.num_left -= 1
        if self.num_left == 0:
            self._run.over()
        elif self._transport.is_closing():
            self._run.reconnect(self)
        else:
            self.ask()


class Run:
    """All streams of one load."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.request = load.request()
        self.seen = Seen()
        self.travel_ns = array("q")
        self.first_ns = array("q")
        self.connections: list[asyncio.Transport] = []
        self._num_running = load.streams
        self._all_over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self) -> Seen:
        streams = [Stream(self) for _ in range(self.load.streams)]
        for stream in streams:
            await self._connect(stream)
        begun_s, begun_cpu_s = time.monotonic(), time.process_time()
        for stream in streams:
            stream.ask()
        try:
            async with asyncio.timeout(self.load.timeout_s):
                await self._all_over.wait()
        except TimeoutError:
            self.seen.late += sum(stream.num_left > 0 for stream in streams)
        self.seen.wall_s = time.monotonic() - begun_s
        self.seen.client_cpu_s = time.process_time() - begun_cpu_s
        self.seen.travel_ns = _summary(self.travel_ns)
        self.seen.first_ns = _summary(self.first_ns)
        return self.seen

    def over(self) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self._all_over.set()

    def reconnect(self, stream: Stream) -> None:
        async def again() -> None:
            await self._connect(stream)
            stream.ask()

        task = asyncio.create_task(again())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, stream: Stream) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: stream, "127.0.0.1", self.load.port)
        self.connections.append(transport)


def _summary(values: Sequence[int]) -> dict[str, int]:
    if not values:
        return {}
    ordered = sorted(values)

    def rank(percent: float) -> int:
        return ordered[math.ceil(len(ordered) * percent / 100) - 1]

    return {"p50": rank(50), "p99": rank(99), "most": ordered[-1]}


async def _main(load: Load) -> Seen:
    gc.disable()
    return await Run(load)()


if __name__ == "__main__":
    print(json.dumps(asdict(uvloop.run(_main(Load(**json.loads(sys.argv[1])))))))
