"""An endpoint that costs nearly nothing, for `--self-test`: ready-made answers, paced or at once.

Run as a module, with the number of tokens per answer and the milliseconds between them; it prints
its port, and ends when its standard input does.
"""

import asyncio
import os
import sys

_CHUNK = b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODELS = b'{"data":[{"id":"stub"}]}'


def _framed(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def _whole(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class Stub:
    """Answers every completion with as many tokens as it was told, whatever is asked for."""

    def __init__(self, num_tokens: int, gap_s: float) -> None:
        self._num_tokens = num_tokens
        self._gap_s = gap_s

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                if head.startswith(b"GET /v1/models "):
                    writer.write(_whole(b"200 OK", _MODELS))
                elif head.startswith(b"POST /v1/completions "):
                    is_probe = b'"max_tokens":2,' in body
                    await self._stream(writer, 2 if is_probe else self._num_tokens)
                else:
                    writer.write(_whole(b"404 Not Found", b""))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, num_tokens: int) -> None:
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":%d}}\n\n'
        end = _framed(usage % num_tokens) + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        chunk = _framed(_CHUNK)
        writer.write(_HEAD)
        if self._gap_s == 0:
            writer.write(chunk * num_tokens + end)
            await writer.drain()
            return
        for _ in range(num_tokens):
            writer.write(chunk)
            await asyncio.sleep(self._gap_s)
        writer.write(end)


async def _main(num_tokens: int, gap_ms: float) -> None:
    server = await asyncio.start_server(Stub(num_tokens, gap_ms / 1e3).serve, "127.0.0.1", 0)
    async with server:
        try:
            os.write(sys.stdout.fileno(), b"%d\n" % server.sockets[0].getsockname()[1])
        except BrokenPipeError:  # whoever started this has ended already
            return
        await asyncio.to_thread(sys.stdin.read)
        os._exit(0)  # each answer that is under way would be cancelled with a traceback


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2])))
