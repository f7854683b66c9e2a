"""Asks a proxy how it is, for the commands that show it to people."""

import http.client
import urllib.error

import msgspec

from neuron_di.clock import Deadline
from neuron_di.errors import Forbidden, PeerGone, RemoteProtocolError, Unauthorized
from neuron_di.proxy_call import call_proxy, no_answer, not_let_in, other_status
from neuron_di_proxy.status import StatusReport

ANSWER_TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 64 << 20

_status_decoder = msgspec.json.Decoder(StatusReport)


def ask(url: str, path: str, key: str | None) -> bytes:
    """What the proxy at `url` answers to GET `path`.

    ConfigError for what is no address, PeerGone when no proxy answers in time, Unauthorized or
    Forbidden when `key` does not open it.
    """
    deadline = Deadline.after(ANSWER_TIMEOUT_S)
    body = bytearray()
    try:
        with call_proxy(url, path, key, ANSWER_TIMEOUT_S) as response:
            while piece := response.read1(1 << 16):
                body += piece
                if len(body) > ANSWER_BYTES_MAX:
                    raise RemoteProtocolError(f"{url} answers without an end")
                if deadline.has_passed():
                    raise PeerGone(f"no proxy answers at {url}: timed out")
            if response.length:
                raise http.client.IncompleteRead(b"")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == Unauthorized.http_status:
            raise not_let_in(url, key) from None
        if error.code == Forbidden.http_status:
            raise Forbidden(f"{url} wants an operator's API key for this") from None
        raise other_status(url, error.code) from None
    except (OSError, http.client.HTTPException) as error:
        raise no_answer(url, error) from None
    return bytes(body)


def ask_status(url: str, key: str | None) -> tuple[StatusReport, bytes]:
    """The proxy's view of itself and its workers, and the bytes that said so."""
    body = ask(url, "/status", key)
    try:
        return _status_decoder.decode(body), body
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"{url} is not a neuron-di proxy: {error}") from None
