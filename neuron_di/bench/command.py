"""`neuron-di bench`: what it does with its flags.

Exit codes: 0 all requests were answered, 1 some failed or figures could not be written, 2 the run
could not start; 128 and the signal's number when it was interrupted, after the figures of what was
measured.
"""

import argparse
import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_di.bench.flags import KEY_VARIABLE
from neuron_di.config import raise_descriptor_limit
from neuron_di.errors import ConfigError, NeuronDiError

if TYPE_CHECKING:
    from neuron_di.bench.document import Document
    from neuron_di.bench.run import Run
    from neuron_di.bench.settings import Settings
    from neuron_di.bench.traces import Trace

_OWN = ("command", "preset", "json", "plot", "self_test", "class_bounds")  # no settings of a run
_WITH_SELF_TEST = ("command", "self_test", "slo_itl_percent")  # the last is never empty


def run_bench_command(flags: argparse.Namespace) -> int:
    """Run what the flags say. Returns the exit code. Raises ConfigError."""
    from rich.console import Console

    from neuron_di.bench.plot import require_plot
    from neuron_di.bench.report import print_report
    from neuron_di.bench.summary import summarize

    if flags.self_test:
        _refuse_beside_self_test(flags)
        from neuron_di.bench.self_test import run_self_test

        return run_self_test(Console(highlight=False))
    settings = settings_of(flags)
    trace = _trace(settings)
    for path in (flags.json, flags.plot):
        _require_writable(path)
    if flags.plot:
        require_plot(Path(flags.plot))
    run, signal_number = _run(settings, trace, os.environ.get(KEY_VARIABLE))
    if run is None:
        return 128 + signal_number
    document = summarize(run)
    console = Console(highlight=False, markup=False, emoji=False)
    try:
        print_report(document, console)
    finally:  # whoever reads the report may have seen enough, or its disk be full
        _write(document, flags)
    if signal_number:
        return 128 + signal_number
    return 1 if any(each.figures.num_failed for each in document.endpoints) else 0


def _refuse_beside_self_test(flags: argparse.Namespace) -> None:
    """No flag is passed over: whoever gave --json would look for a file that nobody wrote."""
    spelt = {"urls": "url", "names": "name"}
    given = [
        f"--{spelt.get(name, name).replace('_', '-')}"
        for name, value in vars(flags).items()
        if name not in _WITH_SELF_TEST and value not in (None, [])
    ]
    if given:
        raise ConfigError(f"{', '.join(given)}: --self-test takes no other flags")


def settings_of(flags: argparse.Namespace) -> "Settings":
    """The run that the flags ask for. ConfigError names the flag that cannot be."""
    from neuron_di.bench.settings import make_settings
    from neuron_di.bench.slo import Slo

    given: dict[str, Any] = {
        name: value
        for name, value in vars(flags).items()
        if name not in _OWN and not name.startswith("slo_")
    }
    if not flags.urls:
        raise ConfigError("an endpoint is needed, as in: bench --url http://127.0.0.1:8000")
    given["urls"] = tuple(flags.urls)
    given["names"] = None if flags.names is None else tuple(flags.names)
    given["trace"] = None if flags.trace is None else Path(flags.trace)
    given["class_bounds"] = _bounds(flags.class_bounds)
    given["slo"] = Slo.checked(
        ttft_ms=flags.slo_ttft_ms,
        itl_ms=flags.slo_itl_ms,
        itl_percent=flags.slo_itl_percent,
        tpot_ms=flags.slo_tpot_ms,
        e2e_ms=flags.slo_e2e_ms,
    )
    return make_settings(given, flags.preset)


def _bounds(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        short, medium = map(int, text.split(","))
    except ValueError:
        raise ConfigError(f"--class-bounds {text!r} are no two numbers, as in 512,4096") from None
    return short, medium


def _trace(settings: "Settings") -> "Trace | None":
    from neuron_di.bench.traces import read_trace

    if settings.trace is None:
        return None
    return read_trace(settings.trace, block_tokens=settings.trace_block_tokens)


def _require_writable(path: str | None) -> None:
    """Figures that cannot be written are found out before they are measured."""
    if path is None:
        return
    file, folder = Path(path), Path(path).parent
    try:
        if not folder.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {folder}")
        if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
            raise ConfigError(f"{path} cannot be written")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _run(settings: "Settings", trace: "Trace | None", key: str | None) -> "tuple[Run | None, int]":
    """The run, None where nothing was measured, and the signal that ended it, or 0."""
    import uvloop
    from rich.console import Console

    from neuron_di.bench.progress import RunProgress
    from neuron_di.bench.run import View, bench

    raise_descriptor_limit()  # each open request has a connection
    begun: list[Run] = []
    signals: list[int] = []

    async def until_over() -> None:
        loop, task, view = asyncio.get_running_loop(), asyncio.current_task(), View()
        assert task is not None

        def stop(number: int) -> None:
            signals.append(number)
            loop.remove_signal_handler(number)  # a second one ends at once
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        async with RunProgress(Console(stderr=True, highlight=False, markup=False), view):
            try:
                await bench(settings, trace, key, view, begun.append)
            except asyncio.CancelledError:
                if not signals:
                    raise

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(until_over())
    if begun and signals:
        begun[0].is_interrupted = True
    return begun[0] if begun else None, signals[0] if signals else 0


def _write(document: "Document", flags: argparse.Namespace) -> None:
    from neuron_di.bench.document import to_json
    from neuron_di.bench.plot import plot

    if flags.json:
        try:
            Path(flags.json).write_bytes(to_json(document))
        except OSError as error:
            raise NeuronDiError(f"--json {flags.json}: {error.strerror}") from None
    if flags.plot:
        plot(document, Path(flags.plot))
