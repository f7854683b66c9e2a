"""`python -m benchmarks.device_check`: the parts one after the other, whatever becomes of each."""

import argparse
import json
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.device_check.budget import Budget
from benchmarks.device_check.child import run_with_deadline
from benchmarks.device_check.options import (
    FULL_SHAPES,
    QUICK_SHAPES,
    SMALL_SHAPES,
    command_words,
    make_parser,
)
from benchmarks.device_check.origin import machine_words, source_words
from benchmarks.device_check.parts import PARTS, Part
from benchmarks.device_check.report import (
    JSON_NAME,
    MARKDOWN_NAME,
    Report,
    ReportError,
    merge,
    shortfalls,
)
from benchmarks.device_check.result import Origin, PartResult
from benchmarks.device_check.settings import ROOT, Settings
from benchmarks.device_check.surroundings import (
    CannotRun,
    environment,
    rehearsal_environment,
    unpacked_wheels,
)

LOG_NAME = "log.txt"
LOG_BYTES_MAX = 200_000  # of each part
_LAST_LINES = 25


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        if options.merge:
            report = merge(options.merge, options.out)
            print(f"written: {MARKDOWN_NAME}, {JSON_NAME} in {options.out}")
            return 0 if report.is_good() else 1
        with ExitStack() as stack:
            return run(options, command_words(options, parser.parse_args([])), stack)
    except (CannotRun, ReportError) as error:
        print(f"device-check: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace, command: str, stack: ExitStack) -> int:
    is_rehearsal = options.rehearse or options.device == "cpu"
    out: Path = options.out.resolve()
    if is_rehearsal and out.is_relative_to(ROOT / "benchmarks"):
        raise CannotRun("a rehearsal's figures mean nothing and are not kept in benchmarks")
    budget = Budget(options.minutes)
    sites = [stack.enter_context(unpacked_wheels(options.wheels))] if options.wheels else []
    environ = environment(sites)
    if options.rehearse:
        environ = rehearsal_environment(environ)
    report = Report.read(out)
    out.mkdir(parents=True, exist_ok=True)
    options.models.mkdir(parents=True, exist_ok=True)
    origin = Origin(source_words(), machine_words(), command, is_rehearsal)
    settings = settings_of(options, out)
    print(f"{origin.source}\n{origin.machine}", flush=True)
    parts = [part for part in PARTS if part.name in (options.parts or [part.name])]
    parts = [part for part in parts if part.name not in options.skip]
    if options.missing:
        ran = {each.name for each in report.in_order() if each.state != "skipped"}
        parts = [part for part in parts if part.name not in ran]
    for number, part in enumerate(parts, 1):
        print(f"[{number}/{len(parts)}] {part.name}: {part.title}", flush=True)
        result = run_part(part, settings, origin, budget, environ)
        report.add(result)
        report.write(out)
        words = f"  {result.state} in {result.wall_s:.0f} s"
        print(words + (f": {result.reason}" if result.reason else ""), flush=True)
        for shortfall in shortfalls(result):
            print(f"  UNMET {shortfall}", flush=True)
    print(f"written: {MARKDOWN_NAME}, {JSON_NAME}, {LOG_NAME} in {options.out}")
    return 0 if report.is_good() else 1


def settings_of(options: argparse.Namespace, out: Path) -> Settings:
    shapes = tuple(options.shapes or (QUICK_SHAPES if options.quick else FULL_SHAPES))
    if options.rehearse or options.device == "cpu":
        shapes = SMALL_SHAPES
    return Settings(
        shapes=shapes,
        models=str(options.models.resolve()),
        out=str(out),
        is_rehearsal=options.rehearse,
        is_quick=options.quick,
        wants_mps=options.mps,
        device=options.device,
    )


def run_part(
    part: Part, settings: Settings, origin: Origin, budget: Budget, environ: dict[str, str]
) -> PartResult:
    """In a process of its own, until its deadline. Whatever it ends with is a result."""
    result = PartResult(name=part.name, origin=origin, started_unix_s=time.time())
    deadline_s = budget.deadline_s(part.times)
    if deadline_s is None:
        result.state, result.reason = "skipped", budget.words(part.times)
        return result
    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        path, log = Path(folder) / "result.json", Path(folder) / "log"
        path.write_text(json.dumps(result.as_json()), encoding="utf-8")
        ended = run_with_deadline(
            [sys.executable, "-m", "benchmarks.device_check.run_part", str(path),
             settings.as_json()],
            cwd=ROOT, environ=environ, log=log, deadline_s=deadline_s,
        )  # fmt: skip
        text = hide_paths(path.read_text(encoding="utf-8"), settings)
        result = PartResult.from_json(json.loads(text))
        output = log.read_bytes()[-LOG_BYTES_MAX:].decode(errors="replace")
    result.wall_s = ended.wall_s
    if ended.code is None and deadline_s < part.times.deadline_s:
        result.state, result.reason = "skipped", f"no time: cut off after {deadline_s:.0f} s"
    elif ended.code is None:
        result.state, result.reason = "failed", f"it ran past its {deadline_s:.0f} s"
    elif ended.code and result.state != "failed":
        result.state, result.reason = "failed", f"its process ended with {ended.code}"
    elif ended.code and result.reason == "it did not end":
        result.reason = f"its process ended with {ended.code}"
    if ended.num_left:
        result.notes.append(f"{ended.num_left} processes that it had left behind were ended.")
    output = hide_paths(output, settings)
    if result.state == "failed":
        result.last_lines = output.strip().splitlines()[-_LAST_LINES:]
    with (Path(settings.out) / LOG_NAME).open("a", encoding="utf-8") as file:
        file.write(f"==== {part.name}: {result.state}\n{output}\n")
    return result


def hide_paths(text: str, settings: Settings) -> str:
    """A report may be shown to others: whose machine it was is nobody's business."""
    names = {
        settings.models: "MODELS",
        settings.out: "OUT",
        str(ROOT): ".",
        sys.prefix: "PYTHON",
        sys.base_prefix: "PYTHON",
        tempfile.gettempdir(): "TMP",
    }
    for path, name in names.items():
        text = text.replace(path, name)
    return text


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part that runs is ended, too
    sys.exit(main())
