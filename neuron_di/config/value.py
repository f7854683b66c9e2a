"""From what a user wrote, text or a TOML value, to an option's typed value."""

import math
import re
import reprlib
from typing import Any, Literal, get_args, get_origin

from neuron_di.config.option import PORT_MAX, ByteSize, OptionSpec
from neuron_di.errors import ConfigError

_HOST_PORT = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})"
_FORMS = {
    "HOST:PORT": re.compile(_HOST_PORT),
    "HOST:PORT|auto": re.compile(f"auto|{_HOST_PORT}"),
    "tcp://HOST:PORT": re.compile("tcp://" + _HOST_PORT),
    "http://HOST:PORT": re.compile("http://" + _HOST_PORT + "/?"),
}

_BOOLS = {"true": True, "1": True, "yes": True, "on": True}
_BOOLS |= {"false": False, "0": False, "no": False, "off": False}

_SIZE = re.compile(r"(?P<number>[0-9]{1,18}(\.[0-9]{1,9})?) *(?P<unit>[a-z]*)")
_UNIT_BYTES = {"": 1, "b": 1}
_UNIT_BYTES |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNIT_BYTES |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}


def parse_value(spec: OptionSpec, raw: object, source: str) -> Any:
    """The typed value of what `source` (a flag, a variable, a file's key) gives.

    Raises ConfigError, which names the source and the allowed values.
    """
    if spec.is_optional and raw == "none":
        return None
    try:
        value = _convert(spec.kind, raw)
        _check(spec, value)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{source} must be {allowed_values(spec)}, not {reprlib.repr(raw)}", param=spec.key
        ) from None
    return value


def split_address(text: str) -> tuple[str, int]:
    """(host, port) of what has the form HOST:PORT; an IPv6 address without its brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def size_in_words(num_bytes: int) -> str:
    """In the largest unit that it is a whole number of, such as 16KiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return str(num_bytes)


def allowed_values(spec: OptionSpec) -> str:
    """In words, as in "a whole number, at least 1, or none"."""
    words = _kind_in_words(spec)
    if spec.at_least is not None and spec.at_most is not None:
        words += f" from {spec.at_least} to {spec.at_most}"
    elif spec.at_least is not None:
        words += f", at least {spec.at_least}"
    return f"{words}, or none" if spec.is_optional else words


def _kind_in_words(spec: OptionSpec) -> str:
    if get_origin(spec.kind) is Literal:
        choices = get_args(spec.kind)
        return f"one of {', '.join(choices)}" if len(choices) > 1 else repr(choices[0])
    if get_origin(spec.kind) is tuple:
        items = spec.form if spec.form in _FORMS else "names"
        return f"a list of {items}, in text separated by commas"
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: spec.form if spec.form in _FORMS else "a text in UTF-8 that is not empty",
        ByteSize: "a size such as 512MiB or 2GiB",
    }
    return words[spec.kind]


def _convert(kind: Any, raw: object) -> Any:
    """Raises ValueError where `raw` is not of this kind."""
    if get_origin(kind) is tuple:
        return _convert_list(raw)
    if isinstance(raw, bool) or kind is bool:
        return _convert_bool(kind, raw)
    if kind is ByteSize:
        return _convert_size(raw)
    if kind is int and isinstance(raw, int | str):
        return int(raw)
    if kind is float and isinstance(raw, int | float | str):
        return float(raw)
    if (kind is str or get_origin(kind) is Literal) and isinstance(raw, str):
        return raw
    raise ValueError(raw)


def _convert_list(raw: object) -> tuple[str, ...]:
    if isinstance(raw, str):
        raw = [part.strip() for part in raw.split(",")] if raw.strip() else []
    if not isinstance(raw, list) or not all(isinstance(part, str) for part in raw):
        raise ValueError(raw)
    return tuple(raw)


def _convert_bool(kind: Any, raw: object) -> bool:
    # A bool is an int to Python, but `port = true` is a mistake.
    if kind is not bool:
        raise ValueError(raw)
    if isinstance(raw, bool):
        return raw
    if not isinstance(raw, str) or raw.lower() not in _BOOLS:
        raise ValueError(raw)
    return _BOOLS[raw.lower()]


def _convert_size(raw: object) -> ByteSize:
    if isinstance(raw, int):
        return ByteSize(raw)
    match = _SIZE.fullmatch(raw.strip().lower()) if isinstance(raw, str) else None
    if match is None or match["unit"] not in _UNIT_BYTES:
        raise ValueError(raw)
    return ByteSize(int(float(match["number"]) * _UNIT_BYTES[match["unit"]]))


def _check(spec: OptionSpec, value: Any) -> None:
    """Raises ValueError where a value of the right kind is not allowed."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_above = spec.at_least is None or value >= spec.at_least
        is_below = spec.at_most is None or value <= spec.at_most
        if not (math.isfinite(value) and is_above and is_below):
            raise ValueError(value)
    if get_origin(spec.kind) is Literal and value not in get_args(spec.kind):
        raise ValueError(value)
    if isinstance(value, tuple | str):
        for text in (value,) if isinstance(value, str) else value:
            _check_text(spec, text)


def _check_text(spec: OptionSpec, text: str) -> None:
    if not text.strip():
        raise ValueError(text)
    if spec.form not in ("FILE", "FOLDER"):
        text.encode()  # what a record or a report says; a file may have any name
    if spec.form in _FORMS:
        match = _FORMS[spec.form].fullmatch(text)
        if match is None or int(match["port"] or 0) > PORT_MAX:
            raise ValueError(text)
