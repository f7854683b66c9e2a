"""A command whose streams were closed, or spell little, or whose folder is gone: no crash."""

import http.client
import os
import subprocess
import sys
import time
from contextlib import closing, suppress

import psutil
import pytest
from msgspec import structs
from proxy_double import ProxyDouble, record, report

from neuron_di.clock import Deadline
from neuron_di_proxy.status import WorkerReport

START = [sys.executable, "-m", "neuron_di"]


def is_served_by(process):
    """Whether it answers at one of the ports that it listens on."""
    for socket in process.net_connections(kind="tcp4"):
        with suppress(OSError, http.client.HTTPException):
            if socket.status == psutil.CONN_LISTEN:
                with closing(http.client.HTTPConnection(*socket.laddr, timeout=5)) as connection:
                    connection.request("GET", "/live")
                    return connection.getresponse().status == 200
    return False


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_proxy_ends_well_whatever_was_closed(closed):
    """Libraries take sockets with the numbers of these streams for their own."""
    command = f"exec {sys.executable} -m neuron_di proxy --port=0 {closed}"
    process = psutil.Popen(["sh", "-c", command])
    try:
        deadline = Deadline.after(60.0)
        while not is_served_by(process):
            assert process.poll() is None
            assert not deadline.has_passed()
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        with suppress(psutil.NoSuchProcess):
            process.kill()
            process.wait()


def test_a_terminal_that_spells_ascii_only_gets_the_rest_replaced():
    with ProxyDouble() as proxy:
        long = structs.replace(record("decode", 0), layout_digest="a" * 64)
        proxy.status = report(WorkerReport(record=long))
        environ = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        done = subprocess.run(
            [*START, "status", "--url", proxy.url],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert "aaaa?" in done.stdout


def test_a_reader_of_a_table_that_has_seen_enough_is_no_failure():
    reading, writing = os.pipe()
    os.close(reading)
    with ProxyDouble() as proxy, os.fdopen(writing, "wb") as output:
        proxy.status = report(WorkerReport(record=record("decode", 0)))
        done = subprocess.run(
            [*START, "status", "--url", proxy.url],
            stdout=output,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_folder_that_was_deleted_is_named(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    done = subprocess.run(
        ["sh", "-c", f'cd "{folder}" && rmdir "{folder}" && exec "$@"', "sh", *START, "status"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "neuron-di: the current folder was deleted: change to another\n"
