"""The C extensions, built in place. Without them everything works, more slowly."""

import os
import shutil
import subprocess
import sys
import sysconfig

from benchmarks.device_check.record import Record, Skip
from benchmarks.device_check.settings import ROOT, Settings

_BUILD_TIMEOUT_S = 220.0


def measure(settings: Settings, record: Record) -> None:
    del settings
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    built = _built(suffix)
    if built:
        record.note(f"There already: {', '.join(built)}.")
        return
    if not shutil.which(os.environ.get("CC", "cc")) and not shutil.which("gcc"):
        raise Skip("no C compiler: KV is copied by numpy, and the CPU backend computes with torch")
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, timeout=_BUILD_TIMEOUT_S)
    built = _built(suffix)
    record.note(f"Built: {', '.join(built) or 'nothing'}.")
    if done.returncode or not built:
        raise RuntimeError(f"setup.py build_ext ended with {done.returncode}")


def _built(suffix: str) -> list[str]:
    folders = ("runtime_bindings", "proxy")
    found = [path for name in folders for path in (ROOT / name).rglob(f"*{suffix}")]
    return sorted(path.name.removesuffix(suffix) for path in found)
