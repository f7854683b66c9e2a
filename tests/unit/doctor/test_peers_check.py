"""What is said of other machines' ports: sockets of this process play them."""

import socket
import threading
from collections.abc import Iterator

import pytest

from neuron_di.config import DoctorOptions
from neuron_di.doctor import peers
from neuron_di.doctor.finding import Grade
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.resolve import Unresolved, resolve
from neuron_di.etcd.child import free_ports


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.fixture
def silent() -> Iterator[str]:
    """An address whose host drops what is sent: a queue of connections that is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as sock:
        held = []
        address = sock.getsockname()
        for _ in range(64):  # more than a queue of length 0 takes, whatever the kernel makes of it
            queued = socket.socket()
            queued.setblocking(False)
            queued.connect_ex(address)
            held.append(queued)
        yield f"127.0.0.1:{address[1]}"
        for queued in held:
            queued.close()


def test_without_peers_nothing_is_tried() -> None:
    (finding,) = peers.check(Machine(), DoctorOptions())
    assert finding.grade is Grade.SKIPPED


def test_each_peer_is_told_in_the_order_given(listening: socket.socket) -> None:
    (closed,) = free_ports(1)
    open_port = listening.getsockname()[1]
    options = DoctorOptions(
        peer=(f"127.0.0.1:{closed}", f"localhost:{open_port}", "no-such-name.invalid:80")
    )
    refused, reached, unknown = peers.check(Machine(), options)
    assert (refused.check, refused.grade) == ("peers.connect", Grade.FAILED)
    assert "nothing listens on that port" in refused.says
    assert (reached.check, reached.grade) == ("peers.connect", Grade.OK)
    assert reached.facts["peer"] == f"localhost:{open_port}"
    assert "no-such-name.invalid means no address" in unknown.says


def test_who_is_silent_is_given_up(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "CONNECT_TIMEOUT_S", 0.3)
    (finding,) = peers.check(Machine(), DoctorOptions(peer=(silent,)))
    assert finding.grade is Grade.FAILED
    assert "nothing answers" in finding.says
    assert f"Let TCP port {silent.rpartition(':')[2]} through" in finding.mend


def test_names_mean_addresses() -> None:
    assert resolve("127.0.0.1") == [(socket.AF_INET, "127.0.0.1")]
    assert resolve("::1") == [(socket.AF_INET6, "::1")]
    assert (socket.AF_INET, "127.0.0.1") in resolve("localhost")


@pytest.mark.parametrize("name", ["no-such-name.invalid", "x" * 300, "a..b", "\0"])
def test_what_is_no_name_is_told(name: str) -> None:
    with pytest.raises(Unresolved, match="means no address here"):
        resolve(name)


def test_a_name_that_nobody_knows_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def silent(*_: object, **__: object) -> list[object]:
        is_over.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    try:
        with pytest.raises(Unresolved, match="nobody said within 0 s"):
            resolve("localhost", timeout_s=0)
    finally:
        is_over.set()
