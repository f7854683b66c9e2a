"""A command's request to a proxy: its address and key are checked first, then it has a deadline."""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import SplitResult, urlsplit

from neuron_di.errors import ConfigError, PeerGone, Unauthorized

_OTHER_NAME = "name the proxy as its certificate does"
# By OpenSSL's number of what is wrong. What is not here is signed by nobody that we know.
_CERTIFICATE_MENDS = {
    9: "it is not valid yet, or this machine's clock is slow",
    10: "renew it, or set this machine's clock",
    62: _OTHER_NAME,  # not that host name
    64: _OTHER_NAME,  # not that IP address
}


def check_address(url: str, source: str = "--url") -> SplitResult:
    """The parts of an http or https address. ConfigError, which names the source, if it is none."""
    if "@" in url:  # looked at first: no other refusal is to show a password
        raise ConfigError(f"{source} takes no user; a key is in a variable")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        if host:
            host.encode("idna")  # as what looks it up does
    except ValueError as error:
        raise ConfigError(f"{source} {url!r}: {error}") from None
    is_plain = url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not host or not is_plain:
        raise ConfigError(f"{source} {url!r} is no address such as http://127.0.0.1:8000")
    if parts.query or parts.fragment:
        raise ConfigError(f"{source} takes no query; a key is in a variable")
    return parts


def check_key(key: str | None) -> None:
    """ConfigError, which does not show it, when no header can carry it."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key has characters that no header can carry")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nobody elsewhere: the key is for the proxy."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


def call_proxy(
    url: str, path: str, key: str | None, timeout_s: float, order: object = None
) -> http.client.HTTPResponse:
    """GET, or POST an `order`. The response is the caller's to close.

    `timeout_s` is for each wait. ConfigError where the address or the key cannot be. Of what it
    and reading raise, HTTPError is the proxy's own answer, and OSError and HTTPException are for
    `no_answer`.
    """
    check_address(url)
    check_key(key)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    data = None
    if order is not None:
        headers["content-type"] = "application/json"
        data = json.dumps(order).encode()
    request = urllib.request.Request(  # noqa: S310 - of two schemes
        url.rstrip("/") + path, data=data, headers=headers
    )
    response: http.client.HTTPResponse = _opener.open(request, timeout=timeout_s)
    return response


def no_answer(url: str, error: OSError | http.client.HTTPException) -> PeerGone:
    """What the user is told when nothing answers there, or no HTTP."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        mend = _CERTIFICATE_MENDS.get(
            reason.verify_code, "the variable SSL_CERT_FILE names the certificates that can"
        )
        words = reason.verify_message.rstrip(".")
        return PeerGone(f"the certificate of {url} cannot be trusted ({words}): {mend}")
    if isinstance(reason, http.client.IncompleteRead):
        return PeerGone(f"{url} broke its answer off")
    if isinstance(reason, http.client.HTTPException):
        hint = ", or one that speaks TLS: https://" if url.startswith("http:") else ""
        return PeerGone(f"{url} is no HTTP server{hint}")
    reason = getattr(reason, "strerror", None) or reason  # without the number
    return PeerGone(f"no proxy answers at {url}: {reason}{_by_way_of(url)}")


def other_status(url: str, status: int) -> PeerGone:
    """What to say of an answer that is not the one of a proxy's address."""
    hint = ": give the proxy's address, without /v1 or another path" if status == 404 else ""
    return PeerGone(f"{url} answers with status {status}{hint}{_by_way_of(url)}")


def _by_way_of(url: str) -> str:
    """Names an HTTP proxy between us and `url`: what it said is taken for our proxy's word else."""
    parts = urlsplit(url)
    has_one = parts.scheme in urllib.request.getproxies()
    if not has_one or urllib.request.proxy_bypass(parts.netloc):
        return ""
    return f", by way of the HTTP proxy of {parts.scheme}_proxy: no_proxy takes hosts out"


def not_let_in(url: str, key: str | None) -> Unauthorized:
    """What to say of a proxy's 401."""
    if key is None:
        return Unauthorized(f"{url} wants an API key: set KEY_NEURON_DI, or give --key")
    return Unauthorized(f"{url} does not accept this API key: it is unknown, revoked or expired")
