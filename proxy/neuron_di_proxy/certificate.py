"""The certificate that the proxy shows to clients: read again whenever its files change.

So one that is renewed needs no restart, and one that nobody renews is told before it ends.
"""

import ssl
from contextlib import suppress

from neuron_di.certificate_files import CertificateFiles
from neuron_di.clock import unix_s
from neuron_di.config import FrontOptions
from neuron_di.errors import ConfigError
from neuron_di.obs import get_logger

LOOK_INTERVAL_S = 10.0  # between two looks at whether the files changed
ENDS_SOON_S = 14 * 86400.0
_TELL_INTERVAL_S = 86400.0  # of one that ends soon

_log = get_logger(__name__)


class Certificate:
    """`context` is what serves TLS; new connections get what was read last.

    ConfigError when the files are no good at the start; later the last good ones stay in force and
    the log says so. Owned by one event loop, which calls look().
    """

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = cert, key
        self.context = _read(cert, key)
        self._trouble = ""  # of the one in force: what keeps clients from trusting it
        self._ends_s: float | None = None
        self._tell_again_s = 0.0
        self._files = CertificateFiles((cert, key), self._show)

    def look(self) -> None:
        """Read the files again if they changed. Say once a day that the certificate ends soon."""
        self._files.latest()
        if unix_s() >= self._tell_again_s:
            self._tell()

    def _show(self) -> None:
        """What the files hold, from now on. ConfigError: they are no good."""
        _read(self._cert, self._key)  # of files that do not fit, the context would keep a part
        _load(self.context, self._cert, self._key)
        self._examine()

    def _examine(self) -> None:
        self._trouble, self._ends_s = "", None
        try:
            self._ends_s = _end_of(self.context, self._cert)
        except ssl.SSLCertVerificationError as error:
            self._trouble = error.verify_message
        except (OSError, ValueError) as error:  # no reason not to serve: clients may know better
            _log.debug("certificate_not_examined", reason=str(error))
        self._tell()

    def _tell(self) -> None:
        now_s = unix_s()
        self._tell_again_s = now_s + _TELL_INTERVAL_S
        left_s = float("inf") if self._ends_s is None else self._ends_s - now_s
        if self._trouble or left_s <= 0:
            reason = self._trouble or "certificate has expired"
            _log.warning("certificate_not_trusted", file=self._cert, reason=reason)
        elif left_s < ENDS_SOON_S:
            _log.warning("certificate_ends_soon", file=self._cert, days=int(left_s / 86400))


def certificate_of(front: FrontOptions) -> Certificate | None:
    """None where the proxy does not speak TLS. Raises ConfigError."""
    cert, key = front.tls_cert, front.tls_key
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing = "--tls-cert" if cert is None else "--tls-key"
        raise ConfigError(f"TLS needs a certificate and its private key: give {missing} too")
    return Certificate(cert, key)


def _read(cert: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2", "http/1.1"])
    _load(context, cert, key)
    return context


def _load(context: ssl.SSLContext, cert: str, key: str) -> None:
    try:
        # An empty password: a key that is encrypted must fail here, not ask at a terminal.
        context.load_cert_chain(cert, key, password="")
    except OSError as error:  # SSLError is one
        raise ConfigError(
            f"cannot use the certificate {cert} with the key {key}: {error.strerror or error}. "
            "Both are PEM files, the chain begins with the server's own certificate, and the key "
            "is that certificate's, without a password."
        ) from None


def _end_of(server: ssl.SSLContext, cert: str) -> float | None:
    """Unix seconds at which the certificate ends, as a client hears it who trusts just that one.

    Raises ssl.SSLCertVerificationError where not even such a client would take it: it has expired,
    begins later, or is not for servers. Without a network: the two ends are here.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server)
    for end in (theirs, ours, theirs):  # hello, certificate, finished
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    found = theirs.getpeercert() or {}
    ends = found.get("notAfter")
    return ssl.cert_time_to_seconds(ends) if isinstance(ends, str) else None
