"""`neuron-di bench-transfer`: what it does with its flags."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import msgspec
from rich.console import Console

from neuron_di.config import TransferOptions
from neuron_di.config.option import PORT_MAX
from neuron_di.errors import ConfigError
from neuron_di.obs import setup_logging
from neuron_di.transfer_bench.control_link import KEY_CHARS_MIN, ControlLink, make_key
from neuron_di.transfer_bench.flags import AUTO, KEY_VARIABLE, READY_WORDS
from neuron_di.transfer_bench.listener import serve_once
from neuron_di.transfer_bench.measure import (
    DEFAULT_REPEATS,
    DEFAULT_SHAPES,
    measure,
    measure_on_this_host,
)
from neuron_di.transfer_bench.measuring_end import MeasuringEnd
from neuron_di.transfer_bench.report import TransferReport, print_report, words_of
from neuron_di.transfer_bench.resources import region_bytes
from neuron_di.transfer_bench.shape import Shape
from neuron_di_bindings.process import end_with_parent

REPEATS_MAX = 10_000
POOL_MIB_MAX = 1 << 14
_KEY_FILE_BYTES_MAX = 4096


def run(flags: argparse.Namespace) -> int:
    """Run what the flags say. Returns the exit code: 1 where an engine does not work.

    Raises ConfigError or PeerError where nothing could be measured at all.
    """
    setup_logging("bench-transfer", "warning", "text")
    if flags.serve:
        _serve(flags)
        return 0
    options = _options_of(flags)
    engines = flags.engines or [AUTO]
    shapes = [Shape.of(text) for text in flags.shapes or DEFAULT_SHAPES]
    repeats = DEFAULT_REPEATS if flags.repeats is None else flags.repeats
    if not 1 <= repeats <= REPEATS_MAX:
        raise ConfigError(f"--repeats goes from 1 to {REPEATS_MAX}")
    if flags.pool_mib is not None and not 1 <= flags.pool_mib <= POOL_MIB_MAX:
        raise ConfigError(f"--pool-mib goes from 1 to {POOL_MIB_MAX}")
    pool_bytes = region_bytes() if flags.pool_mib is None else flags.pool_mib << 20
    console = Console(highlight=False, markup=False, emoji=False)
    progress = Console(stderr=True, highlight=False)
    with progress.status("", refresh_per_second=2) as status:
        if flags.connect is None:
            names = [str(shape) for shape in shapes]
            report = measure_on_this_host(
                engines,
                names,
                repeats=repeats,
                verify=flags.verify,
                pool_bytes=pool_bytes,
                options=options,
                tell=status.update,
            )
        else:
            report = _measure_there(
                flags, options, engines, shapes, repeats, pool_bytes, status.update
            )
    if flags.json:
        console.out(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print_report(report, console)
    for words in words_of(report.failures):
        sys.stderr.write(f"neuron-di: {words}\n")
    return 1 if report.failures else 0


def _serve(flags: argparse.Namespace) -> None:
    if flags.parent_pid is not None:
        end_with_parent(flags.parent_pid)
    if not 0 <= flags.port <= PORT_MAX:
        raise ConfigError(f"--port goes from 0 to {PORT_MAX}")
    measuring = {
        "--engine": flags.engines,
        "--shape": flags.shapes,
        "--repeats": flags.repeats,
        "--pool-mib": flags.pool_mib,
        "--verify": flags.verify,
        "--json": flags.json,
    }
    if given := [name for name, value in measuring.items() if value not in (None, False)]:
        raise ConfigError(f"{', '.join(given)}: the other end measures, and is told so there")
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    key = _given_key(flags)
    made = key is None
    key = key or make_key()

    def tell(words: str) -> None:
        console.print(words)
        if made and words.startswith(READY_WORDS):
            console.print(f"key for --key-file or {KEY_VARIABLE} at the other end: {key}")

    serve_once(flags.host, flags.port, key, tell, flags.parent_pid, _options_of(flags))


def _measure_there(
    flags: argparse.Namespace,
    options: TransferOptions,
    engines: list[str],
    shapes: list[Shape],
    repeats: int,
    pool_bytes: int,
    tell: Callable[[str], None],
) -> TransferReport:
    host, _, port = flags.connect.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
        raise ConfigError(f"--connect is HOST:PORT, not {flags.connect[:100]!r}")
    key = _given_key(flags)
    if key is None:
        raise ConfigError(f"the serving end printed a key: give it in {KEY_VARIABLE} or --key-file")
    end = MeasuringEnd(ControlLink.ask(host.strip("[]"), int(port), key), options=options)
    try:
        return measure(
            end,
            engines,
            shapes,
            repeats=repeats,
            verify=flags.verify,
            pool_bytes=pool_bytes,
            peer=flags.connect,
            tell=tell,
        )
    finally:
        end.close()


def _options_of(flags: argparse.Namespace) -> TransferOptions:
    """ConfigError where they do not fit, as for a worker."""
    given = {}
    for field in fields(TransferOptions):
        value = getattr(flags, field.name, None)
        if value is None:
            continue
        least, most = field.metadata["at_least"], field.metadata["at_most"]
        if most is not None and not least <= value <= most:
            raise ConfigError(f"--{field.name.replace('_', '-')} goes from {least} to {most}")
        given[field.name] = value
    return TransferOptions(**given)


def _given_key(flags: argparse.Namespace) -> str | None:
    """From the file, else from the environment. ConfigError for one that cannot be read."""
    key = os.environ.get(KEY_VARIABLE)
    if flags.key_file is not None:
        try:
            with Path(flags.key_file).open("rb") as file:
                key = file.read(_KEY_FILE_BYTES_MAX).decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --key-file {flags.key_file}: {error}") from None
    if key is None:
        return None
    key = key.strip()
    if len(key) < KEY_CHARS_MIN:
        raise ConfigError(f"a key has at least {KEY_CHARS_MIN} characters")
    return key
