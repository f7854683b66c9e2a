"""A worker that speaks over real leg links and HTTP, and says what a test tells it to."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

import msgspec
import worker_record
from aiohttp import web

from neuron_di.types import Incarnation, Role, WorkerId
from neuron_di.wire import (
    DecodeLeg,
    Failed,
    Finished,
    LegEvent,
    LegReceipt,
    Parked,
    PrefillLeg,
    PromptReport,
    Released,
    Token,
    TokenLogprobs,
    WorkerRecord,
    WorkerStatus,
    decode_leg_decoder,
    encode_json,
    prefill_leg_decoder,
)
from neuron_di.wire.leg_link import LegKind, Told, encode_frame
from neuron_di.worker.leg_link_server import End, LegLinkServer, Say, WorkerLegLink
from neuron_di_proxy.self_test import ID_PREFIX

MODEL = "tiny"
WORDS = ["Once", " upon", " a", " time", ",", " there", " was", " a", " fox", "."]


class SeenLeg:
    """One leg as the worker received it. `closed` is set when the proxy ends it, or is gone."""

    def __init__(
        self, worker: "ScriptedWorker", kind: LegKind, message: PrefillLeg | DecodeLeg, say: Say
    ) -> None:
        self.kind = kind
        self.message = message
        self.closed = asyncio.Event()
        self.ended = asyncio.Event()
        self._worker = worker
        self._say = say
        self.task: asyncio.Task[None] | None = None

    async def send(self, *events: LegEvent) -> None:
        """Say this, and let the loop send it."""
        for event in events:
            self._say(event)
        await asyncio.sleep(0)

    async def send_bytes(self, raw: bytes) -> None:
        """Put bytes on the link, between two frames."""
        for link in self._worker.links:
            link._transport.write(raw)
        await asyncio.sleep(0)

    async def keep_alive(self) -> None:
        """Say that the worker lives, as it does by itself each second."""
        await self.send_bytes(bytes(encode_frame(Told([], []))))

    async def finish(self, *events: LegEvent) -> None:
        """Send the last events."""
        await self.send(*events)
        self.ended.set()

    async def break_off(self) -> None:
        """End this leg alone, as a worker that could not compute it; another may."""
        await self.finish(
            Failed(code="worker_failed", message="broken", http_status=500, retryable=True)
        )

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
        """Break the link: every leg at this worker ends."""
        self._worker.hang_up()

    def end(self) -> None:
        self.closed.set()
        if self.task is not None:
            self.task.cancel()


Script = Callable[[SeenLeg], Awaitable[None]]


class ScriptedWorker:
    """Runs `script` for each leg; without one, hands legs to the test through `next_leg`.

    Self tests are played by `self_test`, and kept from the test. While it is frozen it accepts
    connections and says nothing of how it is. Otherwise it does by its links, too, if it `talks`.
    """

    def __init__(
        self, worker_id: str, role: Role, script: Script | None = None, *, talks: bool = False
    ) -> None:
        self.talks = talks
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
        app = web.Application()
        app.router.add_get("/status", self._status)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        self._link_server = LegLinkServer(self._open_leg, self._runner.server, self._word)
        self._server = await asyncio.get_running_loop().create_server(
            self._link_server, "127.0.0.1", 0
        )
        port = self._server.sockets[0].getsockname()[1]
        self.record = make_record(self.worker_id, self.role, port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        self._server.close()
        self.hang_up()
        await self._runner.cleanup()

    @property
    def links(self) -> list[WorkerLegLink]:
        """One per proxy process that is connected."""
        return list(self._link_server.links)

    def hang_up(self) -> None:
        """Break every link."""
        for link in self.links:
            link._transport.abort()

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

    def _open_leg(self, kind: LegKind, document: bytes, say: Say) -> End:
        decoder = decode_leg_decoder if kind == "decode" else prefill_leg_decoder
        leg = SeenLeg(self, kind, decoder.decode(document), say)
        if leg.is_self_test:
            self.self_tests.append(leg)
            leg.task = asyncio.create_task(self._play(self.self_test, leg))
        else:
            self.legs.append(leg)
            self._unseen.put_nowait(leg)
            if self.script is not None:
                leg.task = asyncio.create_task(self._play(self.script, leg))
        return leg.end

    async def _play(self, script: Script, leg: SeenLeg) -> None:
        try:
            await script(leg)
        except Exception:  # a script that is wrong: nobody shall wait for it
            self.hang_up()
            raise

    async def _status(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        await self._thawed.wait()
        return web.Response(body=encode_json(self._status_now()))

    def _word(self) -> WorkerStatus | None:
        return self._status_now() if self.talks and self._thawed.is_set() else None

    def _status_now(self) -> WorkerStatus:
        counts = {"num_blocks_free": 60, "num_running": 1, "num_steps": 7}
        return make_status(self.record, **(counts | self.says))


def make_record(
    worker_id: str, role: Role, api_port: int = 1, *, model: str = MODEL, **changes: object
) -> WorkerRecord:
    fields: dict[str, object] = {
        "worker_id": WorkerId(worker_id),
        "incarnation": Incarnation(f"{worker_id}-life"),
        "role": role,
        "model": model,
        "transfer": ["shm@here"],
        "context_tokens": 2048,
        "slots": 1024,
    }
    return worker_record.make_record(api_port, **(fields | changes))


def make_status(record: WorkerRecord, /, **changes: object) -> WorkerStatus:
    """Of a worker that has nothing to do."""
    fields: dict[str, object] = {
        "record": record,
        "num_blocks": 64,
        "num_blocks_free": 64,
        "num_waiting": 0,
        "num_running": 0,
        "num_transferring": 0,
        "num_steps": 0,
    }
    return WorkerStatus(**(fields | changes))  # type: ignore[arg-type]


def token(
    index: int,
    text: str | None = None,
    logprobs: TokenLogprobs | None = None,
    prompt: PromptReport | None = None,
) -> Token:
    return Token(
        index=index,
        token_id=100 + index,
        text=WORDS[index] if text is None else text,
        logprobs=logprobs,
        prompt=prompt,
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
        receipt=receipt(
            worker_id, "decode", link="shm", form="direct", kv_bytes=4096, transfer_s=0.25
        ),
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
