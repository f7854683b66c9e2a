"""A serving end of one's own: a second process of this host, for as long as it is needed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from select import select

from neuron_di.config import TransferOptions, child_environment
from neuron_di.errors import PeerGone, PeerTimeout
from neuron_di.transfer_bench.control_link import ControlLink, make_key
from neuron_di.transfer_bench.flags import KEY_VARIABLE, OF_WORKERS, READY_WORDS

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
HOST = "127.0.0.1"


@contextmanager
def local_serving_end(
    options: TransferOptions = TransferOptions(),  # noqa: B008 - nothing changes it
) -> Iterator[ControlLink]:
    """Start `bench-transfer --serve` on a free port, and link to it. It ends with the block."""
    key = make_key()
    words = ["--serve", "--host", HOST, "--port", "0", f"--parent-pid={os.getpid()}"]
    of_workers = {name: getattr(options, name.replace("-", "_")) for name, *_ in OF_WORKERS}
    words += [f"--{name}={value}" for name, value in of_workers.items() if value is not None]
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", "neuron_di", "bench-transfer", *words],
        env=child_environment() | {KEY_VARIABLE: key},  # which only its user can read
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches this process, which ends that one
    )
    try:
        link = ControlLink.ask(HOST, _port_of(process), key)
        try:
            yield link
        finally:
            link.close()
    finally:
        _end(process)


def _port_of(process: "subprocess.Popen[bytes]") -> int:
    """What it says it listens on."""
    assert process.stdout is not None
    is_readable, _, _ = select([process.stdout], [], [], START_TIMEOUT_S)
    if not is_readable:
        raise PeerTimeout("the serving process did not start in time")
    line = process.stdout.readline().decode(errors="replace").strip()
    words, _, address = line.rpartition(" ")
    port = address.rpartition(":")[2]
    if words != READY_WORDS or not port.isdecimal():
        raise PeerGone("the serving process ended before it listened")
    return int(port)


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(END_TIMEOUT_S)  # it does so when the link closes
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
