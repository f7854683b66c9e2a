"""One part in a process of its own: `run_part RESULT SETTINGS`, RESULT a file that has begun.

Exit code 0 when it passed or was skipped, 1 when it failed.
"""

import importlib
import json
import signal
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

from benchmarks.device_check.gpu import gpu_words
from benchmarks.device_check.parts import BY_NAME
from benchmarks.device_check.record import Record, Skip
from benchmarks.device_check.result import PartResult
from benchmarks.device_check.settings import Settings


def main(path: Path, settings: Settings) -> int:
    """Run the part that the file names, and write what it found there."""
    result = PartResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    part = BY_NAME[result.name]
    record = Record(result, path)
    if words := gpu_words():
        record.note(words)
    try:
        needs = set(part.needs) - ({"triton"} if settings.device == "cpu" else set())
        missing = [name for name in sorted(needs) if find_spec(name) is None]
        if missing:
            raise Skip(f"not installed: {', '.join(missing)} (see --wheels)")
        importlib.import_module(part.module).measure(settings, record)
        result.state, result.reason = "passed", ""
    except Skip as skip:
        result.state, result.reason = "skipped", str(skip)
    except Exception as error:
        traceback.print_exc()
        result.state, result.reason = "failed", f"{type(error).__name__}: {error}"
    record.save()
    return 1 if result.state == "failed" else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it started is ended, too
    sys.exit(main(Path(sys.argv[1]), Settings.from_json(sys.argv[2])))
