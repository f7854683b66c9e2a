"""Options from flags, the environment and a TOML file, in this order of precedence."""

import argparse
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import TypeVar

from neuron_di.config.nearest import nearest
from neuron_di.config.option import VARIABLE_PREFIX, OptionSpec, build, specs_of
from neuron_di.config.options import OPTION_SETS
from neuron_di.config.value import parse_value
from neuron_di.errors import ConfigError

T = TypeVar("T")

CONFIG_VARIABLE = VARIABLE_PREFIX + "CONFIG"
_CUDART_VARIABLE = VARIABLE_PREFIX + "CUDART"  # no option's: where the CUDA runtime library is

_FILE_BYTES_MAX = 1 << 20  # a device, or a wrong path, may have no end

# By key: what was written, and where, as in "NEURON_DI_PORT" or "port in site.toml".
_Written = dict[str, tuple[object, str]]


def load_options(
    options_class: type[T],
    flags: argparse.Namespace,
    environ: Mapping[str, str],
    toml_path: str | Path | None = None,
) -> T:
    """The options of one command. Raises ConfigError for what is unknown, wrong or missing.

    `flags` comes from a parser prepared by `add_flags`; `toml_path` is its `--config`, in whose
    place the variable NEURON_DI_CONFIG is read. A file or an environment may hold the options
    of other commands too.
    """
    specs = specs_of(options_class)
    known = {key: spec for each in OPTION_SETS for key, spec in specs_of(each).items()} | specs
    if toml_path == "":  # as of a shell's variable that is not set: keys, too, would be left out
        raise ConfigError("--config is empty: name a TOML file, or leave it out")
    path = toml_path or environ.get(CONFIG_VARIABLE)  # that may be empty: no file
    written: _Written = _from_file(Path(path), known) if path else {}
    written |= _from_environ(environ, known)
    written |= {
        key: (raw, specs[key].on_command_line) for key, raw in vars(flags).items() if key in specs
    }
    for spec in specs.values():
        if spec.default is MISSING and spec.key not in written:
            raise ConfigError(_missing(spec), param=spec.key)
    return build(
        options_class,
        {key: parse_value(spec, *written[key]) for key, spec in specs.items() if key in written},
    )


def options_of_values(options_class: type[T], values: Mapping[str, object]) -> T:
    """Options as a script gives them: by key, each checked as a flag's value is.

    Raises ConfigError, or TypeError for an unknown name.
    """
    specs = specs_of(options_class)
    checked: dict[str, object] = {}
    for name, value in values.items():
        if name not in specs:
            near = nearest(name, _suggestible(specs))
            raise TypeError(f"unknown option {name!r}; the nearest valid one is {near!r}")
        is_none = specs[name].is_optional and value is None
        checked[name] = None if is_none else parse_value(specs[name], value, name)
    return build(options_class, checked)


def refused_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Of our variables those that no command takes: its name, and why, with the mend."""
    known = {key: spec for each in OPTION_SETS for key, spec in specs_of(each).items()}
    specs = {spec.variable: spec for spec in known.values()}
    refused: dict[str, str] = {}
    for name in sorted(name for name in environ if name.startswith(VARIABLE_PREFIX)):
        try:
            if name in specs:
                parse_value(specs[name], environ[name], name)
            else:
                _from_environ({name: environ[name]}, known)
        except ConfigError as error:
            refused[name] = error.message
    return refused


def _from_file(path: Path, known: Mapping[str, OptionSpec]) -> _Written:
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise ConfigError(f"{path} has more than {_FILE_BYTES_MAX} bytes: no configuration")
        table = tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for key, raw in table.items():
        if key not in known:
            hint = "; keys stand at the top, without tables" if isinstance(raw, dict) else ""
            near = nearest(key, _suggestible(known))
            raise ConfigError(
                f"unknown key {key!r} in {path}; the nearest valid one is {near!r}{hint}", param=key
            )
    return {key: (raw, f"{key} in {path}") for key, raw in table.items()}


def _from_environ(environ: Mapping[str, str], known: Mapping[str, OptionSpec]) -> _Written:
    keys = {spec.variable: key for key, spec in known.items()}
    names = [name for name in environ if name.startswith(VARIABLE_PREFIX)]
    for name in names:
        if name not in (*keys, CONFIG_VARIABLE, _CUDART_VARIABLE):
            valid = [known[key].variable for key in _suggestible(known)]
            raise ConfigError(
                f"unknown variable {name}; the nearest valid one is {nearest(name, valid)}",
                param=name,
            )
    return {keys[name]: (environ[name], name) for name in names if name in keys}


def _suggestible(known: Mapping[str, OptionSpec]) -> list[str]:
    return [key for key, spec in known.items() if not spec.hidden]


def _missing(spec: OptionSpec) -> str:
    return (
        f"{spec.key} is missing: give {spec.on_command_line}, set {spec.variable}, or write "
        f"{spec.key} in the file of --config"
    )
