"""Sends an operator's order to a proxy and reads the lines that answer, for the commands."""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator

import msgspec

from neuron_di.errors import (
    ClientError,
    Forbidden,
    NeuronDiError,
    PeerGone,
    RemoteProtocolError,
    Unauthorized,
)
from neuron_di_proxy.admin_order import AdminLine

LINE_TIMEOUT_S = 30.0  # a line comes each second, or two


class OrderRefused(ClientError):
    """Raised when the proxy, or the worker, will not do it. Says why in its own words."""

    code = "order_refused"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nobody elsewhere: the key is for the proxy."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)
_line_decoder = msgspec.json.Decoder(AdminLine)


def give_order(
    url: str, path: str, order: dict[str, object], key: str | None
) -> Iterator[AdminLine]:
    """POST an order to the proxy at `url`. Gives its lines as they come, the last one final.

    Raises PeerGone when no proxy answers or its answer breaks off, Unauthorized or Forbidden
    when `key` does not open it, OrderRefused when it says no.
    """
    address = f"{url.rstrip('/')}{path}"
    if not address.startswith(("http://", "https://")):
        raise PeerGone(
            f"no proxy answers at {url}: the address must start with http:// or https://"
        )
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(  # noqa: S310 - of these two schemes
        address, data=json.dumps(order).encode(), headers=headers, method="POST"
    )
    is_over = False
    try:
        with _opener.open(request, timeout=LINE_TIMEOUT_S) as response:
            for raw in response:
                line = _line_decoder.decode(raw)
                yield line
                is_over = line.phase in ("done", "failed")
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(url, error) from None
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"{url} is not a neuron-di proxy: {error}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise PeerGone(
                f"the certificate of {url} cannot be trusted ({reason.verify_message}): "
                "the variable SSL_CERT_FILE names the certificates that can"
            ) from None
        reason = getattr(reason, "strerror", None) or reason
        raise PeerGone(f"no proxy answers at {url}: {reason}") from None
    if not is_over:
        raise PeerGone(f"{url} broke its answer off: ask `neuron-di status` what became of it")


def _refusal(url: str, error: urllib.error.HTTPError) -> NeuronDiError:
    try:
        document = msgspec.json.decode(error.read(65536))
        message, code = str(document["error"]["message"]), document["error"].get("code")
    except (msgspec.DecodeError, OSError, KeyError, TypeError, AttributeError):
        message, code = f"status {error.code}", None
    if error.code == Unauthorized.http_status:
        return Unauthorized(f"{url} wants an API key: set KEY_NEURON_DI, or give --key")
    if code == Forbidden.code:
        return Forbidden(f"{url} wants an operator's API key for this")
    if 400 <= error.code < 500:
        return OrderRefused(message)
    return PeerGone(f"{url}: {message}")
