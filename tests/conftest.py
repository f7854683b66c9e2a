"""What holds for every test: its environment, and who runs beside whom."""

import os
import sys
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# Torch's threads spin while they wait: with more of them than free cores all are slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each test's processes load torch: without kept byte code each of them compiles it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if sys.flags.optimize:  # python -O -m pytest: the processes that tests start drop asserts, too
    os.environ["PYTHONOPTIMIZE"] = str(sys.flags.optimize)

_SERVERS = ("tests/e2e/", "tests/chaos/", "tests/dynamic/", "tests/sim/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2`: tests of whole servers, real or simulated, beside all others.

    So which test runs in which process, and after which, is the same in every run.
    """
    from xdist.scheduler import LoadScopeScheduling

    class TwoHalves(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "servers" if nodeid.startswith(_SERVERS) else "parts"

    return TwoHalves(config, log)
