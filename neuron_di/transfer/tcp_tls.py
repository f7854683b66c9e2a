"""TLS of the data connections. Both ends show a certificate of the same authority.

No name in a certificate is compared: workers are dialled by address. Who it is, the proof
behind it shows (tcp_proof.py), which holds for one certificate only.

Files that were renewed count from the next connection on: a worker outlives its certificate.
"""

import hashlib
import ssl
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from neuron_di.certificate_files import CertificateFiles
from neuron_di.config import TransferOptions
from neuron_di.errors import ConfigError

NO_CERTIFICATE = bytes(32)
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Tls:
    """What the ends of a connection wrap their sockets with: the files as they were once."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate_digest: bytes  # of this worker's own


TlsFiles: TypeAlias = CertificateFiles[Tls]


def open_tls(options: TransferOptions) -> TlsFiles | None:
    """None where nobody asked for it. ConfigError where its files do not serve."""
    cert, key, ca = (
        options.transfer_tls_cert,
        options.transfer_tls_key,
        options.transfer_tls_ca,
    )
    if cert is None or key is None or ca is None:
        return None
    return CertificateFiles((cert, key, ca), partial(_read, cert, key, ca))


def latest_of(files: TlsFiles | None) -> Tls | None:
    """For a connection that begins now. None where there is no TLS."""
    return None if files is None else files.latest()


def _read(cert: str, key: str, ca: str) -> Tls:
    try:
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            # An empty password: a key that is encrypted must fail here, not ask at a terminal.
            context.load_cert_chain(cert, key, password="")
            context.load_verify_locations(ca)
            contexts.append(context)
        server, client = contexts
        server.num_tickets = 0  # no connection is resumed
        text = Path(cert).read_text(encoding="ascii", errors="replace")
        own = text[text.index(_BEGIN) : text.index(_END) + len(_END)]
        digest = digest_of(ssl.PEM_cert_to_DER_cert(own))
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            "workers would not take each other's --transfer-tls-cert: "
            f"{error.verify_message}. It must be of the authority of --transfer-tls-ca, in force, "
            "and good for servers and for clients",
            param="transfer_tls_cert",
        ) from None
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"the files of --transfer-tls-cert, -key and -ca do not serve: {error}. All are PEM "
            "files, and the key is the certificate's, without a password",
            param="transfer_tls_cert",
        ) from None
    return Tls(server, client, digest)


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Between two ends that have these files, without a network."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    prefill = server.wrap_bio(to_server, to_client, server_side=True)
    decode = client.wrap_bio(to_client, to_server)
    for end in (decode, prefill, decode, prefill):  # hello, certificate, certificate, finished
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()


def digest_of(certificate: bytes | None) -> bytes:
    """Of a certificate in DER."""
    return NO_CERTIFICATE if certificate is None else hashlib.sha256(certificate).digest()
