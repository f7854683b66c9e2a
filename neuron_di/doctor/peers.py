"""Whether other machines' ports can be reached from here: `--peer HOST:PORT`."""

import errno
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from neuron_di.clock import Deadline, now_s
from neuron_di.config import DoctorOptions
from neuron_di.config.value import split_address
from neuron_di.doctor.finding import Finding
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.resolve import Unresolved, resolve

CONNECT_TIMEOUT_S = 3.0
AT_ONCE_MAX = 64  # more wait for these


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """A finding for each, in the order in which they were named."""
    if not options.peer:
        yield Finding.skipped(
            "peers.connect", "no --peer HOST:PORT was named, so no other machine was tried"
        )
        return
    with ThreadPoolExecutor(AT_ONCE_MAX) as threads:
        yield from threads.map(_try, dict.fromkeys(options.peer))


def _try(peer: str) -> Finding:
    host, port = split_address(peer)
    try:
        addresses = resolve(host)
    except Unresolved as error:
        return _not_reached(peer, str(error), "Correct it, or DNS, or name the IP address.")
    deadline = Deadline.after(CONNECT_TIMEOUT_S)
    failure: OSError = TimeoutError()
    for _, address in addresses:
        begun_s = now_s()
        try:
            socket.create_connection((address, port), max(deadline.remaining_s(), 0.1)).close()
        except OSError as error:
            failure = error
            continue
        took_ms = (now_s() - begun_s) * 1e3
        return Finding.ok(
            "peers.connect",
            f"{peer} is reached, in {took_ms:.1f} ms",
            facts={"peer": peer, "connect_ms": round(took_ms, 3)},
        )
    return _failure(peer, port, failure)


def _failure(peer: str, port: int, error: OSError) -> Finding:
    if isinstance(error, TimeoutError):
        return _not_reached(
            peer,
            "nothing answers: what is sent there is lost, or the host is down",
            f"Let TCP port {port} through: security groups and network ACLs on AWS, firewalls of "
            "both hosts; and look whether the host is up.",
        )
    if error.errno == errno.ECONNREFUSED:
        return _not_reached(
            peer,
            "the host answers, and nothing listens on that port",
            "Start what should listen there, on an address that others reach: not 127.0.0.1.",
        )
    return _not_reached(
        peer,
        (error.strerror or str(error)).lower(),
        "Look at the routes between the two hosts, and at the address.",
    )


def _not_reached(peer: str, why: str, mend: str) -> Finding:
    return Finding.failed(
        "peers.connect", f"{peer} is not reached: {why}", mend, facts={"peer": peer}
    )
