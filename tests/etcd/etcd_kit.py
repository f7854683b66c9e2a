"""Real etcd in temporary folders: one member or three, plain, with TLS, with users.

    async with running_etcd(num_members=3) as etcd:
        client = EtcdClient(etcd.addresses)
        etcd.members[0].kill()
        await etcd.members[0].start()

Members can be killed, frozen, thawed and wiped. Nothing of them outlives the block, or us.
"""

import asyncio
import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from neuron_di.clock import sleep_s
from neuron_di.errors import PeerError
from neuron_di.etcd.child import TIED, free_ports
from neuron_di.etcd.client import EtcdClient
from neuron_di.etcd.security import Pem, Security

DEADLINE_S = 30.0
PASSWORD = "correct-horse-7"  # of every user
SHORT_TIMERS = ("--heartbeat-interval=20", "--election-timeout=200")


def require_etcd() -> None:
    """Skip the test, with the reason, where etcd is not installed. In CI it fails instead."""
    missing = [name for name in ("etcd", "etcdctl") if shutil.which(name) is None]
    if not missing:
        return
    reason = f"{' and '.join(missing)} not installed: run .ci/install-etcd"
    if os.environ.get("REQUIRE_ETCD") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files: of the authority, of the servers, and of a client with `CN=worker`."""

    folder: Path

    def path(self, name: str) -> str:
        """ca.pem, server.pem, server.key, worker.pem, worker.key, and so on."""
        return str(self.folder / name)

    def security(self, user: str | None = "worker") -> Security:
        """As a client with this certificate; None: without one."""
        return self.believing("ca", user)

    def believing(self, ca: str, user: str | None) -> Security:
        """As a client who takes this authority's word."""
        names = [f"{ca}.pem"] + ([] if user is None else [f"{user}.pem", f"{user}.key"])
        pem = Pem(*((self.folder / name).read_bytes() for name in names))
        return Security(pem=lambda: pem)


@cache
def certificates() -> Certificates:
    """Made once per process, by openssl. Skips the test where there is none."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the keys")
    folder = Path(tempfile.mkdtemp(prefix="etcd-kit-pem-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    def make(name: str, common_name: str, *signed: str) -> None:
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        openssl("req", "-x509", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.pem",
                "-days", "2", "-subj", f"/CN={common_name}", *signed)  # fmt: skip

    # Python 3.13 asks for what RFC 5280 does: what a key may be used for, and who is an authority.
    by_ca = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
    make("ca", "neuron-di test", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    san = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    usage = ("-addext", "extendedKeyUsage=serverAuth,clientAuth")
    make("server", "server", *by_ca, *san, *usage)
    make("worker", "worker", *by_ca, "-addext", "extendedKeyUsage=clientAuth")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
            "/CN=worker", "-keyout", "expired.key", "-out", "expired.csr")  # fmt: skip
    openssl("x509", "-req", "-in", "expired.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-set_serial", "9", "-days", "-1", "-out", "expired.pem")  # fmt: skip
    make("stranger", "stranger")  # signed by itself
    return Certificates(folder)


@dataclass(slots=True)
class Member:
    """One process of etcd, and its folder."""

    name: str
    folder: Path
    port: int
    peer_port: int
    flags: list[str] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start it, without waiting until it answers."""
        program = shutil.which("etcd")
        assert program is not None
        command = [sys.executable, "-c", TIED, str(os.getpid()), program, *self.flags]
        with (self.folder.parent / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def freeze(self) -> None:
        """It keeps its connections, and answers nobody from the moment this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            while stat.read_text().rpartition(")")[2].split()[0] not in "TZX":
                sleep_s(0.001)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """As a crash. What it has stored stays."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()

    def wipe(self) -> None:
        """Remove what a killed member has stored."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(slots=True)
class Etcd:
    """The members, and how an operator reaches them."""

    members: list[Member]
    scheme: str
    root: bool = False  # whether users are asked for: the operator is root then

    @property
    def addresses(self) -> list[str]:
        return [member.address for member in self.members]

    def ctl(self, *arguments: str, check: bool = True) -> str:
        """Run etcdctl as the operator. Returns what it printed."""
        flags = [f"--endpoints={','.join(f'{self.scheme}://{each}' for each in self.addresses)}"]
        if self.scheme == "https":
            pem = certificates()
            flags += [f"--cacert={pem.path('ca.pem')}", f"--cert={pem.path('worker.pem')}",
                      f"--key={pem.path('worker.key')}"]  # fmt: skip
        if self.root:
            flags.append(f"--user=root:{PASSWORD}")
        done = subprocess.run(
            ["etcdctl", *flags, *arguments],
            env=os.environ | {"ETCDCTL_API": "3"},
            check=False,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def enable_users(self) -> None:
        """Users `worker`, who may read and write below /neuron-di/, and `nobody`, who may not."""
        for name in ("root", "worker", "nobody"):
            self.ctl("user", "add", f"{name}:{PASSWORD}")
        self.ctl("user", "grant-role", "root", "root")
        self.ctl("role", "add", "neuron-di")
        below = ("--prefix=true", "readwrite", "/neuron-di/")
        self.ctl("role", "grant-permission", "neuron-di", *below)
        self.ctl("user", "grant-role", "worker", "neuron-di")
        self.ctl("auth", "enable")
        self.root = True

    async def answers(self, security: Security | None = None) -> None:
        """Wait until most members agree that they answer."""
        async with asyncio.timeout(DEADLINE_S), EtcdClient(self.addresses, security) as client:
            while True:
                with contextlib.suppress(PeerError):
                    await client.get(b"/neuron-di/")
                    return
                await asyncio.sleep(0.05)

    async def restart(self, *, wiped: bool = False) -> None:
        """Kill every member and start it again, with what it has stored or without."""
        for member in self.members:
            member.kill()
            if wiped:
                member.wipe()
        for member in self.members:
            member.launch()
        await self.answers(self.security())

    def security(self) -> Security | None:
        return certificates().security() if self.scheme == "https" else None

    async def leader(self) -> Member:
        """The member that leads. The cluster must answer."""
        for member in self.members:
            async with EtcdClient([member.address], self.security()) as client:
                status = await client.status()
            lines = self.ctl("endpoint", "status", "--write-out=simple").splitlines()
            for line in lines:
                endpoint, member_id, *_ = (part.strip() for part in line.split(","))
                if int(member_id, 16) == status.leader:
                    port = int(endpoint.rpartition(":")[2])
                    return next(each for each in self.members if each.port == port)
        raise AssertionError("no member leads")


@asynccontextmanager
async def running_etcd(
    *, num_members: int = 1, tls: bool = False, flags: Sequence[str] = ()
) -> AsyncIterator[Etcd]:
    """etcd that answers. With `tls` clients need a certificate, as `certificates()` has them."""
    require_etcd()
    folder = Path(tempfile.mkdtemp(prefix="etcd-kit-"))
    ports = free_ports(2 * num_members)
    members = [
        Member(f"m{i}", folder / f"m{i}", ports[2 * i], ports[2 * i + 1])
        for i in range(num_members)
    ]
    scheme = "https" if tls else "http"
    cluster = ",".join(f"{each.name}=http://127.0.0.1:{each.peer_port}" for each in members)
    for member in members:
        client, peer = f"{scheme}://{member.address}", f"http://127.0.0.1:{member.peer_port}"
        member.flags = [
            f"--name={member.name}",
            f"--data-dir={member.folder}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={cluster}",
            *SHORT_TIMERS,
            "--logger=zap",
            "--log-level=error",
            *flags,
        ]
        if tls:
            pem = certificates()
            member.flags += [
                f"--cert-file={pem.path('server.pem')}",
                f"--key-file={pem.path('server.key')}",
                f"--trusted-ca-file={pem.path('ca.pem')}",
                "--client-cert-auth",
            ]
    etcd = Etcd(members, scheme)
    try:
        for member in members:
            member.launch()
        await etcd.answers(etcd.security())
        yield etcd
    finally:
        for member in members:
            member.kill()
        shutil.rmtree(folder, ignore_errors=True)


async def fill(client: EtcdClient) -> None:
    """Write until etcd has no space: with a quota of 1 MB before this ends."""
    for number in range(100):
        await client.put(b"/%d" % number, bytes(100_000))
