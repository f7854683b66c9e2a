"""Moves KV between two processes of this machine, as workers do, and says how fast."""

import errno
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from neuron_di.config import DoctorOptions, TransferOptions
from neuron_di.doctor.finding import Fact, Finding
from neuron_di.doctor.machine import Machine
from neuron_di.errors import NeuronDiError

if TYPE_CHECKING:  # torch is loaded where something is moved
    from neuron_di.transfer_bench.report import Failure, Figures

SHAPES = ("64KiB", "64MiB")
REPEATS = 5
POOL_BYTES = 128 << 20
_AUTO = ("auto", "shm", "tcp")  # what a pair chooses, and what moves bytes here and to other hosts
# Between devices: the check of Neuron's memory sends, where there are such devices.
_NOT_HERE = {"nrt": "it moves KV between Neuron devices, which the checks neuron.* look at"}

_MORE_FILES = (
    "Raise the limit nofile (ulimit -n, LimitNOFILE= of a systemd unit): servers need thousands."
)


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """A finding for each engine. Every byte is compared."""
    if not options.transfer_test:
        yield Finding.skipped("transfer.test", "--no-transfer-test was given")
        return
    given = options.kv_transfer
    named = _AUTO if given.is_auto else given.transfer
    for name in named:
        if name in _NOT_HERE:
            yield Finding.skipped(f"transfer.{name}", f"{name}: {_NOT_HERE[name]}")
    engines = [name for name in named if name not in _NOT_HERE]
    if engines:
        yield from _moved(engines, given)


def _moved(engines: list[str], options: TransferOptions) -> Iterator[Finding]:
    from neuron_di.transfer_bench.measure import measure_on_this_host

    try:
        report = measure_on_this_host(
            engines, SHAPES, repeats=REPEATS, verify=True, pool_bytes=POOL_BYTES, options=options
        )
    except OSError as error:
        yield Finding.failed(
            "transfer.test",
            f"KV could not be moved at all: {error.strerror or error}",
            _mend(str(error)),
            facts={"errno": error.errno},
        )
        return
    except NeuronDiError as error:
        yield Finding.failed(
            "transfer.test", f"KV could not be moved at all: {error.message}", _mend(error.message)
        )
        return
    for engine in dict.fromkeys(figures.engine for figures in report.figures):
        yield _speed(engine, [each for each in report.figures if each.engine == engine])
    yield from _failures(report.failures)


def _failures(failures: "Sequence[Failure]") -> Iterator[Finding]:
    """One for each engine and reason, whatever the shapes."""
    shapes: dict[tuple[str, str, str], list[Fact]] = {}
    for each in failures:
        shapes.setdefault((each.engine, each.code, each.message), []).append(each.shape)
    for (engine, code, message), names in shapes.items():
        yield Finding.failed(
            f"transfer.{engine}",
            f"{engine} does not move {' and '.join(map(str, names))}: {message}",
            _mend(message),
            facts={"engine": engine, "code": code, "shapes": names},
        )


def _speed(engine: str, figures: "list[Figures]") -> Finding:
    first, last = figures[0], figures[-1]
    if last.gb_per_s is None:
        says = f"{engine} hands KV over without copying it, in {last.ms_p50:.2f} ms"
    else:
        where = " over loopback" if engine == "tcp" else ""
        says = f"{engine} moves {last.gb_per_s:.2f} GB/s{where}, and {first.shape} in "
        says += f"{first.ms_p50:.2f} ms"
    moved: list[Fact] = [
        {
            "shape": each.shape,
            "ms": round(each.ms_p50, 3),
            "memcpy_ms": round(each.memcpy_ms, 3),
            "gb_per_s": each.gb_per_s and round(each.gb_per_s, 3),
        }
        for each in figures
    ]
    return Finding.ok(f"transfer.{engine}", says, facts={"engine": engine, "moved": moved})


def _mend(words: str) -> str:
    if os.strerror(errno.EMFILE) in words:
        return _MORE_FILES
    if "too large" in words:  # for the memory that is there
        return "Free some memory, or leave the test out with --no-transfer-test."
    return (
        "Try it alone: `neuron-di bench-transfer --engine NAME`; docs/transfer.md tells what each "
        "engine needs."
    )
