"""That the suite begins wherever it is run."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_it_begins_where_the_interpreter_has_a_sitecustomize():
    """As Debian's has, and as `make test-uncompiled` brings one."""
    environ = os.environ | {"PYTHONPATH": str(TESTS / "uncompiled")}
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    done = subprocess.run(
        (*command, TESTS / "unit/wire/test_leg_messages.py"),
        cwd=TESTS.parent,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
