"""Asks a proxy how it is, for the commands that show it to people."""

import ssl
import urllib.error
import urllib.request
from typing import Any

import msgspec

from neuron_di.errors import Forbidden, PeerGone, RemoteProtocolError, Unauthorized
from neuron_di_proxy.status import StatusReport

ANSWER_TIMEOUT_S = 5.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nobody elsewhere: the key is for the proxy."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)
_status_decoder = msgspec.json.Decoder(StatusReport)


def ask(url: str, path: str, key: str | None) -> bytes:
    """What the proxy at `url` answers to GET `path`.

    PeerGone when no proxy answers, Unauthorized or Forbidden when `key` does not open it.
    """
    address = f"{url.rstrip('/')}{path}"
    try:
        if not address.startswith(("http://", "https://")):
            raise ValueError("the address must start with http:// or https://")
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        request = urllib.request.Request(address, headers=headers)  # noqa: S310
        with _opener.open(request, timeout=ANSWER_TIMEOUT_S) as response:
            body: bytes = response.read()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == Unauthorized.http_status:
            raise Unauthorized(
                f"{url} wants an API key: set KEY_NEURON_DI, or give --key"
            ) from None
        if error.code == Forbidden.http_status:
            raise Forbidden(f"{url} wants an operator's API key for this") from None
        hint = (
            ": give the proxy's address, without /v1 or another path" if error.code == 404 else ""
        )
        raise PeerGone(f"{url} answers with status {error.code}{hint}") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise PeerGone(
                f"the certificate of {url} cannot be trusted ({reason.verify_message}): "
                "the variable SSL_CERT_FILE names the certificates that can"
            ) from None
        reason = getattr(reason, "strerror", None) or reason  # without the number
        raise PeerGone(f"no proxy answers at {url}: {reason}") from None
    return body


def ask_status(url: str, key: str | None) -> tuple[StatusReport, bytes]:
    """The proxy's view of itself and its workers, and the bytes that said so."""
    body = ask(url, "/status", key)
    try:
        return _status_decoder.decode(body), body
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"{url} is not a neuron-di proxy: {error}") from None
