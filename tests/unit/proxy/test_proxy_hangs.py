"""A proxy whose event loop hangs ends, so that whoever started it starts it again."""

import subprocess
import sys

SCRIPT = """
import asyncio, time
from neuron_di.config import ProxyOptions
from neuron_di_proxy import process

async def wait_for_ever(*_, **__):
    await asyncio.sleep(0.01)
    time.sleep(1000)

process.serve = wait_for_ever
url = ("http://127.0.0.1:1",)
process.run_proxy(ProxyOptions(port=0, prefill_urls=url, decode_urls=url, hang_timeout_s=1))
"""


def test_it_ends_and_says_where_it_hung() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "Timeout (0:00:01)" in ended.stderr
    assert "in wait_for_ever" in ended.stderr
