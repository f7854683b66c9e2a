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
from io import BytesIO

from neuron_di.clock import Deadline, unix_s
from neuron_di.config import EtcdOptions
from neuron_di.config.value import split_address
from neuron_di.doctor.resolve import Unresolved, resolve

TIMEOUT_S = 2.0  # of the name, and of all that follows
_ANSWER_BYTES_MAX = 1 << 16
_IS_ETCD = b'"etcdserver"'
_TLS_ALERT = b"\x15\x03"
_CLIENT_PORT = "Name etcd's client port, as a rule 2379 (2380 is for its members)."


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
    """Within twice TIMEOUT_S. What cannot be read of the options' files was said before."""
    host, port = split_address(address)
    try:
        _, ip = resolve(host, TIMEOUT_S)[0]
    except Unresolved as error:
        return _shut(str(error), "Correct --etcd, or DNS, or name the IP address.")
    deadline = Deadline.after(TIMEOUT_S)
    try:
        sock = socket.create_connection((ip, port), TIMEOUT_S)
    except OSError as error:
        return _closed(port, error)
    is_secure = False
    try:
        if options.etcd_ca is not None:
            sock.settimeout(_left_s(deadline))
            secure = _context(options).wrap_socket(
                sock, server_hostname=host, do_handshake_on_connect=False
            )
            sock = secure
            secure.do_handshake()
            is_secure = True
        return _ask(sock, address, deadline)
    except TimeoutError:
        return Door(
            why=f"it takes connections, and does not answer within {TIMEOUT_S:g} s",
            mend="Look whether that process is stopped, or its host's disk hangs, and at its log.",
        )
    except (OSError, http.client.HTTPException) as error:
        if options.etcd_ca is None:
            return Door(
                why="it hangs up, as etcd does without TLS where it asks for it",
                mend=f"Give --etcd-ca if it speaks TLS; else: {_CLIENT_PORT}",
            )
        return _refused_us(error) if is_secure else _refused_tls(host, error)
    finally:
        sock.close()


def _ask(sock: socket.socket, address: str, deadline: Deadline) -> Door:
    """Raises OSError or HTTPException where what answers does not speak HTTP."""
    sock.settimeout(_left_s(deadline))
    sock.sendall(
        f"GET /version HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode("ascii")
    )
    before_s = unix_s()
    text = _read(sock, deadline)
    status, _, rest = text.partition(b"\r\n")
    if not text or text.startswith(_TLS_ALERT):
        raise ConnectionResetError
    if not status.startswith(b"HTTP/"):
        return Door(why="what answers there is no etcd", mend=_CLIENT_PORT)
    headers = http.client.parse_headers(BytesIO(rest))
    skew_s = _skew_s(headers.get("Date"), (before_s + unix_s()) / 2)
    if _IS_ETCD in text:
        return Door(skew_s=skew_s)
    mend = f"{_CLIENT_PORT} If it asks for HTTPS, give --etcd-ca." if b"HTTPS" in text else ""
    return Door(why="what answers there is no etcd", mend=mend or _CLIENT_PORT, skew_s=skew_s)


def _read(sock: socket.socket, deadline: Deadline) -> bytes:
    """Until it says that it is etcd, or has said all. TimeoutError where it says nothing."""
    text = b""
    while len(text) < _ANSWER_BYTES_MAX and _IS_ETCD not in text:
        try:
            sock.settimeout(_left_s(deadline))
            piece = sock.recv(_ANSWER_BYTES_MAX)
        except TimeoutError:
            if not text:
                raise
            break
        if not piece:
            break
        text += piece
    return text


def _left_s(deadline: Deadline) -> float:
    """Raises TimeoutError where nothing is left: a socket takes 0 for not waiting at all."""
    if deadline.has_passed():
        raise TimeoutError
    return deadline.remaining_s()


def _skew_s(date: str | None, now_s: float) -> float | None:
    try:
        there_s = parsedate_to_datetime(date or "").timestamp()
    except (ValueError, OverflowError):  # the second: of a time zone that is none
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


def _refused_tls(host: str, error: Exception) -> Door:
    """The connection was not secure yet."""
    if isinstance(error, ssl.SSLCertVerificationError):
        words = error.verify_message.lower()
        mend = "Give as --etcd-ca the authority that signed etcd's certificate."
        if "mismatch" in words:
            mend = f"Name etcd as its certificate does, or have one made for {host}, too."
        elif "expired" in words or "not yet valid" in words:
            mend = "Renew it, or set this machine's clock."
        return _shut(f"its certificate is refused: {words}", mend)
    reason = "" if not isinstance(error, ssl.SSLError) else error.reason or "without a reason"
    has_ended = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)  # by Python's version
    if has_ended or reason in ("", "WRONG_VERSION_NUMBER"):
        return _shut(
            "it hangs up on TLS, which --etcd-ca asks for",
            "If it speaks no TLS, start it with a certificate, or leave out --etcd-ca.",
        )
    if "ALERT" in reason:
        return _refused_us(error)
    return _shut(
        f"TLS fails: {reason}",
        "Look at etcd's log, and at the three files --etcd-ca, --etcd-cert and --etcd-key.",
    )


def _refused_us(error: Exception) -> Door:
    """With TLS 1.3 a client learns of it after the handshake, and may only see the end."""
    reason = f" ({error.reason})" if isinstance(error, ssl.SSLError) and error.reason else ""
    return _shut(
        f"it refuses our certificate, or that there is none{reason}",
        "Give --etcd-cert and --etcd-key of an authority that etcd trusts, or renew them: "
        "`openssl x509 -noout -enddate -in FILE` says whether they have expired.",
    )
