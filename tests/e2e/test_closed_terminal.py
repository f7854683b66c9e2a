"""`neuron-di serve` in a terminal that is closed, or whose connection is lost."""

import asyncio
import fcntl
import os
import re
import signal
import sys
import termios
from pathlib import Path

import pytest
from openai_kit import Client, eventually
from process_kit import children_of, session_of_many

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

NUM_TOKENS = 1500


async def test_what_runs_is_finished(llama: Path) -> None:
    terminal, its_end = os.openpty()
    words = ["-m", "neuron_di", "serve", str(llama), "--port=0", "--threads=1"]
    serving = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(its_end)
    try:
        url = await _address(terminal)
        async with session_of_many() as session:
            client = Client(session, url, "tiny-llama")
            params = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
            async with client.post("def main(", **params) as response:
                body = await response.content.readline()
                os.close(terminal)
                body += await response.read()
        events = body.decode().removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert len(events) == NUM_TOKENS + 2
        assert await asyncio.wait_for(serving.wait(), 60) == 0
        assert children_of(serving.pid) == []
    finally:
        if serving.returncode is None:
            serving.kill()
            await serving.wait()
        await eventually(lambda: _none_if_any(serving.pid))


def _take_terminal() -> None:
    """In the child: its standard input is the terminal of its session, as a shell has it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


async def _address(terminal: int) -> str:
    """What is written there is read until it says where it serves."""
    text = ""
    while not (found := re.search(r"(http://[\d.:]+)/v1", text)):
        text += (await asyncio.to_thread(os.read, terminal, 4096)).decode(errors="replace")
    return found[1]


async def _none_if_any(pid: int) -> bool | None:
    return None if children_of(pid) else True
