"""One end of a send and receive between two NeuronCores, and the process that is the other one.

    python -m neuron_di.doctor.nrt_end {receive|send} LNC DESCRIPTOR PARENT

The second process does what the first one tells it by a pair of sockets, a line of JSON each, and
ends when the first one is gone. So far this has run on a simulator of libnrt only.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from neuron_di.clock import Deadline, now_s, sleep_s
from neuron_di.doctor.steps import Facts
from neuron_di.neuron_cores import VISIBLE_CORES
from neuron_di_bindings.nrt import (
    Communicator,
    NrtError,
    NrtMissing,
    NrtMisuse,
    NrtRequest,
    NrtRuntime,
    NrtTensor,
    NrtUnsupported,
    SendReceive,
    load_nrt,
)
from neuron_di_bindings.process import end_with_parent

Role = Literal["receive", "send"]

MEMORY_BYTES = 16 << 20
CONNECT_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 30.0
_POLL_S = 0.0005
_END_TIMEOUT_S = 5.0
_LINE_BYTES_MAX = 1 << 16


@dataclass(slots=True)
class End:
    """A core, its memory, and its one communicator, once there is one. `lnc` is the host's
    number."""

    lnc: int
    runtime: NrtRuntime
    both: SendReceive
    tensor: NrtTensor
    communicator: Communicator | None = None

    def connect(self, role: Role, address: str, peer_lnc: int, timeout_s: float) -> Facts:
        """With a core of another process of the host that has this address."""
        begin = self.both.connect if role == "send" else self.both.accept
        start_s, deadline = now_s(), Deadline.after(timeout_s)
        self.communicator = begin(address, peer_lnc, self.lnc)
        while not self.communicator.is_connected():
            if deadline.has_passed():
                return {"failed": f"not connected within {timeout_s:g} s"}
            sleep_s(_POLL_S)
        return {"duration_s": round(now_s() - start_s, 4)}

    def post(self, role: Role, offset: int, num_bytes: int) -> NrtRequest:
        """Of the tensor's bytes. It is connected."""
        assert self.communicator is not None, "it is connected"
        post = self.communicator.send if role == "send" else self.communicator.receive
        return post(self.tensor, offset, num_bytes)


def open_end(runtime: NrtRuntime, lnc: int) -> End:
    """Of a runtime that is started. Opens its first core's send and receive, takes memory."""
    both = SendReceive(runtime)
    both.open(lnc)
    tensor = runtime.allocate(MEMORY_BYTES, 0, "neuron-di doctor")
    return End(lnc, runtime, both, tensor)


def start_end(lnc: int) -> End:
    """The same, with a runtime of this process's own."""
    return open_end(NrtRuntime(load_nrt()).init(), lnc)


def wait_for(request: NrtRequest) -> int:
    """Bytes of a request, when it is over. OSError where that takes too long."""
    deadline = Deadline.after(REQUEST_TIMEOUT_S)
    while (count := request.test()) is None:
        if deadline.has_passed():
            raise OSError(f"a request is not over after {REQUEST_TIMEOUT_S:g} s")
        sleep_s(_POLL_S)
    return count


def pattern(number: int, num_bytes: int) -> bytes:
    """Bytes that both ends know, other ones for each number."""
    period = bytes((number * 37 + index) % 251 for index in range(251))
    return (period * (num_bytes // 251 + 1))[:num_bytes]


class Peer:
    """The second process, as the first one sees it."""

    def __init__(self, process: "subprocess.Popen[bytes]", channel: socket.socket) -> None:
        self.process = process
        self._channel = channel
        self._lines = channel.makefile("r")

    def tell(self, **words: Any) -> None:
        self._channel.sendall(json.dumps(words).encode() + b"\n")

    def answer(self) -> Facts:
        """OSError where it failed, or is gone."""
        line = self._lines.readline(_LINE_BYTES_MAX)
        if not line:
            code = self.process.wait(_END_TIMEOUT_S)
            raise OSError(f"the other process ended with code {code}")
        said: Facts = json.loads(line)
        if "failed" in said:
            raise OSError(f"the other process: {said['failed']}")
        return said

    def kill(self) -> None:
        """As a crash would."""
        self.process.kill()
        self.process.wait(_END_TIMEOUT_S)

    def close(self) -> None:
        self._lines.close()


def connect_both(
    end: End,
    peer: Peer,
    role: Role,
    address: str,
    peer_lnc: int,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> Facts:
    """As End.connect, with a second process that is told to do the same."""
    peer.tell(do="connect", address=address, peer_lnc=end.lnc, timeout_s=timeout_s)
    facts = end.connect(role, address, peer_lnc, timeout_s)
    peer.answer()
    return facts


@contextmanager
def second_process(lnc: int, *words: str, module: str = "nrt_end") -> Iterator[Peer]:
    """Start it, with this core alone, and these words before its own. It is gone at the end.

    Its first answer says that it runs.
    """
    here, there = socket.socketpair()
    here.settimeout(CONNECT_TIMEOUT_S + REQUEST_TIMEOUT_S)
    words = (*words, str(lnc), str(there.fileno()), str(os.getpid()))
    process = subprocess.Popen(  # noqa: S603 - a module of ours
        [sys.executable, "-m", f"neuron_di.doctor.{module}", *words],
        env=os.environ | {VISIBLE_CORES: str(lnc)},
        pass_fds=[there.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    there.close()
    peer = Peer(process, here)
    try:
        with here:
            yield peer
    finally:
        peer.close()
        peer.kill()


def follow(role: Role, lnc: int, channel: socket.socket) -> None:
    """Be the second process: do what it is told, until the first one is gone."""
    with channel, channel.makefile("r") as lines:

        def answer(facts: Facts) -> None:
            channel.sendall(json.dumps(facts).encode() + b"\n")

        try:
            end = start_end(lnc)
            answer({})
            for line in lines:
                answer(_obey(end, role, json.loads(line)))
        except (NrtError, NrtMissing, NrtMisuse, NrtUnsupported, OSError) as error:
            with suppress(OSError):
                answer({"failed": str(error)})


def _obey(end: End, role: Role, order: Facts) -> Facts:
    if order["do"] == "connect":
        return end.connect(role, order["address"], order["peer_lnc"], order["timeout_s"])
    num_bytes = int(order["num_bytes"])
    if role == "send":
        end.tensor.write(0, pattern(int(order["number"]), num_bytes))
    for _ in range(int(order.get("count", 1))):
        wait_for(end.post(role, 0, num_bytes))
    return {}


if __name__ == "__main__":
    its_role, its_lnc, descriptor, parent = sys.argv[1:]
    end_with_parent(int(parent))
    follow(
        "send" if its_role == "send" else "receive",
        int(its_lnc),
        socket.socket(fileno=int(descriptor)),
    )
    os._exit(0)  # what is posted for good keeps the library from ending in order
