"""Who we are for etcd, and whom we take for etcd: TLS, a client certificate, a password."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from neuron_di.config import EtcdOptions
from neuron_di.errors import ConfigError
from neuron_di.obs import get_logger
from neuron_di.seen_file import look_at

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
        pem = _PemFiles(options.etcd_ca, options.etcd_cert, options.etcd_key)
    return Security(pem=pem, user=options.etcd_user, password=password)


class _PemFiles:
    """Reads the files again when they changed. While they are no good, the last ones stay."""

    def __init__(self, ca: str, cert: str | None, key: str | None) -> None:
        self._ca, self._cert, self._key = ca, cert, key
        self._not_read = ""  # why, when it was last tried
        self._seen = self._look()
        self._pem = self._read()

    def __call__(self) -> Pem:
        seen = self._look()
        if seen != self._seen:
            try:
                self._pem, self._seen, self._not_read = self._read(), seen, ""
                _log.info("certificate_read")
            except ConfigError as error:  # what failed is tried again
                if error.message != self._not_read:
                    _log.error("certificate_not_read", reason=error.message)
                self._not_read = error.message
        return self._pem

    def _look(self) -> tuple[object, ...]:
        files = (self._ca, self._cert, self._key)
        return tuple(look_at(Path(file)) for file in files if file is not None)

    def _read(self) -> Pem:
        cert = key = None
        ca = _text("--etcd-ca", self._ca)
        if self._cert is not None and self._key is not None:
            cert, key = _text("--etcd-cert", self._cert), _text("--etcd-key", self._key)
        self._check_tls()
        return Pem(ca, cert, key)

    def _check_tls(self) -> None:
        """gRPC takes any files, and says of each connection only that it could not be secured."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        name = self._ca
        try:
            context.load_verify_locations(self._ca)
            if self._cert is not None:
                name = f"{self._cert} with the key {self._key}"
                # An empty password: a key that is encrypted must fail here, not ask at a terminal.
                context.load_cert_chain(self._cert, self._key, password="")
        except OSError as error:  # SSLError is one
            raise ConfigError(f"cannot use the certificate {name} for etcd: {error}") from None


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
