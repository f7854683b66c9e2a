"""`make demo-neuron` does what docs/neuron.md says of it.

So far this has run on a simulator of libnrt only.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from neuron_kit import has_compiler

ROOT = Path(__file__).parents[2]
DEMO_TIMEOUT_S = 110

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not has_compiler(), reason="the simulator is built by a C compiler"),
]


def test_the_demo_chats_and_kv_goes_from_device_to_device() -> None:
    ended = subprocess.run(
        [sys.executable, "examples/neuron_sim.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEMO_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    answer, receipt = ended.stdout.split("model  ", 1)[1].split("receipt", 1)
    assert len(answer.split()) > 50
    moved = re.search(r"KV moved ([\d,]+) bytes by nrt in [\d.]+ ms", receipt)
    assert moved is not None, receipt
    assert int(moved[1].replace(",", "")) > 0
    assert "the engine nrt (nixl_neuron: not_available; nrt: chosen)" in receipt
