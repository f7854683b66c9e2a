"""What a child finds of its parent's options."""

import sys

import pytest

from neuron_di.child import Child
from neuron_di.clock import Deadline

SAYS = """import os
assert not os.environ.get('NEURON_DI_CONFIG')
print('{"event": "ready"}', flush=True)"""


async def test_a_file_of_options_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told all of them: what was written there since is for the next start."""
    monkeypatch.setenv("NEURON_DI_CONFIG", "site.toml")
    child = Child("decode-0", lambda: [sys.executable, "-c", SAYS])
    try:
        await child.start(Deadline.after(30.0), lambda _name, _report: None)
    finally:
        child.kill()
        await child.gone()
