"""The client against the stub endpoint in another process: what it notes is what was sent."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from rich.console import Console

from neuron_di.bench.progress import RunProgress
from neuron_di.bench.run import View, bench
from neuron_di.bench.self_test import measure, running_stub
from neuron_di.bench.settings import make_settings
from neuron_di.clock import Deadline


def test_the_client_counts_what_was_sent():
    with running_stub(20, 0.0) as url:
        run = measure(url, 20, concurrency=8, requests=40)
    columns = run.measured[0].columns()
    assert run.measured[0].counts == {"ok": 40}
    assert set(columns.output_tokens) == set(columns.num_chunks) == {20}
    assert len(columns.gaps_s) == 40 * 19
    assert run.turns[0].most_open == 8
    assert sorted(columns.index) == list(range(40))


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    monkeypatch.setattr("neuron_di.bench.progress.LINE_INTERVAL_S", 0.01)
    monkeypatch.setattr("neuron_di.bench.progress.DRAW_INTERVAL_S", 0.01)

    def shown(is_terminal):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, markup=False)
        view = View()

        async def main():
            settings = make_settings({"urls": (url,), "requests": 30, "input_tokens": "16",
                                      "output_tokens": "10", "names": ("[/x]",)})  # fmt: skip
            async with RunProgress(console, view):
                await bench(settings, None, None, view)

        asyncio.run(main())
        return console.file.getvalue()

    with running_stub(10, 5.0) as url:
        plain, drawn = shown(False), shown(True)
    assert "\x1b" not in plain
    assert "/30 over" in plain
    assert "\x1b" in drawn
    assert "/30 over" in drawn
    assert "[/x]" in drawn  # a name is no markup


@pytest.mark.parametrize("is_measuring", [False, True])
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)],
)
def test_a_signal_ends_it_without_a_word(number, code, is_measuring):
    # Whoever runs this may have been started with nohup.
    command = ["env", "--default-signal=HUP", sys.executable, "-m", "neuron_di", "bench"]
    process = psutil.Popen(
        [*command, "--self-test"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    deadline = Deadline.after(60.0)
    while not (stubs := process.children()) or (is_measuring and not is_connected(stubs[0])):
        assert process.poll() is None
        assert not deadline.has_passed()
        time.sleep(0.01)
    os.killpg(process.pid, number)
    said, _ = process.communicate(timeout=60)  # until the stub, too, has let go of the pipe
    assert (process.returncode, said) == (code, b"")
    psutil.wait_procs(stubs, timeout=60)
    assert has_ended(stubs[0])


def test_a_stub_whose_port_nobody_hears_ends_without_a_word():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "neuron_di.bench.stub_server", "1", "0"]
    with open(writing, "wb") as nobody, subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nobody, stderr=subprocess.PIPE
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def has_ended(process):
    try:  # one whose parent is gone may still be in the list of processes
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_connected(process):
    return any(each.status == psutil.CONN_ESTABLISHED for each in process.net_connections())
