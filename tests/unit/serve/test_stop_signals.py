"""A process that is told to end, once and again."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

# Its program is process 1, as in a container.
APART = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]

# Drains for 0.5 s, then ends by itself.
SCRIPT = """
import asyncio
from neuron_di.stop_signals import stop_on_signals

async def run():
    stop = asyncio.Event()
    stop_on_signals(stop)
    print("ready", flush=True)
    await stop.wait()
    print("draining", flush=True)
    await asyncio.sleep(0.5)
    print("drained", flush=True)

asyncio.run(run())
"""


@pytest.mark.parametrize(
    ("numbers", "code", "said"),
    [
        ([signal.SIGINT], 0, "drained\n"),
        ([signal.SIGTERM, signal.SIGTERM], 0, "drained\n"),
        ([signal.SIGINT, signal.SIGTERM], 0, "drained\n"),
        ([signal.SIGINT, signal.SIGINT], 130, ""),
        ([signal.SIGTERM, signal.SIGINT], 130, ""),
        ([signal.SIGHUP, signal.SIGHUP, signal.SIGTERM], 0, "drained\n"),
    ],
)
def test_only_a_second_interrupt_cuts_the_drain_short(numbers, code, said):
    # The tests may run under nohup.
    script = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n" + SCRIPT
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(numbers[0])
        assert process.stdout.readline() == "draining\n"
        for number in numbers[1:]:
            process.send_signal(number)
        rest = process.stdout.read()
        assert (process.wait(30), rest) == (code, said)


def test_what_outlives_its_terminal_goes_on():
    words = ["nohup", sys.executable, "-c", SCRIPT]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.terminate()
        assert process.communicate()[0] == "draining\ndrained\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.1.2.3"])
def test_a_registry_that_others_reach_is_refused(host):
    words = ["neuron_di", "proxy", "--port=0", f"--registry-bind=tcp://{host}:0"]
    ended = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "asks for no key" in ended.stderr


@pytest.fixture(scope="module")
def apart():
    """What runs a program as the first process of its own world, as a container does."""
    words = [shutil.which("unshare") or "true", *APART[1:]]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives no namespace of process ids")
    return words


@pytest.mark.parametrize("command", [["proxy"], ["worker", "MODEL", "--role=decode"]])
def test_a_containers_first_process_ends_by_sigterm_also_while_it_starts(apart, tmp_path, command):
    file = tmp_path / "config.toml"
    os.mkfifo(file)  # it starts for as long as we write
    words = [*apart, sys.executable, "-m", "neuron_di", *command, f"--config={file}"]
    with subprocess.Popen(words) as outer, file.open("w"):
        with open(f"/proc/{outer.pid}/task/{outer.pid}/children") as children:
            os.kill(int(children.read()), signal.SIGTERM)
        try:
            assert outer.wait(60) == 128 + signal.SIGTERM
        finally:
            outer.kill()


def test_ctrl_c_while_modules_are_loaded_shows_no_traceback(tmp_path):
    (tmp_path / "argparse.py").write_text("print('loads', flush=True)\nimport time\ntime.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "neuron_di", "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    with process:
        assert process.stdout.readline() == b"loads\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (-signal.SIGINT, b"")


ADOPTED = """
import os, subprocess
from neuron_di.child import reap_adopted

subprocess.run(["sh", "-c", "true & exec true"], check=True)  # which leaves one to us
os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
reap_adopted(())
try:
    print(os.waitpid(-1, 0))
except ChildProcessError:
    print("none is left")
own = subprocess.Popen(["sh", "-c", "exit 7"])
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
reap_adopted({own.pid})
print(own.wait())
"""


def test_a_containers_first_process_lets_go_of_what_its_children_left(apart):
    ended = subprocess.run(
        [*apart, sys.executable, "-c", ADOPTED],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("none is left\n7\n", "")
