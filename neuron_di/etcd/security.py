"""Who we are for etcd, and whom we take for etcd: TLS, a client certificate, a password."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from neuron_di.config import EtcdOptions
from neuron_di.errors import ConfigError
from neuron_di.obs import get_logger

_log = get_logger(__name__)

OTHERS_MAY_READ = 0o077
SECRET_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Security:
    """PEM texts, and a user. Without `ca` nothing is encrypted. Its repr shows no secret.

    `password` is asked at each authentication, so a file may be replaced while we run. It
    raises ConfigError where there is none. A user that a certificate names is not given here.
    """

    ca: bytes | None = None
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
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
    security = Security(
        ca=_read(options.etcd_ca),
        cert=_read(options.etcd_cert),
        key=_read(options.etcd_key),
        user=options.etcd_user,
        password=password,
    )
    _check_tls(options)
    return security


def _check_tls(options: EtcdOptions) -> None:
    """gRPC takes any files, and says of each connection only that it could not be secured."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    name = options.etcd_ca
    try:
        if options.etcd_ca is not None:
            context.load_verify_locations(options.etcd_ca)
        if options.etcd_cert is not None:
            name = f"{options.etcd_cert} with the key {options.etcd_key}"
            # An empty password: a key that is encrypted must fail here, not ask at a terminal.
            context.load_cert_chain(options.etcd_cert, options.etcd_key, password="")
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
            raise ConfigError(f"cannot read {self._path}: {error.strerror}") from None
        except UnicodeDecodeError:  # its words would show bytes of the file
            raise ConfigError(f"{self._path} is no text in UTF-8") from None
        if not password or len(password) > SECRET_BYTES_MAX or "\n" in password:
            raise ConfigError(f"{self._path} must hold a password in one line")
        return password


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if b"-----BEGIN " not in text:
        raise ConfigError(f"{path} is not in PEM form")
    return text
