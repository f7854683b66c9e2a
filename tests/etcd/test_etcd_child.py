"""`--etcd auto`: an etcd of our own, which nothing of ours outlives."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile

import psutil
import pytest
from etcd_kit import require_etcd
from watching import until

from neuron_di.errors import ConfigError
from neuron_di.etcd.child import FOLDER_PREFIX, STARTS_MAX, ChildEtcd, free_ports
from neuron_di.etcd.client import EtcdClient
from neuron_di.own_folder import sweep

OWNER = """
import asyncio
from neuron_di.etcd.child import ChildEtcd

async def main():
    async with ChildEtcd() as etcd:
        print(etcd.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    require_etcd()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: [path.name for path in tmp_path.glob(f"{FOLDER_PREFIX}*")]


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def broken_program(tmp_path):
    program = tmp_path / "bin" / "etcd"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/starts\n'
        "echo starting >&2; echo bind: address already in use >&2; exit 3\n"
    )
    program.chmod(0o755)
    return program


async def test_it_answers_comes_back_and_is_gone_with_its_folder(folders):
    async with ChildEtcd() as etcd:
        port = int(etcd.address.rpartition(":")[2])
        assert 1024 < port < 32768
        async with EtcdClient([etcd.address], call_timeout_s=20) as client:
            await client.put(b"/a", b"stays")
            first_pid = etcd.pid
            os.kill(first_pid, signal.SIGKILL)
            assert (await client.get(b"/a")).value == b"stays"
            assert etcd.pid != first_pid
        assert len(folders()) == 1
        pid = etcd.pid
    assert not psutil.pid_exists(pid)
    assert folders() == []


async def test_two_owners_have_one_each():
    async with ChildEtcd() as one, ChildEtcd() as two:
        assert one.address != two.address
        async with EtcdClient([one.address]) as client, EtcdClient([two.address]) as other:
            await client.put(b"/a", b"x")
            assert await other.get(b"/a") is None


async def test_a_killed_owner_leaves_none_and_the_next_one_sweeps(folders, tmp_path):
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        OWNER,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()},
    )
    pid = int(await owner.stdout.readline())
    assert len(folders()) == 1
    owner.kill()
    await owner.wait()
    await until(lambda: is_gone(pid))
    async with ChildEtcd():
        assert [name.split("-")[3] for name in folders()] == [str(os.getpid())]


async def test_a_folder_is_swept_only_when_nobody_holds_it(folders, tmp_path):
    """Whatever its owner's process id: that may be one of another container."""
    async with ChildEtcd() as etcd:
        gone = psutil.Process().pid + 1_000_000
        (own,) = folders()
        (tmp_path / own).rename(tmp_path / f"{FOLDER_PREFIX}{gone}-held")
        (tmp_path / f"{FOLDER_PREFIX}{os.getpid()}-left").mkdir()
        sweep(FOLDER_PREFIX)
        assert folders() == [f"{FOLDER_PREFIX}{gone}-held"]
        assert etcd.pid is not None
        (tmp_path / f"{FOLDER_PREFIX}{gone}-held").rename(tmp_path / own)


async def test_where_etcd_is_not_installed_the_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install etcd-server"):
        await ChildEtcd().__aenter__()


async def test_an_etcd_that_cannot_start_is_an_error_and_leaves_nothing(
    monkeypatch, broken_program, folders, tmp_path
):
    monkeypatch.setenv("PATH", f"{broken_program.parent}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=r"code 3 .*: bind: address already in use"):
        await ChildEtcd().__aenter__()
    assert folders() == []
    starts = (tmp_path / "starts").read_text().splitlines()
    assert len(set(starts)) == STARTS_MAX, "each time at other ports"


async def test_an_etcd_that_cannot_write_says_why_and_no_stack(monkeypatch, tmp_path):
    program, etcd = tmp_path / "bin" / "etcd", shutil.which("etcd")
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nulimit -f 8\nexec {etcd} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    why = r"failed to open database: write /\S+: file too large$"
    with pytest.raises(ConfigError, match=rf"code 2 instead of starting: {why}"):
        await ChildEtcd().__aenter__()


async def test_a_port_that_was_taken_meanwhile_is_no_failure(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([[taken.getsockname()[1], *free_ports(1)]])
        monkeypatch.setattr("neuron_di.etcd.child.free_ports", lambda n: next(ports, free_ports(n)))
        async with ChildEtcd() as etcd, EtcdClient([etcd.address]) as client:
            await client.put(b"/a", b"x")
