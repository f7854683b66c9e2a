"""Whether the addresses that the server will listen on are free."""

import errno
import socket
from collections.abc import Iterator
from itertools import combinations

from neuron_di.config import DoctorOptions
from neuron_di.config.option import PORT_MAX
from neuron_di.config.value import split_address
from neuron_di.doctor.finding import Fact, Finding
from neuron_di.doctor.listeners import Listener, has_table, listener_on
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.reserved_ports import outgoing_ports, reserve_mend, reserved_ports
from neuron_di.doctor.resolve import Unresolved, resolve
from neuron_di.neuron_cores import SEND_RECEIVE_DEFAULTS
from neuron_di_bindings.nrt import PORT_VARIABLE

_ANY = ("0.0.0.0", "::", "")  # noqa: S104 - compared with, not listened on


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """One finding for each address, and one for those that something else may take first."""
    wanted = _wanted(options)
    for (host, port), purpose in wanted.items():
        yield _tried(machine, host, port, purpose)
    if not wanted:
        yield Finding.ok("ports.listen", "all ports are 0: each process takes any free one")
    yield from _twice(options)
    ports = {port: purpose for (_, port), purpose in wanted.items()}
    if machine.names("/dev/neuron[0-9]*"):
        text = machine.environment.get(PORT_VARIABLE, SEND_RECEIVE_DEFAULTS[PORT_VARIABLE])
        if text.isdecimal() and 0 < int(text) <= PORT_MAX:
            yield from _bootstrap(machine, int(text))
    yield from _outgoing(machine, ports)


def _wanted(options: DoctorOptions) -> dict[tuple[str, int], str]:
    """What for, by address. An address that is named twice stands for the first purpose."""
    named = [
        *_own(options),
        *((split_address(text), "--listen") for text in options.listen),
    ]
    wanted: dict[tuple[str, int], str] = {}
    for address, purpose in named:
        if address[1] != 0:
            wanted.setdefault(address, purpose)
    return wanted


def _own(options: DoctorOptions) -> list[tuple[tuple[str, int], str]]:
    """Of one process: the address, and what for."""
    transfer = options.kv_transfer
    data_host = transfer.transfer_host or options.host
    return [
        ((options.host, options.port), "--port"),
        ((options.host, options.signal_port), "--signal-port"),
        ((data_host, transfer.transfer_port), "--transfer-port"),
        ((data_host, transfer.nrt_control_port), "--nrt-control-port"),
    ]


def _twice(options: DoctorOptions) -> Iterator[Finding]:
    """Two purposes cannot have one port, at one address or where one of them has all."""
    for ((host, port), one), ((other_host, other_port), other) in combinations(_own(options), 2):
        is_one_address = host == other_host or host in _ANY or other_host in _ANY
        if port == other_port != 0 and is_one_address:
            yield Finding.failed(
                "ports.distinct",
                f"{one} and {other} are both {port}: a server can listen there once",
                f"Give {other} another port, or 0 for any free one.",
                facts={"port": port},
            )


def _tried(machine: Machine, host: str, port: int, purpose: str) -> Finding:
    """Listens there for a moment, as a server does."""
    facts: dict[str, Fact] = {"host": host, "port": port, "for": purpose}
    where = f"port {port} of {host} ({purpose})"
    try:
        family, address = resolve(host)[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            sock.listen(1)
    except Unresolved as error:
        return Finding.failed(
            "ports.listen",
            f"nothing can listen on {where}: {error}",
            "Name one of this machine's IP addresses.",
            facts=facts,
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _taken(machine, port, where, purpose, facts)
        return _refused(error, where, facts)
    return Finding.ok("ports.listen", f"{where} is free", facts=facts)


def _taken(
    machine: Machine, port: int, where: str, purpose: str, facts: dict[str, Fact]
) -> Finding:
    listener = listener_on(machine, port)
    if listener is None and has_table(machine):
        return Finding.failed(
            "ports.listen",
            f"{where} is in use by a connection, and nobody listens there",
            f"Wait until that connection ends (`ss -tanp` shows it), or give another one with "
            f"{purpose}.",
            facts=facts,
        )
    listener = listener or Listener()
    facts |= {"pid": listener.pid, "is_ours": listener.is_ours}
    if listener.is_ours:
        return Finding.note(
            "ports.listen",
            f"{where} is taken by a neuron-di that runs here already, pid {listener.pid}",
            facts=facts,
        )
    if listener.perhaps_pid is not None:
        return Finding.warning(
            "ports.listen",
            f"{where} is taken by {listener}, who runs a neuron-di too, pid {listener.perhaps_pid}",
            f"If that is its port, nothing is wrong; else give another one with {purpose}.",
            facts=facts,
        )
    end = "end that process" if listener.pid is None else f"end pid {listener.pid}"
    return Finding.failed(
        "ports.listen",
        f"{where} is taken by {listener}",
        f"Give another one with {purpose}, or {end}.",
        facts=facts,
    )


def _refused(error: OSError, where: str, facts: dict[str, Fact]) -> Finding:
    mend = "Correct the address: --host is where the server listens."
    words = f"nothing can listen on {where}: {error.strerror}"
    if error.errno == errno.EADDRNOTAVAIL:
        words = f"nothing can listen on {where}: that address is not this machine's"
        mend = "Give one that `ip address` shows, or 0.0.0.0 for all of them."
    elif error.errno in (errno.EACCES, errno.EPERM):
        mend = "Give a port of 1024 or above: those below are for root."
    return Finding.failed("ports.listen", words, mend, facts=facts)


def _bootstrap(machine: Machine, port: int) -> Iterator[Finding]:
    """All workers of a host share it, so one of ours may have it."""
    listener = listener_on(machine, port)
    where = f"port {port}, on which the Neuron runtime meets other workers' ({PORT_VARIABLE}),"
    facts: dict[str, Fact] = {"port": port}
    if listener is None or listener.is_ours:
        state = "is free" if listener is None else f"is neuron-di's, pid {listener.pid}"
        yield Finding.ok("ports.bootstrap", f"{where} {state}", facts=facts)
    else:
        yield Finding.warning(
            "ports.bootstrap",
            f"{where} is taken by {listener}",
            f"End it if it is no Neuron worker, or set {PORT_VARIABLE} to another port, the same "
            "for all workers of all hosts.",
            facts=facts,
        )


def _outgoing(machine: Machine, ports: dict[int, str]) -> Iterator[Finding]:
    """An outgoing connection takes any port of a range, unless it is reserved."""
    outgoing = outgoing_ports(machine)
    exposed = sorted((set(ports) & set(outgoing)) - reserved_ports(machine))
    if exposed:
        first, last = outgoing.start, outgoing[-1]
        names = ", ".join(f"{port} ({ports[port]})" for port in exposed)
        yield Finding.note(
            "ports.outgoing",
            f"an outgoing connection may by chance have taken one of these before a server "
            f"starts: {names}",
            f"{reserve_mend(machine, exposed)}; or take ports outside {first}-{last}.",
            facts={"ports": list(exposed), "first": first, "last": last},
        )
