"""The file of API keys: what it says, how it is read and written.

    [keys.4f0c2a9b1d3e]                  # the key's public id
    tenant = "alice"
    sha256 = "9f86d081884c7d65..."       # of the secret, which is nowhere
    created = 2026-03-01T12:00:00Z
    expires = 2026-09-01T00:00:00Z       # all from here on may be left out
    requests_max = 8

A key's text is `ndi-<id>-<secret>`. A secret has 256 random bits, so that a plain digest of it
cannot be turned back.
"""

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from neuron_di.clock import unix_s
from neuron_di.errors import ConfigError
from neuron_di_proxy.tenant import Tenant

KEYS_MAX = 2_000  # reading them takes the event loop 70 ms
FILE_BYTES_MAX = 2 << 20
OTHERS_MAY_READ = stat.S_IRGRP | stat.S_IROTH
KEY_TEXT = re.compile(r"ndi-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")

_HEAD = (
    "# API keys of neuron-di, written by `neuron-di key`. A secret is shown once, when it is\n"
    "# made; here is only its SHA-256. Taking a table out revokes its key within a second.\n"
)
_ID = re.compile(r"[0-9a-f]{12}")
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class KeyRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One key. Its limits are its tenant's: all keys of a tenant say the same."""

    tenant: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    created: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    operator: bool = False
    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0
    requests_max: _Count | None = None
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    max_tokens: _Count | None = None

    def limits(self) -> Tenant:
        """The tenant as this key describes it."""
        return Tenant(
            name=self.tenant,
            weight=self.weight,
            requests_max=self.requests_max,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_tokens=self.max_tokens,
            is_operator=self.operator,
        )


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    keys: dict[str, KeyRecord] = {}


def digest_of(secret: str) -> str:
    """What the file keeps of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def make_key() -> tuple[str, str, str]:
    """(id, the key's text, the secret's digest) of a key that nobody had before."""
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return key_id, f"ndi-{key_id}-{secret}", digest_of(secret)


class KeyFileUnread(ConfigError):
    """It could not be opened or read, which may be otherwise in a moment."""


def read_key_file(path: Path) -> dict[str, KeyRecord]:
    """All keys by their ids. ConfigError, which never shows a value, when the file is no good.

    A file that others may write is no good: whoever can write it can let himself in.
    """
    try:
        # Not a FIFO, which would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            mode = os.fstat(handle).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"the key file {path} is not a regular file")
            if mode & _OTHERS_MAY_WRITE:
                raise ConfigError(f"others may write the key file {path}. Mend: chmod 600 {path}")
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        mend = f". Make one with: neuron-di key create {path} NAME" if is_missing else ""
        raise KeyFileUnread(f"cannot read the key file {path}: {error.strerror}{mend}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"the key file {path} is larger than {FILE_BYTES_MAX >> 20} MiB")
    return _decode(content, path)


@contextmanager
def changing_key_file(path: Path, *, may_be_new: bool = False) -> Iterator[dict[str, KeyRecord]]:
    """All keys, to be changed: as the block leaves them they replace the file. Raises ConfigError.

    Readers see the old file or the new one. Of two who change it at once the second fails, and has
    read nothing by then: it would bring back what the first has revoked. A new file is its writer's
    alone; else it stays whose it was, since the proxy must be able to read it.
    """
    path = path.resolve()  # a link stays one
    new = path.with_name(path.name + ".new")
    try:
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{new} exists: another command is writing the keys, or was killed while it did. "
            "Mend: try again, or remove that file"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {new}: {error.strerror}") from None
    try:
        with open(handle, "wb") as file:
            is_new = may_be_new and not path.exists()
            keys = {} if is_new else read_key_file(path)
            yield keys
            if not is_new:
                former = path.stat()
                os.fchown(handle, former.st_uid, former.st_gid)
                os.fchmod(handle, former.st_mode & 0o640)
            tables = (_table(key_id, record) for key_id, record in keys.items())
            content = "\n".join([_HEAD, *tables]).encode()
            _decode(content, path)  # what nobody could read again must not replace what is there
            file.write(content)
            file.flush()
            os.fsync(handle)
        new.replace(path)
    except BaseException as error:
        new.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        raise


def is_expired(record: KeyRecord) -> bool:
    return record.expires is not None and record.expires <= datetime.fromtimestamp(unix_s(), UTC)


def _decode(content: bytes, path: Path) -> dict[str, KeyRecord]:
    try:
        keys = msgspec.toml.decode(content, type=_Document).keys
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be understood: {error}") from None
    if len(keys) > KEYS_MAX:
        raise ConfigError(f"the key file {path} has {len(keys)} keys, more than {KEYS_MAX}")
    tenants: dict[str, Tenant] = {}
    for key_id, record in keys.items():
        if _ID.fullmatch(key_id) is None:
            raise ConfigError(f"the key file {path} has an id that is not 12 hexadecimal digits")
        limits = record.limits()
        if tenants.setdefault(record.tenant, limits) != limits:
            raise ConfigError(
                f"the key file {path} gives the keys of tenant {record.tenant} different limits"
            )
    return keys


def _table(key_id: str, record: KeyRecord) -> str:
    lines = [f"[keys.{key_id}]"]
    for name, value in msgspec.structs.asdict(record).items():
        if isinstance(value, datetime):
            lines.append(f"{name} = {value.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}")
        elif value is not None:
            # Plain ASCII strings, numbers and truth values are the same in TOML and JSON.
            lines.append(f"{name} = {msgspec.json.encode(value).decode()}")
    return "\n".join([*lines, ""])
