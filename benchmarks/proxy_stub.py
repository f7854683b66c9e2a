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
from functools import partial
from typing import Any

import uvloop

from neuron_di.clock import until_tick_s
from neuron_di.types import Incarnation, Role, WorkerId
from neuron_di.wire import (
    PROTOCOL_VERSION,
    Finished,
    LegEvent,
    LegReceipt,
    Parked,
    Released,
    WorkerRecord,
    WorkerStatus,
    encode_json,
)
from neuron_di.wire.leg_link import (
    ALIVE_INTERVAL_S,
    FROM_PROXY_BYTES_MAX,
    MAGIC,
    CloseLeg,
    FrameReader,
    LegKind,
    OpenLeg,
    Told,
    encode_frame,
    from_proxy_decoder,
)

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


class HandOvers:
    """What the two workers of leg links have of each other: they are one process."""

    def __init__(self) -> None:
        self.parked: dict[bytes, Callable[[], None]] = {}  # what releases it
        self.waiting: dict[bytes, Callable[[], None]] = {}  # decode legs that came first


class LinkWorker(asyncio.Protocol):
    """One connection of our proxy: a leg link, or a GET of the worker's status.

    As bare as `HttpWorker`, whose events are a template, too: what a real worker spends on its end
    of a link, or on HTTP, is not what is measured. What all its legs say at one tick is one frame.
    """

    def __init__(self, ticker: Ticker, hand_overs: HandOvers, status: WorkerStatus) -> None:
        self._ticker = ticker
        self._hand_overs = hand_overs
        self._status = status
        self._frames = FrameReader(FROM_PROXY_BYTES_MAX)
        self._is_link = False
        self._keys: dict[int, bytes] = {}
        self._running: dict[int, list[int]] = {}  # leg -> the last index said, the last to say
        self._tokens: list[bytes] = []
        self._events: list[tuple[int, LegEvent]] = []
        self._alive: asyncio.TimerHandle | None = None
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ticker.add(self, self._step)

    def connection_lost(self, _: Exception | None) -> None:
        self._ticker.remove(self)
        if self._alive is not None:
            self._alive.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._is_link:
            if not data.startswith(MAGIC):
                self._transport.write(_document(encode_json(self._status)))
                return
            self._is_link = True
            self._say_alive()
            data = data[len(MAGIC) :]
        for payload in self._frames.feed(data):
            said = from_proxy_decoder.decode(payload)
            if isinstance(said, OpenLeg):
                self._open(said.number, said.kind, said.document)
            elif isinstance(said, CloseLeg):
                self._close(said.number)

    def _open(self, number: int, kind: LegKind, document: bytes) -> None:
        found = _REQUEST_ID.search(document, 0, 300)
        assert found is not None, "every leg begins with its id"
        key = self._keys[number] = found[0]
        # Behind the prompt, which may be long.
        at = document.rfind(b'"max_tokens":')
        num_tokens = int(_MAX_TOKENS.match(document, at)[1]) if at >= 0 else 16  # type: ignore[index]
        if kind == "prefill":
            asyncio.get_running_loop().call_later(PREFILL_S, self._prefilled, number, num_tokens)
            return

        def start() -> None:
            self._running[number] = [0, num_tokens - 1]

        if (release := self._hand_overs.parked.pop(key, None)) is not None:
            start()
            release()
        else:
            self._hand_overs.waiting[key] = start

    def _close(self, number: int) -> None:
        self._running.pop(number, None)
        if (key := self._keys.pop(number, None)) is not None:
            self._hand_overs.parked.pop(key, None)
            self._hand_overs.waiting.pop(key, None)

    def _prefilled(self, number: int, num_tokens: int) -> None:
        if (key := self._keys.get(number)) is None:
            return
        self._tokens.append(_token(number, 0))
        if num_tokens == 1:
            self._over(number, finished(1))
        else:
            self._events.append((number, Parked(num_prompt=1)))
            start = self._hand_overs.waiting.pop(key, None)
            if start is not None:
                start()
                self._over(number, Released(receipt=receipt("prefill")))
            else:
                self._hand_overs.parked[key] = lambda: self._release(number)
        self._send()

    def _release(self, number: int) -> None:
        self._over(number, Released(receipt=receipt("prefill")))
        self._send()

    def _step(self) -> bool:
        for number, indexes in list(self._running.items()):
            indexes[0] += 1
            index, last = indexes
            self._tokens.append(_token(number, index))
            if index == last:
                del self._running[number]
                self._over(number, finished(last + 1))
        if self._tokens:
            self._send()
        return False

    def _over(self, number: int, event: LegEvent) -> None:
        self._keys.pop(number, None)
        self._events.append((number, event))

    def _send(self) -> None:
        self._transport.write(_told(self._tokens, self._events))
        self._tokens, self._events = [], []

    def _say_alive(self) -> None:
        self._transport.write(encode_frame(Told([], [], self._status)))
        loop = asyncio.get_running_loop()
        self._alive = loop.call_later(until_tick_s(ALIVE_INTERVAL_S), self._say_alive)


def _token(number: int, index: int) -> bytes:
    """A `PlainToken` in msgpack, made as an event of `HttpWorker` is; its id is its index."""
    return b"\x94%b%b%b\xb5%b" % (_unsigned(number), _unsigned(index), _unsigned(index), stamp())


def _unsigned(value: int) -> bytes:
    return _UNSIGNED[value] if value < len(_UNSIGNED) else b"\xce%b" % value.to_bytes(4)


_UNSIGNED = [bytes([value]) for value in range(0x80)]
_UNSIGNED += [bytes([0xCC, value]) for value in range(0x80, 0x100)]
_NO_EVENTS = b"\x90\xc0"


def _told(tokens: list[bytes], events: list[tuple[int, LegEvent]]) -> bytes:
    """A frame of these: `encode_frame(Told(tokens, events))`."""
    rest = bytes(encode_frame(Told([], events))[6:]) if events else _NO_EVENTS
    count = len(tokens)
    start = bytes([0x93, 0x90 + count]) if count < 16 else b"\x93\xdd%b" % count.to_bytes(4)
    payload = b"".join((start, *tokens, rest))
    return len(payload).to_bytes(4) + payload


def receipt(role: Any) -> LegReceipt:
    # As a real one's: a pair whose receipts do not say how KV came fails the proxy's self-test.
    return LegReceipt(
        worker_id=WorkerId(role), role=role, pid=1, link="stub", form="direct", kv_bytes=1
    )


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
        transfer=["stub"],
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
        make_http = partial(HttpWorker, ticker, is_decode=is_decode)
        await loop.create_server(make_http, "127.0.0.1", port, backlog=BACKLOG)
    hand_overs = HandOvers()
    roles: tuple[Role, Role] = ("prefill", "decode")
    for port, role in zip(link_ports, roles, strict=True):
        make_link = partial(LinkWorker, ticker, hand_overs, status(role, port))
        await loop.create_server(make_link, "127.0.0.1", port, backlog=BACKLOG)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    uvloop.run(_serve(settings["tick_s"], settings["http_ports"], settings["link_ports"]))
