"""One HTTP/1.1 request that Quart answers, on a connection of the front.

The front has read its head and its body by the front's own rules; the application sees them as an
ASGI server would show them, and what it sends goes out as the front's own answers do.

Next: proxy/neuron_di_proxy/app.py
"""

import asyncio
from typing import Any, cast

from hypercorn.typing import ASGIFramework

from neuron_di_proxy.choice_request import HOT_PATHS
from neuron_di_proxy.failure import Refusal
from neuron_di_proxy.keys import authorize
from neuron_di_proxy.reply import Reply
from neuron_di_proxy.request_head import RequestHead
from neuron_di_proxy.service import Service


class QuartExchange:
    """From a request's head to its end. Used like the service's own `Exchange`."""

    def __init__(
        self, app: ASGIFramework, service: Service, head: RequestHead, transport: asyncio.Transport
    ) -> None:
        self._app = app
        self._service = service
        self._head = head
        self._transport = transport
        # The application opens an exchange of its own for these, and counts what it refuses.
        self._is_hot = head.method == "POST" and head.route in HOT_PATHS

    def check_key(self) -> None:
        """Refuse by the head alone, before a body is read. Raises Unauthorized or Forbidden."""
        authorize(self._service.keys, self._head.route, self._head.headers)

    async def answer(self, body: bytes, reply: Reply) -> None:
        """Let the application answer. Cancelling tells it that the client has left."""
        call = _Call(body, reply, has_body=self._head.method != "HEAD")
        running = asyncio.create_task(self._run(call))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            call.has_left.set()
            await asyncio.wait((running,))
            raise

    async def _run(self, call: "_Call") -> None:
        await self._app(
            cast("Any", self._scope()), cast("Any", call.receive), cast("Any", call.send)
        )

    def refuse(self, error: Exception) -> Refusal:
        """The response for a request that the application does not see."""
        return self._service.refuse(error, self._head.headers, is_counted=self._is_hot)

    def close(self) -> None:
        """Nothing is held here: the application lets go of what it has."""

    def _scope(self) -> dict[str, Any]:
        head, transport = self._head, self._transport
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "method": head.method,
            "scheme": "http" if transport.get_extra_info("ssl_object") is None else "https",
            "path": head.route,
            "raw_path": head.path.encode("latin-1"),
            "query_string": b"",  # no route has one
            "root_path": "",
            "headers": [
                (name.encode("latin-1"), value.encode("latin-1"))
                for name, value in head.headers.items()
            ],
            "client": _address(transport, "peername"),
            "server": _address(transport, "sockname"),
            "state": {},
            "extensions": {},
        }


def _address(transport: asyncio.Transport, name: str) -> tuple[str, int]:
    found = transport.get_extra_info(name) or ("", 0)  # a client that has left may have none
    return found[0], found[1]


class _Call:
    """What the application is called with."""

    def __init__(self, body: bytes, reply: Reply, *, has_body: bool) -> None:
        self.has_left = asyncio.Event()
        self._body: bytes | None = body  # until it was given on
        self._reply = reply
        self._has_body = has_body  # of the response: HEAD wants none

    async def receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, event: dict[str, Any]) -> None:
        if self.has_left.is_set():
            return
        reply = self._reply
        if event["type"] == "http.response.start":
            self._begin(event["status"], event["headers"])
            return
        if event.get("body") and self._has_body:
            reply.write(event["body"])
        if not event.get("more_body"):
            reply.end()

    def _begin(self, status: int, raw: list[tuple[bytes, bytes]]) -> None:
        length = None if self._has_body else 0
        headers = []
        for raw_name, value in raw:
            name = raw_name.decode("latin-1").lower()
            if name == "content-length":
                length = int(value)
            else:
                headers.append((name, value.decode("latin-1")))
        self._reply.begin(status, headers, length=length)
