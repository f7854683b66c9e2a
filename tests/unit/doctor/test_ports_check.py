"""What is said of addresses: sockets of this process hold them, or nobody does."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from machine_kit import make_machine

from neuron_di.config import DoctorOptions, TransferOptions
from neuron_di.doctor.finding import Finding, Grade
from neuron_di.doctor.listeners import Listener, listener_on
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.ports import check
from neuron_di.etcd.child import free_ports

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this process listens on, below those of outgoing connections."""
    (port,) = free_ports(1)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen(1)
        yield port


def run(machine: Machine, **options: object) -> list[Finding]:
    return list(check(machine, DoctorOptions(**({"port": 0} | options))))  # type: ignore[arg-type]


def table_line(port: int, inode: int, state: str = "0A") -> str:
    return f"   0: 0100007F:{port:04X} 00000000:0000 {state} 0:0 00:0 0 1000 0 {inode} 1 f 100"


def holder(tmp_path: Path, port: int, pid: int, *words: str) -> dict[str, str]:
    """The files of a process that listens there."""
    folder = tmp_path / f"proc/{pid}/fd"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "7").symlink_to(f"socket:[{pid}77]")
    return {
        "/proc/net/tcp": f"{HEAD}\n{table_line(port, int(f'{pid}77'))}\n",
        f"/proc/{pid}/cmdline": "\0".join(words) + "\0",
        f"/proc/{pid}/comm": Path(words[0]).name + "\n",
    }


def test_free_ports_are_told_one_by_one() -> None:
    first, second, third = free_ports(3)
    findings = run(
        Machine(),
        port=first,
        listen=(f"127.0.0.1:{second}", f"localhost:{first}", f"127.0.0.1:{first}"),
        kv_transfer=TransferOptions(transfer_port=third),
    )
    ports = [(each.facts.get("port"), each.facts.get("for")) for each in findings]
    assert ports == [(first, "--port"), (third, "--transfer-port"), (second, "--listen"),
                     (first, "--listen")]  # fmt: skip
    assert {each.grade for each in findings} == {Grade.OK}


def test_port_0_is_always_free() -> None:
    (finding,) = run(Machine())
    assert finding.grade is Grade.OK


def test_a_port_that_is_taken_names_who_has_it(taken: int) -> None:
    (finding,) = run(Machine(), port=taken)
    assert (finding.check, finding.grade) == ("ports.listen", Grade.FAILED)
    assert f"(pid {os.getpid()})" in finding.says
    assert finding.mend == f"Give another one with --port, or end pid {os.getpid()}."


def test_a_server_of_ours_that_runs_already_is_a_note(tmp_path: Path, taken: int) -> None:
    words = ("/venv/bin/python3", "/venv/bin/neuron-di", "serve", "model")
    machine = make_machine(tmp_path, holder(tmp_path, taken, 4711, *words))
    (finding,) = run(machine, port=taken)
    assert finding.grade is Grade.NOTE
    assert finding.says.endswith("is taken by a neuron-di that runs here already, pid 4711")


@pytest.mark.parametrize(
    ("words", "is_ours"),
    [
        (("python3.11", "-O", "-X", "dev", "-m", "neuron_di", "worker"), True),
        (("/venv/bin/python", "-m", "neuron_di.doctor.nrt_pair"), True),
        (("/usr/bin/neuron-di", "serve"), True),
        (("python", "/tmp/x/neuron-di/jupyter.py"), False),
        (("python", "-m", "http.server", "neuron_di"), False),
        (("python", "-c", "neuron-di"), False),
        (("vim", "neuron-di"), False),
    ],
)
def test_a_process_is_ours_by_what_it_runs(
    tmp_path: Path, words: tuple[str, ...], is_ours: bool
) -> None:
    listener = listener_on(make_machine(tmp_path, holder(tmp_path, 8000, 5, *words)), 8000)
    assert listener is not None
    assert listener.is_ours == is_ours


def test_a_server_of_another_user_may_have_it(tmp_path: Path, taken: int) -> None:
    files = holder(tmp_path, taken, 4711, "/venv/bin/neuron-di", "serve")
    (tmp_path / "proc/4711/fd/7").unlink()
    files["/proc/4711/status"] = "Name:\tpython\nUid:\t1000\t1000\t1000\t1000\n"
    (finding,) = run(make_machine(tmp_path, files), port=taken)
    assert finding.grade is Grade.WARNING
    assert finding.says.endswith("who runs a neuron-di too, pid 4711")
    files["/proc/4711/status"] = "Name:\tpython\nUid:\t0\t0\t0\t0\n"
    (finding,) = run(make_machine(tmp_path, files), port=taken)
    assert finding.grade is Grade.FAILED


def test_a_connection_may_have_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
        (finding,) = run(Machine(), port=client.getsockname()[1])[:1]
    assert finding.grade is Grade.FAILED
    assert finding.says.endswith("is in use by a connection, and nobody listens there")


def test_two_purposes_cannot_have_one_port() -> None:
    port, other = free_ports(2)
    transfer = TransferOptions(transfer_port=port, nrt_control_port=other)
    findings = run(Machine(), port=port, signal_port=other, kv_transfer=transfer)
    says = [each.says for each in findings if each.check == "ports.distinct"]
    assert [words.partition(" are")[0] for words in says] == [
        "--port and --transfer-port",
        "--signal-port and --nrt-control-port",
    ]
    apart = TransferOptions(transfer_port=port, transfer_host="127.0.0.2")
    assert "ports.distinct" not in {
        each.check for each in run(Machine(), port=port, kv_transfer=apart)
    }


def test_a_process_out_of_sight_is_said_to_be(tmp_path: Path, taken: int) -> None:
    (finding,) = run(make_machine(tmp_path), port=taken)
    assert finding.says.endswith("is taken by a process of another user")


def test_only_who_listens_counts(tmp_path: Path) -> None:
    files = holder(tmp_path, 8000, 5, "nginx")
    assert listener_on(make_machine(tmp_path, files), 8000) == Listener(pid=5, name="nginx")
    assert listener_on(make_machine(tmp_path, files), 8001) is None
    connected = {"/proc/net/tcp": f"{HEAD}\n{table_line(8000, 577, '01')}\nbroken\n"}
    assert listener_on(make_machine(tmp_path, connected), 8000) is None


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("192.0.2.7:8000", "that address is not this machine's"),
        ("no-such-name.invalid:8000", "the name no-such-name.invalid means no address here"),
    ],
)
def test_an_address_of_somebody_else_is_refused(address: str, words: str) -> None:
    (finding,) = run(Machine(), listen=(address,))
    assert (finding.check, finding.grade) == ("ports.listen", Grade.FAILED)
    assert words in finding.says


def test_ipv6_addresses_are_understood() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    (port,) = free_ports(1)
    (finding,) = run(Machine(), listen=(f"[::1]:{port}",))
    assert finding.grade is Grade.OK
    assert finding.facts["host"] == "::1"


def test_a_port_that_an_outgoing_connection_may_take_is_told(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    path = "/proc/sys/net/ipv4/ip_local"
    files: dict[str, str | None] = {f"{path}_port_range": f"{port - 5}\t{port + 5}\n"}
    *_, note = run(make_machine(tmp_path / "a", files), port=port)
    assert (note.check, note.grade) == ("ports.outgoing", Grade.NOTE)
    assert f"net.ipv4.ip_local_reserved_ports={port} | sudo tee" in note.mend
    files[f"{path}_reserved_ports"] = "80,90-99\n"
    *_, note = run(make_machine(tmp_path / "c", files), port=port)
    assert f"net.ipv4.ip_local_reserved_ports=80,90-99,{port} | sudo tee" in note.mend
    assert "/etc/sysctl.d/" in note.mend
    files[f"{path}_reserved_ports"] = f"80,{port - 1}-{port + 1}\n"
    findings = run(make_machine(tmp_path / "b", files), port=port)
    assert [each.check for each in findings] == ["ports.listen"]


def test_the_bootstrap_port_may_be_ours_and_nobody_elses(tmp_path: Path) -> None:
    files: dict[str, str | None] = {"/dev/neuron0": ""}
    checks = [each.check for each in run(make_machine(tmp_path / "a", files))]
    assert checks == ["ports.listen", "ports.bootstrap"]
    grades = {}
    for name in ("neuron-di", "redis-server"):
        root = tmp_path / name
        machine = make_machine(root, files | holder(root, 45_645, 12, name))
        grades[name] = {each.check: each.grade for each in run(machine)}["ports.bootstrap"]
    assert grades == {"neuron-di": Grade.OK, "redis-server": Grade.WARNING}


def test_a_machine_full_of_listeners_is_looked_through() -> None:
    with ExitStack() as stack:
        for _ in range(50):
            sock = stack.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            sock.listen(1)
        listener = listener_on(Machine(), sock.getsockname()[1])
    assert listener is not None
    assert listener.pid == os.getpid()
