"""Asks one member of etcd for its version over plain HTTP, or HTTPS.

gRPC says of most failures only that it could not connect. This says why: TLS or none, a
certificate that is not trusted, not valid yet, or for another name. And etcd's answer has its
time of day.
"""

import http.client
import socket
import ssl
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from neuron_di.clock import unix_s
from neuron_di.config import EtcdOptions
from neuron_di.config.value import split_address
from neuron_di.doctor.resolve import Unresolved, resolve

TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What was found at a member's address. `why` is empty where it answered.

    Not `is_open`: no other way of asking will do either, for there is no connection, or no TLS.
    `skew_s` is how far its clock is ahead of ours, to the second; None where it did not say.
    """

    why: str = ""
    mend: str = ""
    is_open: bool = True
    skew_s: float | None = None


def knock(address: str, options: EtcdOptions) -> Door:
    """Within twice TIMEOUT_S or so. What cannot be read of the options' files was said before."""
    host, port = split_address(address)
    try:
        _, ip = resolve(host, TIMEOUT_S)[0]
    except Unresolved as error:
        return _shut(str(error), "Correct --etcd, or DNS, or name the IP address.")
    try:
        sock = socket.create_connection((ip, port), TIMEOUT_S)
    except OSError as error:
        return _closed(port, error)
    try:
        if options.etcd_ca is not None:
            sock = _context(options).wrap_socket(sock, server_hostname=host)
        return _ask(sock, address)
    except ssl.SSLError as error:
        return _refused_tls(host, error)
    except (OSError, http.client.HTTPException):
        return _no_words(options)
    finally:
        sock.close()


def _ask(sock: socket.socket, address: str) -> Door:
    """Raises OSError or HTTPException where what answers does not speak HTTP."""
    sock.sendall(
        f"GET /version HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode("ascii")
    )
    before_s = unix_s()
    answer = http.client.HTTPResponse(sock)
    try:
        answer.begin()
    finally:
        answer.close()
    return Door(skew_s=_skew_s(answer.getheader("Date"), (before_s + unix_s()) / 2))


def _skew_s(date: str | None, now_s: float) -> float | None:
    try:
        there_s = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return None
    return round(there_s + 0.5 - now_s, 1)  # it says whole seconds, rounded down


def _context(options: EtcdOptions) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.etcd_ca)
    if options.etcd_cert is not None:
        context.load_cert_chain(options.etcd_cert, options.etcd_key)
    return context


def _closed(port: int, error: OSError) -> Door:
    if isinstance(error, TimeoutError):
        return _shut(
            "nothing answers there",
            f"Let TCP port {port} through (on AWS: the security group of etcd's hosts), and look "
            "whether the host is up.",
        )
    if isinstance(error, ConnectionRefusedError):
        return _shut(
            "the host answers, and nothing listens on that port",
            "Start etcd, with --listen-client-urls of an address that others reach.",
        )
    return _shut((error.strerror or str(error)).lower(), "Look at the address, and the routes.")


def _shut(why: str, mend: str) -> Door:
    return Door(why=why, mend=mend, is_open=False)


def _refused_tls(host: str, error: ssl.SSLError) -> Door:
    reason = error.reason or "without a reason"
    if isinstance(error, ssl.SSLCertVerificationError):
        words = error.verify_message.lower()
        mend = "Give as --etcd-ca the authority that signed etcd's certificate."
        if "mismatch" in words:
            mend = f"Name etcd as its certificate does, or have one made for {host}, too."
        elif "expired" in words or "not yet valid" in words:
            mend = "Renew it, or set this machine's clock."
        return _shut(f"its certificate is refused: {words}", mend)
    if isinstance(error, ssl.SSLEOFError) or reason == "WRONG_VERSION_NUMBER":
        return _shut(
            "it hangs up on TLS, which --etcd-ca asks for",
            "If it speaks no TLS, start it with a certificate, or leave out --etcd-ca.",
        )
    if "ALERT" in reason:
        return _shut(
            f"it refuses our certificate, or that there is none ({reason})",
            "Give --etcd-cert and --etcd-key of an authority that etcd trusts.",
        )
    return _shut(
        f"TLS fails: {reason}",
        "Look at etcd's log, and at the three files --etcd-ca, --etcd-cert and --etcd-key.",
    )


def _no_words(options: EtcdOptions) -> Door:
    if options.etcd_ca is None:
        return Door(
            why="it hangs up, or is silent, as etcd is without TLS where it asks for it",
            mend="Give --etcd-ca if it speaks TLS; else, is that its client port (2379, not 2380)?",
        )
    why = "it hangs up, or is silent"
    if options.etcd_cert is None:
        return Door(why=why, mend="It may ask for a certificate: --etcd-cert and --etcd-key.")
    return Door(why=why, mend="Is that etcd's client port (2379, not 2380)? Look at its log.")
