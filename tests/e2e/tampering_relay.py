"""A relay that spoils what an endpoint answers, each time in one way."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web


@dataclass
class Relayed:
    """A response on its way to the client."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_stream(self) -> bool:
        return self.headers["content-type"].startswith("text/event-stream")


Change = Callable[[Relayed], None]


@asynccontextmanager
async def relay(
    url: str,
    session: aiohttp.ClientSession,
    change: Change = lambda _: None,
    *,
    drops: str | None = None,
) -> AsyncIterator[str]:
    """Serve what `url` serves, with `change` made to each answer to a request for tokens.

    A field that is called as `drops` says is taken out of each request that has it.
    """

    async def handle(request: web.Request) -> web.Response:
        kept = {
            name: value
            for name, value in request.headers.items()
            if name.lower() in ("content-type", "x-request-id", "authorization")
        }
        body = await request.read()
        if drops is not None and body:
            document = json.loads(body)
            document.pop(drops, None)
            body = json.dumps(document).encode()
        async with session.request(
            request.method, url + request.path, data=body or None, headers=kept
        ) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            for name in ("transfer-encoding", "content-length", "connection", "date"):
                headers.pop(name, None)
            relayed = Relayed(response.status, headers, await response.read())
        if request.path.endswith("completions"):
            change(relayed)
        return web.Response(status=relayed.status, headers=relayed.headers, body=relayed.body)

    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


Chunks = list[Any]  # documents, or texts that stand for themselves as `[DONE]` does


def in_stream(edit: Callable[[Chunks], None]) -> Change:
    """A change of a stream's chunks. The last one is `[DONE]`."""

    def change(relayed: Relayed) -> None:
        if not relayed.is_stream:
            return
        events = relayed.body.decode().removesuffix("\n\n").split("\n\n")
        datas = [event.removeprefix("data: ") for event in events]
        chunks = [data if data == "[DONE]" else json.loads(data) for data in datas]
        edit(chunks)
        written = [each if isinstance(each, str) else json.dumps(each) for each in chunks]
        relayed.body = "".join(f"data: {each}\n\n" for each in written).encode()

    return change


def in_whole(edit: Callable[[Any], None]) -> Change:
    """A change of a document, an answer or an error."""

    def change(relayed: Relayed) -> None:
        if relayed.is_stream:
            return
        document = json.loads(relayed.body)
        edit(document)
        relayed.body = json.dumps(document).encode()

    return change


def in_bytes(edit: Callable[[bytes], bytes]) -> Change:
    """A change of a stream's bytes."""

    def change(relayed: Relayed) -> None:
        if relayed.is_stream:
            relayed.body = edit(relayed.body)

    return change


def in_head(**headers: str) -> Change:
    """Other headers. An underscore stands for a hyphen."""

    def change(relayed: Relayed) -> None:
        relayed.headers |= {name.replace("_", "-"): value for name, value in headers.items()}

    return change


def with_status(status: int) -> Change:
    """Another status, for errors only."""

    def change(relayed: Relayed) -> None:
        if relayed.status != 200:
            relayed.status = status

    return change


def choices(chunks: Chunks) -> list[Any]:
    """Every choice of every chunk, in order."""
    return [choice for chunk in chunks if isinstance(chunk, dict) for choice in chunk["choices"]]


def last_of(chunks: Chunks) -> Any:
    """The choice that has a finish reason."""
    return next(choice for choice in choices(chunks) if choice["finish_reason"])


def usage_of(chunks: Chunks) -> Any:
    return chunks[-2]["usage"]
