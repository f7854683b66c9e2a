"""The scripts that make certificates and users for etcd, with a real etcd (B42)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuron_di.config import EtcdOptions
from neuron_di.errors import PeerError
from neuron_di.etcd import open_registry
from neuron_di.etcd.child import TIED, free_ports
from neuron_di.registry import Snapshot

SCRIPTS = Path(__file__).parents[2] / "examples" / "certificates"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys"),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(SCRIPTS / arguments[0]), *arguments[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def openssl(*arguments: str) -> str:
    return subprocess.run(
        ["openssl", *arguments], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pem") / "certificates"
    made = run("make_certificates.sh", str(path), "127.0.0.1,::1,localhost")
    assert made.returncode == 0, made.stderr
    assert made.stderr == ""
    return path


def test_what_is_no_host_is_refused(tmp_path: Path) -> None:
    done = run("make_certificates.sh", str(tmp_path / "none"), "a.example,b c")
    assert (done.returncode, done.stderr) == (2, "b c is neither a name nor an address\n")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("user", ["server", "ca", "ünï", "-x", "a/b", ""])
def test_what_cannot_be_a_user_is_refused(tmp_path: Path, user: str) -> None:
    """Of server and ca there are files, which are no client's; others get another name or none."""
    done = run("make_certificates.sh", str(tmp_path / "none"), "a.example", "root", user)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{user} cannot be a user here")
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(shutil.which("etcdctl") is None, reason="etcdctl is not installed")
def test_a_prefix_that_no_cluster_can_have_is_refused(tmp_path: Path) -> None:
    done = run("make_users.sh", str(tmp_path), "127.0.0.1:1", "neuron-di")
    assert done.returncode == 2
    assert done.stderr.startswith("neuron-di is no PREFIX")


def test_certificates_are_what_etcd_asks_for(folder: Path) -> None:
    server = openssl("x509", "-in", str(folder / "server.pem"), "-noout", "-text")
    assert "IP Address:127.0.0.1, IP Address:0:0:0:0:0:0:0:1, DNS:localhost" in server
    for user in ("root", "neuron-di-worker", "neuron-di-proxy"):
        path = str(folder / f"{user}.pem")
        assert openssl("x509", "-in", path, "-noout", "-subject").strip() in (
            f"subject=CN = {user}",
            f"subject=CN={user}",
        )
        openssl("verify", "-CAfile", str(folder / "ca.pem"), "-purpose", "sslclient", path)
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.key")} == {0o600}


def test_what_is_there_is_kept_and_a_user_is_added(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    again = run("make_certificates.sh", str(folder), "127.0.0.1", "another")
    assert again.returncode == 0, again.stderr
    assert again.stdout == f"{folder}/another.pem\n"
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("host", ["10.9.9.9", "fd00::9", "etcd-9"])
def test_a_certificate_that_is_not_for_a_host_is_named(folder: Path, host: str) -> None:
    again = run("make_certificates.sh", str(folder), f"127.0.0.1,::1,localhost,{host}")
    assert again.returncode == 1
    assert again.stderr == (
        f"{folder}/server.pem is kept, and is not for {host}: delete it for a new one\n"
    )


def test_how_it_is_called() -> None:
    for script in ("make_certificates.sh", "make_users.sh"):
        called = run(script)
        assert called.returncode == 2
        assert called.stderr.startswith(f"{script} FOLDER ")


@pytest.mark.skipif(shutil.which("etcdctl") is None, reason="etcdctl is not installed")
def test_where_no_etcd_answers_that_is_said(folder: Path) -> None:
    """etcdctl alone would wait for good, without a word."""
    (port,) = free_ports(1)
    done = run("make_users.sh", str(folder), f"127.0.0.1:{port}")
    assert done.returncode != 0
    assert f"no etcd at 127.0.0.1:{port} answered within 5 s" in done.stderr


@pytest.fixture(scope="module")
def etcd(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An etcd that asks for certificates, and has the users of the script. Its address."""
    program = shutil.which("etcd")
    if program is None or shutil.which("etcdctl") is None:
        pytest.skip("etcd is not installed")
    port, peer_port = free_ports(2)
    address = f"127.0.0.1:{port}"
    flags = {
        "data-dir": tmp_path_factory.mktemp("etcd"),
        "listen-client-urls": f"https://{address}",
        "advertise-client-urls": f"https://{address}",
        "listen-peer-urls": f"http://127.0.0.1:{peer_port}",
        "initial-advertise-peer-urls": f"http://127.0.0.1:{peer_port}",
        "initial-cluster": f"default=http://127.0.0.1:{peer_port}",
        "cert-file": folder / "server.pem",
        "key-file": folder / "server.key",
        "trusted-ca-file": folder / "ca.pem",
    }
    command = [sys.executable, "-c", TIED, str(os.getpid()), program, "--client-cert-auth"]
    process = subprocess.Popen(
        [*command, *(f"--{name}={value}" for name, value in flags.items())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for attempt in range(50):
            made = run("make_users.sh", str(folder), address)
            if made.returncode == 0:
                break
            assert attempt < 49, made.stderr
        again = run("make_users.sh", str(folder), address)
        assert again.returncode == 0, again.stderr
        yield address
    finally:
        process.kill()
        process.wait()


def options(folder: Path, address: str, user: str, prefix: str = "/neuron-di") -> EtcdOptions:
    return EtcdOptions(
        etcd=(address,),
        etcd_prefix=prefix,
        etcd_ca=str(folder / "ca.pem"),
        etcd_cert=str(folder / f"{user}.pem"),
        etcd_key=str(folder / f"{user}.key"),
    )


KEY = "/workers/decode/127.0.0.1/20001"


async def test_a_worker_may_announce_itself_and_a_proxy_may_only_look(
    folder: Path, etcd: str
) -> None:
    async with (
        open_registry(None, options(folder, etcd, "neuron-di-worker")) as worker,
        open_registry(None, options(folder, etcd, "neuron-di-proxy")) as proxy,
    ):
        assert worker is not None
        assert proxy is not None
        await worker.put(KEY, b"value", await worker.grant(10.0))
        watch = proxy.watch("/workers/")
        first = await anext(watch)
        await watch.aclose()
        assert isinstance(first, Snapshot)
        assert first.values == {KEY: b"value"}
        with pytest.raises(PeerError, match="permission denied"):
            await proxy.put(KEY, b"fake", await proxy.grant(10.0))


async def test_a_worker_may_not_write_for_another_cluster(folder: Path, etcd: str) -> None:
    elsewhere = options(folder, etcd, "neuron-di-worker", prefix="/neuron-di2")
    async with open_registry(None, elsewhere) as worker:
        assert worker is not None
        with pytest.raises(PeerError, match="permission denied"):
            await worker.put(KEY, b"value", await worker.grant(10.0))


async def test_nobody_without_a_certificate_of_ours_is_heard(folder: Path, etcd: str) -> None:
    anonymous = EtcdOptions(etcd=(etcd,), etcd_ca=str(folder / "ca.pem"))
    async with open_registry(None, anonymous) as stranger:
        assert stranger is not None
        with pytest.raises(PeerError):
            await stranger.put(KEY, b"fake", await stranger.grant(10.0))
