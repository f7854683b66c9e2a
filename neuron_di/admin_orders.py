"""Sends an operator's order to a proxy and reads the lines that answer, for the commands."""

import http.client
import urllib.error
from collections.abc import Iterator

import msgspec

from neuron_di.clock import Deadline
from neuron_di.errors import (
    ClientError,
    Forbidden,
    NeuronDiError,
    PeerGone,
    RemoteProtocolError,
    Unauthorized,
)
from neuron_di.proxy_call import call_proxy, no_answer, not_let_in, other_status
from neuron_di_proxy.admin_order import AdminLine

LINE_TIMEOUT_S = 30.0  # a line comes each second, or two
LINE_BYTES_MAX = 1 << 20


class OrderRefused(ClientError):
    """Raised when the proxy, or the worker, will not do it. Says why in its own words."""

    code = "order_refused"


_line_decoder = msgspec.json.Decoder(AdminLine)


def give_order(
    url: str, path: str, order: dict[str, object], key: str | None
) -> Iterator[AdminLine]:
    """POST an order to the proxy at `url`. Gives its lines as they come, the last one final.

    Raises ConfigError for what is no address, PeerGone when no proxy answers or its answer breaks
    off, Unauthorized or Forbidden when `key` does not open it, OrderRefused when it says no.
    """
    line: AdminLine | None = None
    try:
        with call_proxy(url, path, key, LINE_TIMEOUT_S, order) as response:
            for raw in _lines(url, response):
                line = _line_decoder.decode(raw)
                yield line
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(url, error, key) from None
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"{url} is not a neuron-di proxy: {error}") from None
    except (OSError, http.client.HTTPException) as error:
        if line is None:
            raise no_answer(url, error) from None
    if line is None or line.phase not in ("done", "failed"):
        raise PeerGone(f"{url} broke its answer off: ask `neuron-di status` what became of it")


def _lines(url: str, response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Whole lines, as they come. What is no proxy may send one that never ends."""
    rest, deadline = b"", Deadline.after(LINE_TIMEOUT_S)
    while piece := response.read1(1 << 16):
        *lines, rest = (rest + piece).split(b"\n")
        if lines:
            yield from lines
            deadline = Deadline.after(LINE_TIMEOUT_S)
        if len(rest) > LINE_BYTES_MAX:
            raise RemoteProtocolError(f"{url} answers without an end")
        if deadline.has_passed():
            raise PeerGone(f"no proxy answers at {url}: timed out")
    if rest:
        yield rest


def _refusal(url: str, error: urllib.error.HTTPError, key: str | None) -> NeuronDiError:
    try:
        document = msgspec.json.decode(error.read(65536))
        message, code = str(document["error"]["message"]), document["error"].get("code")
    except (msgspec.DecodeError, OSError, KeyError, TypeError, AttributeError):
        message, code = "", None
    if error.code == Unauthorized.http_status:
        return not_let_in(url, key)
    if code == Forbidden.code:
        return Forbidden(f"{url} wants an operator's API key for this")
    if not message or code == "not_found":  # the path; a worker has a code of its own
        return other_status(url, error.code)
    if 400 <= error.code < 500:
        return OrderRefused(message)
    return PeerGone(f"{url}: {message}")
