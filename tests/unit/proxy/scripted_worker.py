"""A worker that speaks the leg protocol over real HTTP and says what a test tells it to."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

import msgspec
from aiohttp import web

from neuron_di.types import Incarnation, Role, WorkerId
from neuron_di.wire import (
    PROTOCOL_VERSION,
    DecodeLeg,
    Finished,
    LegEvent,
    LegReceipt,
    Parked,
    PrefillLeg,
    Released,
    Token,
    TokenLogprobs,
    WorkerRecord,
    WorkerStatus,
    decode_leg_decoder,
    encode_json,
    prefill_leg_decoder,
)
from neuron_di_proxy.self_test import ID_PREFIX

MODEL = "tiny"
WORDS = ["Once", " upon", " a", " time", ",", " there", " was", " a", " fox", "."]


class SeenLeg:
    """One leg as the worker received it. `closed` is set when the proxy hangs up early."""

    def __init__(self, request: web.Request, message: PrefillLeg | DecodeLeg) -> None:
        self.message = message
        self.closed = asyncio.Event()
        self.ended = asyncio.Event()
        self._request = request
        self._response: web.StreamResponse | None = None

    async def send(self, *events: LegEvent) -> None:
        await self.send_bytes(b"".join(encode_json(event) + b"\n" for event in events))

    async def send_bytes(self, raw: bytes) -> None:
        if self._response is None:
            await self.answer_with(200)
        assert self._response is not None
        await self._response.write(raw)

    async def answer_with(self, status: int) -> None:
        self._response = web.StreamResponse(status=status)
        self._response.content_type = "application/x-ndjson"
        await self._response.prepare(self._request)

    async def finish(self, *events: LegEvent) -> None:
        """Send the last events and end the answer."""
        await self.send(*events)
        self.ended.set()

    @property
    def first_index(self) -> int:
        """The index of the first token that a prefill or whole leg owes."""
        message = self.message
        if isinstance(message, DecodeLeg):
            return message.num_emitted
        return len(message.emitted)

    @property
    def is_self_test(self) -> bool:
        return self.message.request_id.startswith(ID_PREFIX)

    def hang_up(self) -> None:
        assert self._request.transport is not None
        self._request.transport.abort()

    @property
    def response(self) -> web.StreamResponse:
        assert self._response is not None, "nothing was sent on this leg"
        return self._response


Script = Callable[[SeenLeg], Awaitable[None]]


class ScriptedWorker:
    """Runs `script` for each leg; without one, hands legs to the test through `next_leg`.

    Self tests are played by `self_test`, and kept from the test. While `is_frozen` it accepts
    connections and says nothing of how it is.
    """

    def __init__(self, worker_id: str, role: Role, script: Script | None = None) -> None:
        self.worker_id = WorkerId(worker_id)
        self.role = role
        self.script = script
        self.legs: list[SeenLeg] = []
        self._unseen: asyncio.Queue[SeenLeg] = asyncio.Queue()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self.self_test: Script = play_prefill if role == "prefill" else play_decode(2)
        self.self_tests: list[SeenLeg] = []
        self.num_asked = 0
        self.says: dict[str, object] = {}  # of its status, other than usual
        self.record: WorkerRecord

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=32 << 20)
        app.router.add_post("/legs/{kind}", self._leg)
        app.router.add_get("/status", self._status)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.record = make_record(self.worker_id, self.role, self._runner.addresses[0][1])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self._runner.cleanup()

    def freeze(self) -> None:
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def restart(self) -> None:
        """Another process answers at the same address from now on."""
        life = Incarnation(f"{self.record.incarnation}+")
        self.record = msgspec.structs.replace(self.record, incarnation=life)

    async def next_leg(self) -> SeenLeg:
        return await self._unseen.get()

    async def _leg(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        is_decode = request.match_info["kind"] == "decode"
        decoder = decode_leg_decoder if is_decode else prefill_leg_decoder
        leg = SeenLeg(request, decoder.decode(body))
        if leg.is_self_test:
            self.self_tests.append(leg)
            await self.self_test(leg)
            return leg.response
        self.legs.append(leg)
        self._unseen.put_nowait(leg)
        try:
            if self.script is None:
                await leg.ended.wait()
            else:
                await self.script(leg)
        except (asyncio.CancelledError, ConnectionError):
            leg.closed.set()
            raise
        return leg.response

    async def _status(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        await self._thawed.wait()
        status = WorkerStatus(
            record=self.record,
            num_blocks=64,
            num_blocks_free=60,
            num_waiting=0,
            num_running=1,
            num_transferring=0,
            num_steps=7,
        )
        status = msgspec.structs.replace(status, **self.says)
        return web.Response(body=encode_json(status))


def make_record(
    worker_id: str, role: Role, api_port: int = 1, *, model: str = MODEL, **changes: object
) -> WorkerRecord:
    fields: dict[str, object] = {
        "protocol_version": PROTOCOL_VERSION,
        "worker_id": WorkerId(worker_id),
        "incarnation": Incarnation(f"{worker_id}-life"),
        "role": role,
        "state": "ready",
        "pid": 1,
        "model": model,
        "model_digest": "weights",
        "layout_digest": "layout",
        "context_tokens": 2048,
        "host": "127.0.0.1",
        "api_port": api_port,
        "signal_host": "127.0.0.1",
        "signal_port": 9,
        "started_unix_s": 0.0,
    }
    return WorkerRecord(**(fields | changes))  # type: ignore[arg-type]


def token(index: int, text: str | None = None, logprobs: TokenLogprobs | None = None) -> Token:
    return Token(
        index=index,
        token_id=100 + index,
        text=WORDS[index] if text is None else text,
        logprobs=logprobs,
    )


def receipt(worker_id: str, role: Role, **changes: object) -> LegReceipt:
    return LegReceipt(
        worker_id=WorkerId(worker_id),
        role=role,
        pid=1,
        **changes,  # type: ignore[arg-type]
    )


def finished(num_generated: int, worker_id: str = "d1", reason: str = "length") -> Finished:
    return Finished(
        reason=reason,  # type: ignore[arg-type]
        num_prompt=5,
        num_generated=num_generated,
        receipt=receipt(worker_id, "decode", kv_bytes=4096, transfer_s=0.25),
    )


def parked() -> Parked:
    return Parked(num_prompt=5)


def released(worker_id: str = "p1") -> Released:
    return Released(receipt=receipt(worker_id, "prefill", num_prompt=5, kv_bytes=4096))


async def play_prefill(leg: SeenLeg) -> None:
    """The first token that is due, then the KV is handed over."""
    await leg.send(token(leg.first_index), parked(), released())


def play_decode(num_generated: int) -> Script:
    """What remains of `num_generated` tokens, one event at a time."""

    async def script(leg: SeenLeg) -> None:
        for index in range(leg.first_index + 1, num_generated):
            await leg.send(token(index))
        await leg.send(finished(num_generated))

    return script
