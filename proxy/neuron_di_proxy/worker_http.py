"""Questions to workers over HTTP, on connections that are kept."""

import socket

import aiohttp

from neuron_di.errors import RemoteProtocolError

# Of one connection, until it is read. uvloop reads on until nothing is left, up to 8 MB, before it
# turns to anything else: who answers by "100 Continue" without end would keep it for seconds.
UNREAD_BYTES = 64 << 10


def worker_session() -> aiohttp.ClientSession:
    """The caller's to close. Each question has a deadline of its own."""
    return aiohttp.ClientSession(
        # The proxy's admission is the limit.
        connector=aiohttp.TCPConnector(limit=0, socket_factory=_small_socket),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None),
    )


def _small_socket(info: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = info
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BYTES)
    return sock


async def ask_worker(
    session: aiohttp.ClientSession, url: str, *, bytes_max: int, question: bytes | None = None
) -> tuple[int, bytes]:
    """GET, or POST a question in JSON. The answer's status and body.

    Raises OSError when nobody is there, or who was there hung up, UnicodeError for a host name that
    cannot be one, and RemoteProtocolError for what is no answer, or has more bytes than that.
    """
    body = bytearray()
    try:
        async with session.request(
            "GET" if question is None else "POST",
            url,
            data=question,
            headers={} if question is None else {"Content-Type": "application/json"},
            allow_redirects=False,
        ) as response:
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > bytes_max:
                    raise RemoteProtocolError("an answer of too many bytes")
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError):
        raise ConnectionResetError("the worker hung up") from None
    except aiohttp.InvalidURL:
        raise UnicodeError("no host can have this name") from None
    except aiohttp.ClientError as error:
        if isinstance(error, OSError):
            raise
        words = f"what answers does not speak HTTP ({type(error).__name__})"
        raise RemoteProtocolError(words) from None
    return response.status, bytes(body)
