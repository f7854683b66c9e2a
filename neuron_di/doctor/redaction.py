"""Taking out of a report what says whose machine it is: names, addresses, homes, keys.

What is taken out leaves a word in its place, so that a sentence can still be read. Rather too much
goes than too little; versions, which look like addresses, are named beforehand and stay.
"""

import ipaddress
import os
import pwd
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from neuron_di.doctor.machine import Machine

_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|SESSION", re.IGNORECASE)
_SECRET_CHARS_MIN = 6
_NAME_CHARS_MIN = 3
_PUBLIC_NAMES = {"localhost", "root", "neuron", "none"}
_HOMES = re.compile(r"/(?:home|Users)/[^/\s'\",;:)]+|(?<![\w/])/root(?=[/\s'\",;:)]|$)")
_PATTERNS = (  # in their order: names of hosts have addresses in them
    (re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\",;)]+"), "[url]"),
    (re.compile(r"\b\d{12}\.dkr\.ecr\.[\w./:@-]+"), "[aws]"),
    (re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]+"), "[mail]"),
    (re.compile(r"\bip-\d{1,3}-\d{1,3}-\d{1,3}-\d{1,3}[\w.-]*"), "[host]"),
    (re.compile(r"\bec2-\d{1,3}-\d{1,3}-\d{1,3}-\d{1,3}[\w.-]*"), "[host]"),
    (re.compile(r"\barn:aws[\w-]*:\S+"), "[aws]"),
    (re.compile(r"\b(?:i|eni|subnet|sg|vpc|ami|vol|rtb|igw|pg|lt)-[0-9a-f]{8,17}\b"), "[aws]"),
    (re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b"), "[secret]"),
    (re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|xox[abp]-)[\w-]{12,}"), "[secret]"),
    (re.compile(r"(?i)\bbearer\s+\S+"), "[secret]"),
    (re.compile(r"-----BEGIN [^-]+-----.*?(?:-----END [^-]+-----|$)", re.DOTALL), "[secret]"),
    (re.compile(r"\b(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}\b"), "[address]"),
)
# Other folders than the system's have people's names for things.
_PATH = re.compile(r"(?:(?<![\w.~/\]])|(?<=-[IL]))/[\w.+@%=-]+(?:/[\w.+@%=-]*)*")
_SYSTEM = ("opt", "dev", "sys", "proc", "etc", "usr", "lib", "lib64", "tmp", "bin", "sbin", "run")
_PERHAPS_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)")
_PERHAPS_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]*:[0-9A-Fa-f:]+(?:%\w+)?(?![\w.])")


class Redactor:
    """Knows the names and secrets of one machine. `kept` are texts that stay: versions."""

    def __init__(self, machine: Machine, kept: Iterable[str] = ()) -> None:
        self._kept = set(kept)
        # The longest first: one may be a part of another.
        self._secrets = sorted(_secrets(machine), key=len, reverse=True)
        names = [(home, "~") for home in _homes(machine)]
        names += [(name, "[host]") for name in _hosts(machine)]
        names += [(name, "[user]") for name in _users(machine)]
        self._names = sorted(dict(names).items(), key=lambda pair: -len(pair[0]))

    def text(self, text: str) -> str:
        """The same text without them."""
        for secret in self._secrets:
            text = text.replace(secret, "[secret]")
        for pattern, label in _PATTERNS:
            text = pattern.sub(label, text)
        for name, label in self._names:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", label, text)
        text = _PATH.sub(_path, _HOMES.sub("~", text))
        text = _PERHAPS_IPV6.sub(lambda found: self._address(found[0]), text)
        return _PERHAPS_IPV4.sub(lambda found: self._address(found[0]), text)

    def value(self, value: Any) -> Any:
        """The same for all texts of a JSON value, keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return value

    def _address(self, text: str) -> str:
        if text in self._kept:
            return text
        with suppress(ValueError):
            ipaddress.ip_address(text.partition("%")[0])
            return "[address]"
        return text


def _path(found: re.Match[str]) -> str:
    first, _, rest = found[0][1:].partition("/")
    # /opt is of the operator's own things, too.
    is_public = first in _SYSTEM and (first != "opt" or rest.split("/")[0] in ("aws", "amazon"))
    return found[0] if is_public else "[path]"


def _secrets(machine: Machine) -> Iterable[str]:
    for name, value in machine.environment.items():
        if _SECRET_NAME.search(name) and len(value) >= _SECRET_CHARS_MIN:
            yield value


def _homes(machine: Machine) -> Iterable[str]:
    homes = [machine.environment.get("HOME", "")]
    with suppress(KeyError):
        homes.append(pwd.getpwuid(os.getuid()).pw_dir)
    return [home.rstrip("/") for home in homes if len(home) > 1 and Path(home).is_absolute()]


def _hosts(machine: Machine) -> Iterable[str]:
    names = [socket.gethostname(), machine.read("/etc/hostname") or ""]
    names += [machine.environment.get(name, "") for name in ("HOSTNAME", "HOST")]
    names += [name.partition(".")[0] for name in names]
    return _worth_hiding(names)


def _users(machine: Machine) -> Iterable[str]:
    names = [machine.environment.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")]
    with suppress(KeyError):
        names.append(pwd.getpwuid(os.getuid()).pw_name)
    return _worth_hiding(names)


def _worth_hiding(names: Iterable[str]) -> list[str]:
    return [
        name for name in names if len(name) >= _NAME_CHARS_MIN and name.lower() not in _PUBLIC_NAMES
    ]
