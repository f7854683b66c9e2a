"""Workers that compute nothing: one prefill and one decode worker, for any proxy.

Step-synchronous, as continuous batching is: every tick each open stream gets its next token. A
token's text is the moment at which it was made, so that a client sees how long it travelled. The
first token of an answer is made PREFILL_S after its request came, and not at a tick: so the time to
it shows what a proxy adds.

Two pairs of ports, one pair for proxies that speak HTTP to workers, and one for our own:

    HTTP prefill, HTTP decode    what vLLM and SGLang servers answer, as SSE events
    link prefill, link decode    our leg links, and GET /status for static mode
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import uvloop
from aiohttp import web

from neuron_di.types import Incarnation, Role, WorkerId
from neuron_di.wire import (
    PROTOCOL_VERSION,
    Finished,
    LegReceipt,
    Parked,
    Released,
    Token,
    WorkerRecord,
    WorkerStatus,
    encode_json,
)
from neuron_di.wire.leg_link import LegKind
from neuron_di.worker.leg_link_server import End, LegLinkServer, Say

MODEL = "stub"
CONTEXT_TOKENS = 1 << 20
SLOTS = 8192
BACKLOG = 4096
PREFILL_S = 0.01

_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d+)')
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_REQUEST_ID = re.compile(rb'"request_id":"([^"]+)","attempt":(\d+)')

# About 190 bytes, as the events of real servers.
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"stub","choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":null}]}\n\n'
)
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_PREFILLED = json.dumps(
    {
        "id": "cmpl-0123456789abcdef",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [{"index": 0, "text": "x", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "stub",
            "remote_block_ids": [1],
            "remote_host": "127.0.0.1",
            "remote_port": 1,
        },
    }
).encode()
# Whatever a router asks before it trusts a worker.
_ABOUT = json.dumps(
    {"status": "ok", "model_path": MODEL, "object": "list", "data": [{"id": MODEL}]}
).encode()


def stamp() -> bytes:
    """A token's text: now, on the clock of every process of this machine."""
    return b"~%019d~" % time.monotonic_ns()


class Ticker:
    """Gives every running stream its turn, once per tick."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._streams: dict[object, Callable[[], bool]] = {}
        self._loop = asyncio.get_running_loop()
        self._next_s = self._loop.time() + tick_s
        self._loop.call_at(self._next_s, self._tick)

    def add(self, key: object, step: Callable[[], bool]) -> None:
        """Call `step` each tick until it says True."""
        self._streams[key] = step

    def remove(self, key: object) -> None:
        self._streams.pop(key, None)

    def _tick(self) -> None:
        for key in [key for key, step in self._streams.items() if step()]:
            self._streams.pop(key, None)
        self._next_s = max(self._next_s + self._tick_s, self._loop.time())
        self._loop.call_at(self._next_s, self._tick)


class HttpWorker(asyncio.Protocol):
    """One connection of a proxy that speaks HTTP. One request at a time."""

    def __init__(self, ticker: Ticker, *, is_decode: bool) -> None:
        self._ticker = ticker
        self._is_decode = is_decode
        self._received = bytearray()
        self._num_left = 0
        self._first: asyncio.TimerHandle | None = None
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        self._ticker.remove(self)
        if self._first is not None:
            self._first.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._received, 0, end + 2)
            total = end + 4 + (int(length[1]) if length else 0)
            if len(self._received) < total:
                return
            request = bytes(self._received[:total])
            del self._received[:total]
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        edges = request[:2000] + request[-600:]  # not through the prompt, which may be long
        if not request.startswith(b"POST"):
            self._transport.write(_document(_ABOUT))
        elif not self._is_decode and not _STREAM.search(edges):
            self._transport.write(_document(_PREFILLED))
        else:
            num_tokens = _MAX_TOKENS.search(edges)
            self._num_left = int(num_tokens[1]) if num_tokens and self._is_decode else 1
            self._transport.write(_STREAM_HEAD)
            if self._is_decode:
                self._first = asyncio.get_running_loop().call_later(PREFILL_S, self._begin)
            else:
                self._begin()

    def _begin(self) -> None:
        if not self._step():
            self._ticker.add(self, self._step)

    def _step(self) -> bool:
        event = _EVENT % stamp()
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        self._num_left -= 1
        self._transport.write(chunk if self._num_left else chunk + _DONE)
        return self._num_left == 0


def _document(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


class LinkWorkers:
    """Our prefill and decode worker, in one process: a hand-over is an entry in a table."""

    def __init__(self, ticker: Ticker) -> None:
        self._ticker = ticker
        self._parked: dict[bytes, Callable[[], None]] = {}  # what releases it
        self._waiting: dict[bytes, Callable[[], None]] = {}  # decode legs that came first

    def open(self, kind: LegKind, document: bytes, say: Say) -> End:
        found = _REQUEST_ID.search(document, 0, 300)
        assert found is not None, "every leg begins with its id"
        key = found[0]
        # Behind the prompt, which may be long.
        at = document.rfind(b'"max_tokens":')
        num_tokens = int(_MAX_TOKENS.match(document, at)[1]) if at >= 0 else 16  # type: ignore[index]
        if kind == "prefill":
            return self._prefill(key, num_tokens, say)
        self._decode(key, num_tokens, say)

        def end() -> None:
            self._ticker.remove(key)
            self._waiting.pop(key, None)

        return end

    def _prefill(self, key: bytes, num_tokens: int, say: Say) -> End:
        def first() -> None:
            say(Token(index=0, token_id=0, text=stamp().decode()))
            if num_tokens == 1:
                say(finished(1))
                return
            say(Parked(num_prompt=1))
            self._parked[key] = lambda: say(Released(receipt=receipt("prefill")))
            if (start := self._waiting.pop(key, None)) is not None:
                start()

        timer = asyncio.get_running_loop().call_later(PREFILL_S, first)

        def end() -> None:
            timer.cancel()
            self._parked.pop(key, None)

        return end

    def _decode(self, key: bytes, num_tokens: int, say: Say) -> None:
        index = 0

        def step() -> bool:
            nonlocal index
            index += 1
            say(Token(index=index, token_id=index, text=stamp().decode()))
            if index < num_tokens - 1:
                return False
            say(finished(num_tokens))
            return True

        def start() -> None:
            if (release := self._parked.pop(key, None)) is not None:
                release()
            self._ticker.add(key, step)

        if key in self._parked:
            start()
        else:
            self._waiting[key] = start


def receipt(role: Any) -> LegReceipt:
    # A self test asks whether KV was moved.
    return LegReceipt(worker_id=WorkerId(role), role=role, pid=1, link="stub", kv_bytes=1)


def finished(num_tokens: int) -> Finished:
    return Finished(
        reason="length", num_prompt=1, num_generated=num_tokens, receipt=receipt("decode")
    )


def status(role: Role, port: int) -> WorkerStatus:
    record = WorkerRecord(
        protocol_version=PROTOCOL_VERSION,
        worker_id=WorkerId(role),
        incarnation=Incarnation(role),
        role=role,
        state="ready",
        pid=1,
        model=MODEL,
        model_digest="stub",
        layout_digest="stub",
        context_tokens=CONTEXT_TOKENS,
        host="127.0.0.1",
        api_port=port,
        signal_host="127.0.0.1",
        signal_port=1,
        started_unix_s=0.0,
        slots=SLOTS,
        num_vocab=1 << 17,
    )
    return WorkerStatus(
        record=record,
        num_blocks=1,
        num_blocks_free=1,
        num_waiting=0,
        num_running=0,
        num_transferring=0,
        num_steps=0,
    )


async def _serve(tick_s: float, http_ports: list[int], link_ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    ticker = Ticker(tick_s)
    for port, is_decode in zip(http_ports, (False, True), strict=True):
        await loop.create_server(
            lambda is_decode=is_decode: HttpWorker(ticker, is_decode=is_decode),
            "127.0.0.1",
            port,
            backlog=BACKLOG,
        )
    workers = LinkWorkers(ticker)
    roles: tuple[Role, Role] = ("prefill", "decode")
    for port, role in zip(link_ports, roles, strict=True):
        said = status(role, port)
        body = encode_json(said)

        async def answer(_: web.Request, body: bytes = body) -> web.Response:
            return web.Response(body=body, content_type="application/json")

        app = web.Application()
        app.router.add_get("/status", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        assert runner.server is not None, "it is set up"
        links = LegLinkServer(workers.open, runner.server, lambda said=said: said)
        await loop.create_server(links, "127.0.0.1", port, backlog=BACKLOG)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    uvloop.run(_serve(settings["tick_s"], settings["http_ports"], settings["link_ports"]))
