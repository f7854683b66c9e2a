"""Options as command line flags: declared from a set, and written back from an instance."""

import argparse
from dataclasses import MISSING
from typing import Any, Literal, Never, get_args, get_origin

from neuron_di.config.nearest import nearest
from neuron_di.config.option import VARIABLE_PREFIX, ByteSize, OptionSpec, specs_of, values_of
from neuron_di.config.value import size_in_words
from neuron_di.errors import ConfigError

_EPILOG = (
    f"Each flag, say --port, is also the variable {VARIABLE_PREFIX}PORT and the key port of the "
    "TOML file given with --config. A flag goes before a variable, a variable before the file. "
    "A list may be given by one flag or by several. Where a default is in words, none stands for "
    "it, of a list an empty one."
)


class FlagParser(argparse.ArgumentParser):
    """An argument parser whose complaints are ConfigErrors that name the nearest valid flag."""

    def __init__(self, **kwargs: Any) -> None:
        # Abbreviations would change their meaning whenever a flag is added.
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            raise ConfigError(self._complaint(unknown[0]))
        return namespace, unknown

    def error(self, message: str) -> Never:
        raise ConfigError(self._named(message))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices and value not in action.choices:
            near = nearest(str(value), action.choices)
            what = "/".join(action.option_strings) or action.dest
            words = f"unknown {what} {value!r}; the nearest valid one is {near}"
            raise ConfigError(self._named(words))

    def _complaint(self, argument: str) -> str:
        flag = argument.split("=", 1)[0]
        if not flag.startswith("-"):
            return self._named(f"unexpected argument {argument!r}")
        for action in self._actions:  # as other servers have it: --model MODEL
            if not action.option_strings and flag == f"--{action.dest}":
                return self._named(f"{action.metavar} is given without {flag}")
        valid = [
            name
            for name, action in self._option_string_actions.items()
            if action.help != argparse.SUPPRESS and name.startswith("--")
        ]
        words = f"unknown flag {flag}; the nearest valid one is {nearest(flag, valid)}"
        return self._named(words)

    def _named(self, words: str) -> str:
        """Behind the command's name. The program's is said by whoever shows an error."""
        command = self.prog.partition(" ")[2]
        return f"{command}: {words}" if command else words


class _Joined(argparse.Action):
    """`--peer A --peer B` is `--peer A,B`, of any list: the first is not lost in silence."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - as argparse calls it
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def add_flags(parser: argparse.ArgumentParser, options_class: type) -> None:
    """Add `--config` and a flag for each option. Values stay text: `load_options` checks them."""
    specs = specs_of(options_class)
    positional = [spec.key.upper() for spec in specs.values() if spec.positional]
    parser.usage = " ".join(["%(prog)s", *positional, "[flags]"])
    parser.epilog = _EPILOG
    parser.add_argument("--config", metavar="FILE", help="TOML file with options")
    groups: dict[str, Any] = {}
    for spec in specs.values():
        group = groups.get(spec.group) or parser.add_argument_group(spec.group)
        groups[spec.group] = group
        help_text = argparse.SUPPRESS if spec.hidden else _help(spec)
        if spec.positional:
            group.add_argument(
                spec.key,
                nargs="?",
                default=argparse.SUPPRESS,
                metavar=spec.key.upper(),
                help=help_text,
            )
        elif spec.kind is bool:
            group.add_argument(
                spec.flag,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=help_text,
            )
        else:
            group.add_argument(
                spec.flag,
                action=_Joined if get_origin(spec.kind) is tuple else "store",
                default=argparse.SUPPRESS,
                metavar=_metavar(spec),
                help=help_text,
            )


def flags_of(options: Any) -> list[str]:
    """The arguments that say exactly these options, whatever file and variables say.

    Every option is written out: a process started with them must not take a value that was
    meant for its parent, such as NEURON_DI_PORT.
    """
    specs = specs_of(type(options))
    return [_argument(specs[key], value) for key, value in values_of(options).items()]


def _argument(spec: OptionSpec, value: Any) -> str:
    if spec.positional:
        return str(value)
    if isinstance(value, bool):
        return spec.flag if value else "--no-" + spec.flag.removeprefix("--")
    if value is None:
        return f"{spec.flag}=none"
    return f"{spec.flag}={','.join(value) if isinstance(value, tuple) else value}"


def _metavar(spec: OptionSpec) -> str:
    if get_origin(spec.kind) is Literal:
        return "{" + ",".join(get_args(spec.kind)) + "}"
    if get_origin(spec.kind) is tuple:
        item, bar, instead = (spec.form or "NAME").partition("|")
        return f"{item},...{bar}{instead}"
    if spec.form is not None:
        return spec.form
    if spec.kind is float and (spec.key.endswith("_per_s") or not spec.key.endswith("_s")):
        return "X"
    return {int: "N", float: "SECONDS", ByteSize: "SIZE"}.get(spec.kind, "NAME")


def _help(spec: OptionSpec) -> str:
    words = spec.help_text
    if spec.default is MISSING:
        words += " (required)"
    else:
        words += f" (default: {spec.default_text or _in_words(spec)})"
    return words.replace("%", "%%")


def _in_words(spec: OptionSpec) -> str:
    default = spec.default
    if default is None or default == ():
        return "none"
    if isinstance(default, tuple):
        return ",".join(default)
    if isinstance(default, bool):
        return str(default).lower()
    if spec.kind is ByteSize:
        return size_in_words(default)
    if isinstance(default, float) and default.is_integer():
        return str(int(default))
    return str(default)
