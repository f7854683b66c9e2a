"""The kit's hosts are apart, their cables can be pulled, and nothing of them stays."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hosts_kit import network, require_namespaces

KIT = Path(__file__).parent
TESTS = KIT.parent


def links() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def test_hosts_reach_each_other_unless_a_cable_is_pulled() -> None:
    before = links()
    with network() as net:
        one = net.host("one", data="10.77.0.1")
        two = net.host("two", data="10.77.0.2", control="10.78.0.2")
        with one.entered():
            server = socket.create_server(("10.77.0.1", 8000))
        with server:
            with two.entered(), socket.create_connection(("10.77.0.1", 8000), 10):
                server.accept()[0].close()
            one.pull("data")
            with two.entered(), pytest.raises(OSError):
                socket.create_connection(("10.77.0.1", 8000), 0.2)
            one.plug("data")
            with two.entered(), socket.create_connection(("10.77.0.1", 8000), 10):
                server.accept()[0].close()
        assert links() == before
        holders = [one.space.pid, two.space.pid]
    assert not any(map(psutil.pid_exists, holders))


def test_nothing_stays_when_the_test_run_is_killed() -> None:
    require_namespaces()
    script = (
        "from hosts_kit import network\n"
        "with network() as net:\n"
        "    host = net.host('one', data='10.77.0.1')\n"
        "    import subprocess\n"
        "    slept = subprocess.Popen(host.command('sleep', '600'))\n"
        "    print(host.space.pid, slept.pid, flush=True)\n"
        "    slept.wait()\n"
    )
    paths = f"{KIT}{os.pathsep}{TESTS}"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    left = [psutil.Process(pid) for pid in pids]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    gone, alive = psutil.wait_procs(left, timeout=30)
    assert (len(gone), alive) == (2, [])
