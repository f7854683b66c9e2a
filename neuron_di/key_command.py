"""`neuron-di key`: make, list and revoke the API keys of a proxy. It may run meanwhile."""

import argparse
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from neuron_di.clock import unix_s
from neuron_di.config import FlagParser
from neuron_di.errors import ConfigError
from neuron_di_proxy.key_file import (
    KeyRecord,
    changing_key_file,
    is_expired,
    make_key,
    read_key_file,
)

_EXPIRES_DAYS_MAX = 36_500


# Name, type and help of what a key may say of its tenant. Each process of a proxy has its part.
_LIMITS: tuple[tuple[str, type, str], ...] = (
    ("requests_max", int, "requests open at once in each proxy; one more gets 429"),
    ("requests_per_minute", int, "requests per minute, in each proxy"),
    ("tokens_per_minute", int, "tokens of prompts and answers per minute, likewise"),
    ("max_tokens", int, "tokens of one answer"),
    ("weight", float, "share where tenants compete (default: 1)"),
)


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the command's three verbs."""
    verbs = parser.add_subparsers(
        dest="verb", metavar="VERB", required=True, parser_class=FlagParser
    )
    create = _verb(verbs, "create", "make a key and show it, this once")
    create.usage = "%(prog)s FILE NAME [flags]"
    create.add_argument("name", metavar="NAME", help="the tenant; it may have several keys")
    create.add_argument(
        "--operator",
        action="store_true",
        help="may see /status and /metrics, drain workers, change roles",
    )
    create.add_argument("--expires-days", type=float, metavar="DAYS", help="days it is valid")
    for name, kind, words in _LIMITS:
        flag = f"--{name.replace('_', '-')}"
        create.add_argument(flag, type=kind, metavar="N", help=words)
    _verb(verbs, "list", "show all keys, without their secrets")
    revoke = _verb(verbs, "revoke", "take keys out; a running proxy notices within a second")
    revoke.add_argument("name", metavar="ID|NAME", help="one key's id, or a tenant for all of its")


def run_key_command(flags: argparse.Namespace) -> str:
    """Do what the flags say. Returns what to print; ConfigError when it cannot be done."""
    path = Path(flags.file)
    if flags.verb == "create":
        return _create(path, flags)
    if flags.verb == "revoke":
        return _revoke(path, flags.name)
    return _list(path)


def _verb(verbs: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=summary, description=summary)
    parser.add_argument("file", metavar="FILE", help="the key file, for the proxy's --api-keys")
    return parser


def _create(path: Path, flags: argparse.Namespace) -> str:
    key_id, text, digest = make_key()
    with changing_key_file(path, may_be_new=True) as keys:
        keys[key_id] = _record(path, flags, keys.values(), digest)
    return text


def _record(
    path: Path, flags: argparse.Namespace, others: Iterable[KeyRecord], digest: str
) -> KeyRecord:
    now = datetime.fromtimestamp(int(unix_s()), UTC)
    given: dict[str, Any] = {name: getattr(flags, name) for name, _, _ in _LIMITS}
    fields = {name: value for name, value in given.items() if value is not None}
    former = [record for record in others if record.tenant == flags.name]
    if former:
        # A second key of a tenant is for the change from one to the other: its limits stay.
        if fields or flags.operator:
            raise ConfigError(
                f"tenant {flags.name} has keys already, and a new one gets their limits. "
                f"Mend: give no limits and no --operator, or edit {path}"
            )
        record = msgspec.structs.replace(former[0], expires=None)
        fields = msgspec.structs.asdict(record)
    else:
        fields |= {"tenant": flags.name, "operator": flags.operator}
    fields |= {"sha256": digest, "created": now}
    if flags.expires_days is not None:
        if not 0 < flags.expires_days <= _EXPIRES_DAYS_MAX:
            raise ConfigError(f"--expires-days goes from above 0 to {_EXPIRES_DAYS_MAX}")
        fields["expires"] = now + timedelta(days=flags.expires_days)
    try:
        return msgspec.convert(fields, KeyRecord)
    except msgspec.ValidationError as error:
        words, _, place = str(error).partition(" - at `$.")
        field = place.rstrip("`")
        reason = f"--{field.replace('_', '-')}: {words.replace('`', '')}"
        if field == "tenant":
            reason = "a tenant's name has 1 to 64 letters, digits and ._@-"
        raise ConfigError(f"a key cannot be like this: {reason}") from None


def _list(path: Path) -> str:
    rows = [("ID", "TENANT", "CREATED", "EXPIRES", "LIMITS")]
    for key_id, record in read_key_file(path).items():
        expires = _day(record.expires, "never")
        rows.append(
            (
                key_id,
                record.tenant,
                _day(record.created, "?"),
                f"{expires} (expired)" if is_expired(record) else expires,
                _limits_of(record),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _revoke(path: Path, name: str) -> str:
    with changing_key_file(path) as keys:
        out = [key_id for key_id, record in keys.items() if name in (key_id, record.tenant)]
        if not out:
            raise ConfigError(f"{path} has no key with this id and none of such a tenant")
        for key_id in out:
            del keys[key_id]
    return f"revoked: {', '.join(out)}"


def _day(moment: datetime | None, otherwise: str) -> str:
    return otherwise if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d}"


def _limits_of(record: KeyRecord) -> str:
    values = msgspec.structs.asdict(record)
    words = [
        f"{name}={values[name]:g}"
        for name, _, _ in _LIMITS
        if values[name] is not None and (name, values[name]) != ("weight", 1.0)
    ]
    return " ".join(["operator"] * record.operator + words)
