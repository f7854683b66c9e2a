"""One setting, declared once as a dataclass field: its key, type, allowed values and help.

The field `kv_lease_s` is the flag `--kv-lease-s`, the variable `NEURON_DI_KV_LEASE_S` and the
key `kv_lease_s` of a configuration file. A set of options may contain another set as a field;
all keys of a command are flat, whatever set they are declared in.
"""

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

ByteSize = NewType("ByteSize", int)  # written as 512MiB or 2GiB

# What `--help` shows for a value. Those with a port are checked, too (config/value.py).
Form = Literal[
    "HOST:PORT",
    "HOST:PORT|auto",
    "tcp://HOST:PORT",
    "http://HOST:PORT",
    "ADDRESS",
    "CIDR",
    "FILE",
    "FOLDER",
    "LOW-HIGH",
    "N",
    "PREFIX",
    "URL",
]

VARIABLE_PREFIX = "NEURON_DI_"
PORT_MAX = 65_535

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """What is known of one option."""

    key: str
    kind: Any  # int, float, bool, str, ByteSize, tuple[str, ...] or a Literal of strings
    is_optional: bool  # may be None
    default: Any  # MISSING: must be given
    group: str  # title of the set it was declared in
    help_text: str
    default_text: str  # says what None, or an empty list, stands for; else the default is shown
    at_least: float | None
    at_most: float | None
    form: Form | None
    hidden: bool  # for our own processes: neither in --help nor in suggestions
    positional: bool

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def on_command_line(self) -> str:
        return self.key.upper() if self.positional else self.flag

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.key.upper()


def option(
    help_text: str,
    *,
    default: Any = MISSING,
    default_text: str = "",
    at_least: float | None = None,
    at_most: float | None = None,
    form: Form | None = None,
    hidden: bool = False,
    positional: bool = False,
) -> Any:
    """Declare a field of an option set. Without a default the user must give a value."""
    return field(
        default=default,
        metadata={
            "help_text": help_text,
            "default_text": default_text,
            "at_least": at_least,
            "at_most": at_most,
            "form": form,
            "hidden": hidden,
            "positional": positional,
        },
    )


def specs_of(options_class: type) -> dict[str, OptionSpec]:
    """Every option of a set and of the sets in it, by key, in the order of declaration."""
    assert is_dataclass(options_class), f"{options_class} is not a set of options"
    hints = get_type_hints(options_class)
    title = (options_class.__doc__ or "").split("\n", 1)[0].rstrip(".")
    specs: dict[str, OptionSpec] = {}
    for declared in fields(options_class):
        hint = hints[declared.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            inner = specs_of(hint)
        else:
            kind, is_optional = _without_none(hint)
            inner = {
                declared.name: OptionSpec(
                    key=declared.name,
                    kind=kind,
                    is_optional=is_optional,
                    default=declared.default,
                    group=title,
                    **declared.metadata,
                )
            }
        assert not specs.keys() & inner.keys(), f"{options_class} declares a key twice"
        specs.update(inner)
    return specs


def values_of(options: Any) -> dict[str, Any]:
    """The value of every option of a set and of the sets in it, by key."""
    values: dict[str, Any] = {}
    for declared in fields(options):
        value = getattr(options, declared.name)
        values.update(values_of(value) if is_dataclass(value) else {declared.name: value})
    return values


def build(options_class: type[T], values: Mapping[str, Any]) -> T:
    """An instance of a set from values by key. A key without a value takes its default."""
    hints = get_type_hints(options_class)
    arguments: dict[str, Any] = {}
    for name, hint in hints.items():
        if is_dataclass(hint):
            assert isinstance(hint, type)
            arguments[name] = build(hint, values)
        elif name in values:
            arguments[name] = values[name]
    return options_class(**arguments)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """(the type, whether None is allowed too)."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
    assert len(kinds) == 1, f"an option has one type, not {hint}"
    return kinds[0], True
