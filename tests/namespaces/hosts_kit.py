"""Network namespaces as hosts, cabled to switches: what a single kernel has of several machines.

    with network() as net:
        host = net.host("front", data="10.77.0.2", control="10.78.0.2")
        command = host.command("neuron-di", "proxy", …)     # to run there
        with host.entered(): …                              # sockets made here are that host's
        host.pull("data")                                   # the cable; host.plug("data")

Each host has an interface per switch it is cabled to, an address at it, and no other way out. A
namespace lives as long as the process that holds it, which ends with us, whatever ends us; with
it go its interfaces. Nothing has a name in the machine's own namespace.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from neuron_di.clock import sleep_s
from neuron_di.etcd.child import TIED

PROGRAMS = ("ip", "unshare", "nsenter", "sleep")
# What runs a command where it sees only the processes that it started.
PROCESSES_APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_CLONE_NEWNET = 0x40000000
_OWN = Path("/proc/thread-self/ns/net")
_libc = ctypes.CDLL(None, use_errno=True)


def require_namespaces() -> None:
    """Skip the test, with the reason, where there can be none. REQUIRE_NAMESPACES=1: fail."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    reason = f"{' and '.join(missing)} not installed" if missing else _why_impossible()
    if not reason:
        return
    if os.environ.get("REQUIRE_NAMESPACES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def _why_impossible() -> str:
    script = "ip link add ndi0 type bridge && ip link add ndi1 type veth peer name ndi2"
    tried = subprocess.run(
        [*PROCESSES_APART, "--net", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    words = tried.stderr.strip().splitlines()
    return "" if tried.returncode == 0 else f"no network namespaces here: {words[-1:]}"


class Namespace:
    """A network namespace, and the process that holds it."""

    def __init__(self) -> None:
        unshare = shutil.which("unshare")
        assert unshare is not None
        words = [unshare, "--net", "sleep", "infinity"]
        self._holder = subprocess.Popen(
            [sys.executable, "-c", TIED, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.path = Path(f"/proc/{self._holder.pid}/ns/net")
        ours = os.readlink(_OWN)
        while True:
            if self._holder.poll() is not None:
                raise AssertionError(f"unshare ended with {self._holder.returncode}")
            with contextlib.suppress(OSError):
                if os.readlink(self.path) != ours:
                    break
            sleep_s(0.005)

    @property
    def pid(self) -> int:
        """Of the holder."""
        return self._holder.pid

    def command(self, program: str, *arguments: str) -> list[str]:
        """The command that runs this one here; it ends with us."""
        nsenter, found = shutil.which("nsenter"), shutil.which(program)
        assert nsenter is not None
        assert found is not None
        tied = [sys.executable, "-c", TIED, str(os.getpid())]
        return [*tied, nsenter, f"--net={self.path}", found, *arguments]

    def run(self, program: str, *arguments: str) -> str:
        """Run a command here to its end. Returns what it printed."""
        done = subprocess.run(
            self.command(program, *arguments),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{program} {arguments}: {done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is here: the sockets that it makes, and the processes that it starts."""
        before = os.open(_OWN, os.O_RDONLY)
        try:
            with self.path.open("rb") as there:
                _set_namespace(there.fileno())
            try:
                yield
            finally:
                _set_namespace(before)
        finally:
            os.close(before)

    def end(self) -> None:
        self._holder.kill()
        self._holder.wait()


def _set_namespace(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@dataclass(slots=True)
class Host:
    """A namespace with cables. Their other ends, at the switches, have its name."""

    name: str
    space: Namespace
    _switch: Namespace
    _cables: dict[str, str] = field(default_factory=dict)  # by network: the switch's end

    def command(self, program: str, *arguments: str) -> list[str]:
        return self.space.command(program, *arguments)

    def run(self, program: str, *arguments: str) -> str:
        return self.space.run(program, *arguments)

    def entered(self) -> contextlib.AbstractContextManager[None]:
        return self.space.entered()

    def throttle(self, network: str, bits_per_s: int) -> None:
        """What others send to this host comes no faster; OSError where this kernel cannot."""
        limit = ("tbf", "rate", f"{bits_per_s}bit", "burst", "4kb", "latency", "100ms")
        tc = shutil.which("tc")
        if tc is None:
            raise OSError("tc is not installed")
        add = ("qdisc", "replace", "dev", self._cables[network], "root", *limit)
        tried = subprocess.run(
            self._switch.command(tc, *add), capture_output=True, text=True, check=False
        )
        if tried.returncode != 0:
            raise OSError(tried.stderr)

    def release(self, network: str) -> None:
        """As fast as it was before throttle()."""
        self._switch.run("tc", "qdisc", "del", "dev", self._cables[network], "root")

    def pull(self, network: str) -> None:
        """No packet passes any more, and nobody is told but this host's own kernel."""
        self._switch.run("ip", "link", "set", self._cables[network], "down")

    def plug(self, network: str) -> None:
        self._switch.run("ip", "link", "set", self._cables[network], "up")

    def cable(self, network: str, address: str) -> None:
        """An interface with this address, /24, at the switch of this network."""
        end = f"{self.name}-{network}"[:15]
        self._switch.run(
            *("ip", "link", "add", "name", end, "type", "veth"),
            *("peer", "name", network, "netns", str(self.space.pid)),
        )
        self._switch.run("ip", "link", "set", end, "master", network, "up")
        self.run("ip", "address", "add", f"{address}/24", "dev", network)
        self.run("ip", "link", "set", network, "up")
        self._cables[network] = end


class Network:
    """Switches, in a namespace of their own, and hosts."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._switch = self._namespace()
        self._networks: set[str] = set()

    def _namespace(self) -> Namespace:
        space = Namespace()
        self._stack.callback(space.end)
        space.run("ip", "link", "set", "lo", "up")
        return space

    def host(self, name: str, **addresses: str) -> Host:
        """A host with an address at each of these networks."""
        host = Host(name, self._namespace(), self._switch)
        for network, address in addresses.items():
            if network not in self._networks:
                self._switch.run("ip", "link", "add", "name", network, "type", "bridge")
                self._switch.run("ip", "link", "set", network, "up")
                self._networks.add(network)
            host.cable(network, address)
        return host


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """No host yet. At the end there is none any more."""
    require_namespaces()
    with contextlib.ExitStack() as stack:
        yield Network(stack)
