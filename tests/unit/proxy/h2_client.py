"""A client of HTTP/2 that does what it is told, and no more: it opens no window by itself."""

import asyncio

import h2.connection
import h2.events
import h2.settings
from raw_http import DEADLINE_S, RawClient


class H2Client:
    """On a connection. `ended`, `reset` and `has_goodbye` are what the server has said so far."""

    def __init__(self, raw: RawClient, window: int = 1 << 30) -> None:
        self.raw = raw
        self.state = h2.connection.H2Connection()
        self.state.initiate_connection()
        self.state.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.state.increment_flow_control_window((1 << 30) - 65535)
        self.bodies: dict[int, bytes] = {}
        self.statuses: dict[int, int] = {}
        self.ended: set[int] = set()
        self.reset: set[int] = set()
        self.has_goodbye = False
        self._unsent: dict[int, bytes] = {}  # of bodies: the server's window has no room
        self._send()

    def ask(
        self, stream: int, path: str, body: bytes | None = None, *, method: str | None = None
    ) -> None:
        """A request: POST of the body, or GET."""
        pseudo = {":method": method or ("GET" if body is None else "POST"), ":path": path}
        pseudo |= {":scheme": "http", ":authority": "a"}
        if method == "CONNECT":
            pseudo[":protocol"] = "websocket"
        headers = [*pseudo.items(), ("content-type", "application/json")]
        is_whole = body is None and method != "CONNECT"
        self.state.send_headers(stream, headers, end_stream=is_whole)
        if body is not None:
            self._unsent[stream] = body
        self._send()

    def reset_stream(self, stream: int) -> None:
        self.state.reset_stream(stream)
        self._send()

    def open_window(self, stream: int, size: int) -> None:
        self.state.increment_flow_control_window(size, stream)
        self._send()

    async def hear(self, size: int = 65536) -> bool:
        """Read once. False: the connection is over."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                data = await self.raw.reader.read(size)
        except ConnectionError:
            return False
        for event in self.state.receive_data(data):
            stream = getattr(event, "stream_id", 0)
            if isinstance(event, h2.events.DataReceived):
                self.bodies[stream] = self.bodies.get(stream, b"") + event.data
            elif isinstance(event, h2.events.ResponseReceived):
                self.statuses[stream] = int(dict(event.headers)[b":status"])
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(stream)
            elif isinstance(event, h2.events.StreamReset):
                self.reset.add(stream)
            elif isinstance(event, h2.events.ConnectionTerminated):
                self.has_goodbye = True
        self._send()
        return bool(data)

    async def until_over(self, stream: int) -> None:
        """Read until this stream has ended, or was reset."""
        while stream not in self.ended | self.reset:
            if not await self.hear():
                raise AssertionError("the connection ended before the stream")

    def _send(self) -> None:
        for stream, body in list(self._unsent.items()):
            while body and (room := self.state.local_flow_control_window(stream)):
                piece = body[: min(room, 16384)]
                body = body[len(piece) :]
                self.state.send_data(stream, piece, end_stream=not body)
            self._unsent[stream] = body
            if not body:
                del self._unsent[stream]
        if data := self.state.data_to_send():
            self.raw.send(data)
