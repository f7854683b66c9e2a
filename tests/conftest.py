"""What holds for every test: its environment, and who runs beside whom."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# What tests share asserts too, and should say as much where it fails.
_FILES = Path(__file__).parent.rglob("*.py")
_SHARED = {file.stem for file in _FILES if not file.name.startswith(("test_", "conftest.", "__"))}
# Not what the interpreter has read by now: a sitecustomize, which Debian's Python has of its own.
pytest.register_assert_rewrite("tests", *_SHARED - sys.modules.keys())

# Nothing is measured here: on a busy machine an example may take any time.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# Torch's threads spin while they wait: with more of them than free cores all are slow. So there is
# one, and where a test is about several they sleep instead.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Each test's processes load torch: without kept byte code each of them compiles it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if sys.flags.optimize:  # python -O -m pytest: the processes that tests start drop asserts, too
    os.environ["PYTHONOPTIMIZE"] = str(sys.flags.optimize)
# What a shell starts with & ignores Ctrl-C, and so would all that it starts: some of it is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing is garbage while tests are collected: to look for it takes a seventh of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def little_to_look_through() -> None:
    """What is there before a file's tests is no garbage. Each collection would look through all of
    it again, most of it torch's and pytest's: half a second, some hundred times."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests one process does in one go, in the order in which they are written.

    A server's tests share it within their file, those of a cluster within their kind. The rest
    goes together by what it is about, so that what one test leaves behind the same others see in
    every run. Who is done takes the next of what is left, the largest first and single
    simulations at the end, so that all are done at the same time.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByKind(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, _ = nodeid.partition("::")
            if nodeid.startswith("tests/sim/"):
                return nodeid
            if nodeid.startswith("tests/e2e/"):
                return file
            if nodeid.startswith(("tests/chaos/", "tests/dynamic/")):
                return "clusters"
            kinds = ("tests/contract/", "tests/etcd/", "tests/unit/backends/", "tests/unit/doctor/")
            return next((kind for kind in kinds if nodeid.startswith(kind)), "parts")

    return ByKind(config, log)
