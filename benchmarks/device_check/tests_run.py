"""A part that runs tests of the project, with a configuration that asks for no plugin.

Each file has a pytest of its own, a few at a time: most of the time goes into compiling kernels.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.device_check.record import Record, Skip
from benchmarks.device_check.settings import ROOT

_FAILURES_TOLD = 20
# As pyproject.toml has it, but for pytest-asyncio, which a machine may lack: these tests have no
# use for it. A warning of another version's library is no failure here.
_CONFIG = """\
[pytest]
addopts = -rs --strict-markers
timeout = 300
markers =
    e2e: starts worker processes
    minutes: takes too long for each run of the suite
"""


def run_tests(
    record: Record, paths: Sequence[str], *, num_processes: int = 1, root: Path = ROOT
) -> None:
    """Files, or folders of them. RuntimeError where a test fails, Skip where all were skipped."""
    files = [file for path in paths for file in _files(root / path)]
    if not files:
        raise Skip(f"there is no {' or '.join(paths)}")
    with tempfile.TemporaryDirectory(prefix="device-check-tests-") as folder:
        config = Path(folder) / "pytest.ini"
        config.write_text(_CONFIG, encoding="utf-8")

        def run(number: int) -> Path:
            found = Path(folder) / f"{number}.xml"
            command = [sys.executable, "-m", "pytest", "-q", f"-c{config}", f"--rootdir={root}"]
            command += ["-p", "no:cacheprovider", f"--confcutdir={root}", f"--junitxml={found}"]
            log = found.with_suffix(".log")
            with log.open("wb") as file:
                subprocess.run([*command, str(files[number])], cwd=root, stdout=file, stderr=file)
            sys.stdout.write(log.read_text(encoding="utf-8", errors="replace"))
            sys.stdout.flush()
            return found

        with ThreadPoolExecutor(num_processes) as pool:
            found = list(pool.map(run, range(len(files))))
        tell(record, [path for path in found if path.exists()])
        broken = [file.name for file, path in zip(files, found, strict=True) if not path.exists()]
        if broken:
            raise RuntimeError(f"pytest ended before any test of {', '.join(broken)}")


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("test_*.py"))
    return [path] if path.exists() else []


def tell(record: Record, paths: Sequence[Path]) -> None:
    """What pytest's JUnit files say."""
    cases = [case for path in paths for case in ElementTree.parse(path).getroot().iter("testcase")]
    failed = [case for case in cases if _child(case, "failure", "error") is not None]
    skipped = [case for case in cases if _child(case, "skipped") is not None]
    num_passed = len(cases) - len(failed) - len(skipped)
    record.note(f"{num_passed} passed, {len(failed)} failed, {len(skipped)} skipped.")
    rows = [[_name(case), _message(case, "failure", "error")] for case in failed[:_FAILURES_TOLD]]
    if rows:
        record.table("Failures", ["test", "first line"], rows)
    reasons: dict[str, int] = {}
    for case in skipped:
        words = _message(case, "skipped")
        reasons[words] = reasons.get(words, 0) + 1
    if reasons:
        rows = [[words, str(number)] for words, number in sorted(reasons.items())]
        record.table("Skipped", ["reason", "tests"], rows)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(cases)} tests failed")
    if not num_passed:
        raise Skip("; ".join(reasons) or "there was no test")


def _child(case: ElementTree.Element, *names: str) -> ElementTree.Element | None:
    return next((each for each in case if each.tag in names), None)


def _message(case: ElementTree.Element, *names: str) -> str:
    found = _child(case, *names)
    words = "" if found is None else found.get("message", "")
    return (words.strip().splitlines() or [""])[0][:300].replace(str(ROOT), ".")


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '')}"
