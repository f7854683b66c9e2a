"""Orders as they come over HTTP, to a whole worker process without the process."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from worker_kit import WAIT_S

from neuron_di.config import EngineOptions, WorkerOptions
from neuron_di.types import Role
from neuron_di.wire.leg_link import MAGIC
from neuron_di.worker import Worker, load_model
from neuron_di.worker.leg_link_server import LegLinkServer
from neuron_di.worker.model import renewed
from neuron_di.worker.orders import Orders, RoleImpossible
from neuron_di.worker.role_epochs import EpochParts, run_epochs
from neuron_di.worker.server import bind, listening

ENGINE = EngineOptions(
    block_size=4, threads=1, chunk_tokens=16, prefill_batch=2, decode_batch=4, context_tokens=64
)


class Process:
    """One process' epochs on a port, in this one. `workers` are those that lived, in order."""

    def __init__(self, folder: Path) -> None:
        self.sock = bind("127.0.0.1", 0)
        self.port = self.sock.getsockname()[1]
        self.workers: list[Worker] = []
        self.failing: list[Role] = []
        self.may_assemble = asyncio.Event()  # a worker after the first
        self.may_assemble.set()
        self.between = asyncio.Event()  # nobody lives here at the moment
        self.stop = asyncio.Event()
        self._folder = str(folder)
        self._model = load_model(self._folder, None, "decode", ENGINE)
        orders = Orders(self._check, drain_timeout_s=5.0)
        parts = EpochParts(
            assemble=self._assemble,
            listening=lambda worker, orders: listening(
                worker, "127.0.0.1", self.port, orders=orders, sock=self.sock
            ),
            announced=lambda _: nullcontext(None),
        )
        self.running = asyncio.create_task(run_epochs("decode", orders, parts, self.stop))

    def _check(self, role: Role) -> None:
        if role == "both":
            raise RoleImpossible("not both")

    async def _assemble(self, role: Role) -> Worker:
        if self.workers:
            self.between.set()
            await self.may_assemble.wait()
            self._model = renewed(self._model, role)
        if role in self.failing:
            raise RuntimeError("planted")
        options = WorkerOptions(
            model=self._folder, role=role, worker_id="w", port=self.port, engine=ENGINE
        )
        self.workers.append(Worker(options, self._model))
        return self.workers[-1]


@dataclass
class Operator:
    """Gives orders to a process."""

    process: Process
    session: aiohttp.ClientSession

    async def post(self, path: str, **fields: Any) -> tuple[int, list[dict[str, Any]]]:
        async with self.session.post(path, json=fields) as response:
            return response.status, [json.loads(line) async for line in response.content]

    async def get(self, path: str) -> Any:
        async with self.session.get(path) as response:
            return await response.json()

    async def record(self) -> dict[str, Any]:
        record: dict[str, Any] = (await self.get("/status"))["record"]
        return record

    async def change_role(self, role: Role) -> dict[str, Any]:
        """The record of the worker in the new role, once it serves."""
        before = await self.record()
        await self.order_role(before["incarnation"], role)
        return await self.successor_of(before["incarnation"])

    async def order_role(self, incarnation: str, role: Role) -> None:
        _, (ticket,) = await self.post("/role/prepare", incarnation=incarnation, role=role)
        status, _ = await self.post("/role/commit", ticket=ticket["ticket"])
        assert status == 200

    async def successor_of(self, incarnation: str) -> dict[str, Any]:
        """The record of the next worker, once it serves."""
        while True:
            record = await self.record()
            if record["incarnation"] != incarnation and record["state"] == "ready":
                return record


@pytest.fixture
async def operator(llama_folder: Path) -> AsyncIterator[Operator]:
    async with _operator(llama_folder) as operator:
        yield operator


@asynccontextmanager
async def _operator(folder: Path) -> AsyncIterator[Operator]:
    process = Process(folder)
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    url = f"http://127.0.0.1:{process.port}"
    with process.sock:
        async with aiohttp.ClientSession(url, timeout=timeout) as session:
            yield Operator(process, session)
        process.stop.set()
        await asyncio.gather(process.running, return_exceptions=True)


async def test_a_change_of_role_on_the_same_port_and_weights(operator: Operator) -> None:
    before = await operator.record()
    status, (ticket,) = await operator.post(
        "/role/prepare", incarnation=before["incarnation"], role="prefill"
    )
    assert (status, ticket["before"], ticket["role"]) == (200, "decode", "prefill")
    assert await operator.get("/role") is None
    weights = operator.process.workers[0]._model.backend._weights  # type: ignore[attr-defined]
    status, lines = await operator.post("/role/commit", ticket=ticket["ticket"])
    assert (status, lines[-1]["state"]) == (200, "drained")
    after = await operator.successor_of(before["incarnation"])
    assert (after["role"], after["worker_id"], after["api_port"]) == (
        "prefill", "w", before["api_port"],
    )  # fmt: skip
    assert (await operator.get("/role"))["state"] == "changed"
    new = operator.process.workers[1]
    assert new._model.backend._weights is weights  # type: ignore[attr-defined]
    # The pool is as large as if it had been started so: two prompts of 64 tokens, not four.
    assert (new.status().num_blocks, new._model.context_tokens) == (2 * 16, 64)
    status, (again,) = await operator.post("/role/commit", ticket=ticket["ticket"])
    assert (status, again["code"]) == (409, "ticket_expired")
    status, (stale,) = await operator.post(
        "/role/prepare", incarnation=before["incarnation"], role="decode"
    )
    assert stale["code"] == "stale_incarnation"


async def test_a_role_that_fails_is_taken_back(operator: Operator) -> None:
    before = await operator.record()
    operator.process.failing = ["prefill"]
    _, (ticket,) = await operator.post(
        "/role/prepare", incarnation=before["incarnation"], role="prefill"
    )
    await operator.post("/role/commit", ticket=ticket["ticket"])
    after = await operator.successor_of(before["incarnation"])
    assert after["role"] == "decode"
    outcome = await operator.get("/role")
    assert (outcome["state"], outcome["reason"]) == ("reverted", "RuntimeError")


async def test_orders_that_are_refused(operator: Operator) -> None:
    incarnation = (await operator.record())["incarnation"]
    for path, fields, code in (
        ("/drain", {"incarnation": "other"}, "stale_incarnation"),
        ("/drain", {"incarnation": incarnation, "timeout_s": -1}, "remote_protocol_error"),
        ("/drain", {"incarnation": incarnation, "more": 1}, "remote_protocol_error"),
        ("/role/prepare", {"incarnation": incarnation, "role": "decode"}, "same_role"),
        ("/role/prepare", {"incarnation": incarnation, "role": "both"}, "role_impossible"),
        ("/role/prepare", {"incarnation": incarnation, "role": "x"}, "remote_protocol_error"),
        ("/abort", {"ticket": "none"}, "ticket_expired"),
    ):
        status, (refusal,) = await operator.post(path, **fields)
        assert (refusal["code"], status) == (code, refusal["http_status"]), path
    assert (await operator.record())["state"] == "ready"


async def test_a_drain_that_nobody_follows_is_carried_out(operator: Operator) -> None:
    incarnation = (await operator.record())["incarnation"]
    reader, writer = await asyncio.open_connection("127.0.0.1", operator.process.port)
    body = json.dumps({"incarnation": incarnation}).encode()
    writer.write(
        b"POST /drain HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    await reader.read(1)
    writer.transport.abort()
    async with asyncio.timeout(WAIT_S):
        assert await operator.process.running is True, "by order"


async def test_who_connects_during_a_change_waits_and_is_not_refused(operator: Operator) -> None:
    before = await operator.record()
    operator.process.may_assemble.clear()
    await operator.order_role(before["incarnation"], "prefill")
    await operator.process.between.wait()
    async with Raw(operator.process.port) as connection:
        asking = asyncio.create_task(connection.incarnation())
        operator.process.may_assemble.set()
        assert await asking == (await operator.record())["incarnation"] != before["incarnation"]


@pytest.mark.parametrize(
    "headers", [{"Content-Type": "text/plain"}, {"Origin": "http://127.0.0.1"}], ids=str
)
async def test_an_order_is_of_no_web_page(operator: Operator, headers: dict[str, str]) -> None:
    before = await operator.record()
    body = json.dumps({"incarnation": before["incarnation"]}).encode()
    headers = {"Content-Type": "application/json"} | headers
    for path in ("/drain/prepare", "/drain", "/role/prepare", "/role/commit", "/abort"):
        async with operator.session.post(path, data=body, headers=headers) as response:
            assert response.status == 415
            assert (await response.json())["code"] == "unsupported_media_type"
    assert await operator.record() == before


class Raw:
    """One connection, which says when it is over."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def said(self, question: bytes) -> bytes:
        """What comes back first; nothing where the other end is gone."""
        try:
            self._writer.write(question)
            return await self._reader.read(1 << 16)
        except OSError:
            return b""

    async def incarnation(self) -> str:
        """Of the worker that answers; empty where the other end is gone."""
        answer = await self.said(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
        record = json.loads(answer.partition(b"\r\n\r\n")[2] or "{}").get("record", {})
        return str(record.get("incarnation", ""))


async def test_no_connection_outlives_the_worker_that_it_was_made_to(operator: Operator) -> None:
    """Silent ones, a half-said one, a leg link and HTTP, of the worker that was."""
    before = (await operator.record())["incarnation"]
    async with AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(Raw(operator.process.port)) for _ in range(4)]
        asked = await stack.enter_async_context(Raw(operator.process.port))
        assert await asked.incarnation() == before
        link = await stack.enter_async_context(Raw(operator.process.port))
        assert await link.said(MAGIC), "a word of the worker"
        await operator.change_role("prefill")
        assert [await each.incarnation() for each in [*silent[:3], asked]] == [""] * 4
        assert await silent[3].said(MAGIC) == b""
        while await link.said(b""):  # its last words
            pass


async def test_a_connection_that_was_accepted_by_a_server_that_has_closed_is_ended() -> None:
    """The loop accepts first and tells of it a turn later."""
    server = LegLinkServer(lambda *_: lambda: None, asyncio.Protocol)
    loop = asyncio.get_running_loop()
    early, late = server(), server()
    ends = [socket.socketpair() for _ in range(2)]
    await loop.create_connection(lambda: early, sock=ends[0][0])
    assert server.unknown == {early}
    server.close()
    assert server.unknown == set(), "at once, not when it has said nothing for long"
    await loop.create_connection(lambda: late, sock=ends[1][0])
    assert server.unknown == set()
    for _, end in ends:
        end.setblocking(False)
        assert await loop.sock_recv(end, 1) == b""
        end.close()


async def test_many_who_ask_all_the_time_get_no_answer_of_a_worker_that_was(
    operator: Operator,
) -> None:
    roles: tuple[Role, ...] = ("prefill", "decode", "prefill", "decode")
    kept: list[tuple[str, Raw]] = []
    is_over = False

    async def client(stack: AsyncExitStack) -> None:
        while not is_over:
            with suppress(OSError):
                connection = await stack.enter_async_context(Raw(operator.process.port))
                kept.append((await connection.incarnation(), connection))
            await asyncio.sleep(0.002)

    async with AsyncExitStack() as stack:
        clients = [asyncio.create_task(client(stack)) for _ in range(4)]
        for role in roles:
            after = await operator.change_role(role)
            before, kept = kept, []
            old = [each for name, each in before if name not in ("", after["incarnation"])]
            assert old
            assert {await each.incarnation() for each in old} <= {""}
        is_over = True
        await asyncio.gather(*clients)
