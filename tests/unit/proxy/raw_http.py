"""HTTP as bytes: what a client can send that no client library would, and what comes back."""

import asyncio
import json
import ssl
from dataclasses import dataclass
from typing import Any, Self

DEADLINE_S = 20.0


@dataclass(frozen=True)
class RawResponse:
    """A response as it came. `framed` is the body with its chunks' frames, `body` without."""

    status_line: str
    headers: list[tuple[str, str]]
    framed: bytes
    body: bytes

    @property
    def status(self) -> int:
        return int(self.status_line.split(" ")[1])

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]

    def header(self, name: str) -> str | None:
        return {key.lower(): value for key, value in self.headers}.get(name)


class RawClient:
    """One connection."""

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        self._address = address
        self._tls = tls

    async def __aenter__(self) -> Self:
        name = "localhost" if self._tls else None
        self.reader, self.writer = await asyncio.open_connection(
            *self._address, ssl=self._tls, server_hostname=name
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def shut_down(self) -> None:
        """Send no more, but listen on."""
        self.writer.write_eof()

    async def read_head(self) -> tuple[str, list[tuple[str, str]]]:
        async with asyncio.timeout(DEADLINE_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        status_line, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        pairs = [line.split(": ", 1) for line in lines]
        return status_line, [(name, value) for name, value in pairs]

    async def response(self) -> RawResponse:
        """The next response that is not informational."""
        status_line, headers = await self.read_head()
        while status_line.split(" ")[1].startswith("1"):
            status_line, headers = await self.read_head()
        known = {name.lower(): value for name, value in headers}
        async with asyncio.timeout(DEADLINE_S):
            if known.get("transfer-encoding") == "chunked":
                framed, body = await self._chunks()
            elif "content-length" in known:
                framed = body = await self.reader.readexactly(int(known["content-length"]))
            else:
                framed = body = await self.reader.read()
        return RawResponse(status_line, headers, framed, body)

    async def chunk(self) -> bytes:
        """The next chunk with its frame."""
        async with asyncio.timeout(DEADLINE_S):
            size = await self.reader.readuntil(b"\r\n")
            return size + await self.reader.readexactly(int(size, 16) + 2)

    async def end(self) -> bytes:
        """What comes until the server ends the connection."""
        rest = b""
        async with asyncio.timeout(DEADLINE_S):
            try:
                while data := await self.reader.read(65536):
                    rest += data
            except ConnectionError:
                pass
        return rest

    async def _chunks(self) -> tuple[bytes, bytes]:
        framed, body = b"", b""
        while True:
            chunk = await self.chunk()
            framed += chunk
            data = chunk.split(b"\r\n", 1)[1][:-2]
            if not data:
                return framed, body
            body += data


def post(path: str, body: bytes | dict[str, Any], *headers: str, version: str = "1.1") -> bytes:
    """A whole request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: a", f"Content-Length: {len(data)}", *headers]
    if not any(line.lower().startswith("content-type:") for line in headers):
        lines.append("Content-Type: application/json")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: a", *headers]).encode() + b"\r\n\r\n"
