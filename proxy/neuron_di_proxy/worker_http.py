"""Questions to workers over HTTP, on connections that are kept."""

import aiohttp

from neuron_di.errors import RemoteProtocolError


def worker_session() -> aiohttp.ClientSession:
    """The caller's to close. Each question has a deadline of its own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # the proxy's admission is the limit
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None),
    )


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
