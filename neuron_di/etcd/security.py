"""Who we are for etcd, and whom we take for etcd: TLS, a client certificate, a password."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from neuron_di.certificate_files import CertificateFiles
from neuron_di.config import EtcdOptions
from neuron_di.errors import ConfigError
from neuron_di.obs import get_logger

_log = get_logger(__name__)

OTHERS_MAY_READ = 0o077
SECRET_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Pem:
    """Texts: of the authority that etcd's certificate is of, and of our own certificate and key."""

    ca: bytes
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Security:
    """Certificates, and a user. Without `pem` nothing is encrypted. Its repr shows no secret.

    `pem` is asked for each connection and `password` at each authentication, so files may be
    replaced while we run. `password` raises ConfigError where there is none, `pem` nothing. A user
    that a certificate names is not given here.
    """

    pem: Callable[[], Pem] | None = field(default=None, repr=False)
    user: str | None = None
    password: Callable[[], str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password is None):
            raise ConfigError("a user of etcd needs a password, and a password a user")


def security_of(options: EtcdOptions) -> Security:
    """What the options' files hold. ConfigError, with its name, for one that does not serve."""
    path = options.etcd_password_file
    if path is None:
        password = None
    else:
        password = _PasswordFile(Path(path))
        password()
        if options.shows_password:
            _log.warning("etcd_password_in_the_clear", mend="give --etcd-ca")
    pem = None
    if options.etcd_ca is not None:
        files = options.etcd_ca, options.etcd_cert, options.etcd_key
        given = [file for file in files if file is not None]
        pem = CertificateFiles(given, partial(_read, *files)).latest
    return Security(pem=pem, user=options.etcd_user, password=password)


def _read(ca: str, cert: str | None, key: str | None) -> Pem:
    pem = Pem(
        _text("--etcd-ca", ca),
        None if cert is None else _text("--etcd-cert", cert),
        None if key is None else _text("--etcd-key", key),
    )
    # gRPC takes any files, and says of each connection only that it could not be secured.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    name = ca
    try:
        context.load_verify_locations(ca)
        if cert is not None:
            name = f"{cert} with the key {key}"
            # An empty password: a key that is encrypted must fail here, not ask at a terminal.
            context.load_cert_chain(cert, key, password="")
    except OSError as error:  # SSLError is one
        raise ConfigError(f"cannot use the certificate {name} for etcd: {error}") from None
    return pem


class _PasswordFile:
    """Reads the password anew whenever it is asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_warned = False

    def __call__(self) -> str:
        try:
            if self._path.stat().st_mode & OTHERS_MAY_READ and not self._has_warned:
                self._has_warned = True
                _log.warning("etcd_password_readable_by_others", file=str(self._path))
            with self._path.open("rb") as file:
                password = file.read(SECRET_BYTES_MAX + 1).decode().rstrip("\r\n")
        except OSError as error:
            raise ConfigError(
                f"cannot read --etcd-password-file {self._path}: {error.strerror}"
            ) from None
        except UnicodeDecodeError:  # its words would show bytes of the file
            raise ConfigError(f"{self._path} is no text in UTF-8") from None
        if not password or len(password) > SECRET_BYTES_MAX or "\n" in password:
            raise ConfigError(f"{self._path} must hold a password in one line")
        return password


def _text(flag: str, path: str) -> bytes:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {flag} {path}: {error.strerror}") from None
    if b"-----BEGIN " not in text:
        raise ConfigError(f"{path} is not in PEM form")
    return text
