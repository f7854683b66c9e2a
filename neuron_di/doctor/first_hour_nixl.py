"""A read of one NeuronCore's memory by another one's process, through NIXL. Started by
`first_hour`.

    python -m neuron_di.doctor.first_hour_nixl BACKEND {device|host} LNC PEER_LNC

`host` reads host memory instead, which proves that this program works, and nothing of devices.
Memory of a device has never been read this way: it needs EFA.
"""

import base64
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import cast

import numpy as np

from neuron_di.clock import Deadline, now_s, sleep_s
from neuron_di.doctor.nrt_end import Peer, pattern, second_process
from neuron_di.doctor.steps import Facts, take
from neuron_di.transfer.nixl_agent import Backend, NixlAgent, Rows, load_nixl, rows_of
from neuron_di.wire import MemoryKind
from neuron_di_bindings.nrt import NrtRuntime, load_nrt
from neuron_di_bindings.process import end_with_parent

NUM_BYTES = 1 << 20
_READ_TIMEOUT_S = 30.0
_LATER_S = 0.5  # a read may be over before the device's memory has the bytes


class _Memory:
    """NUM_BYTES of a core's memory, or of the host's: where they are, and their bytes."""

    def __init__(self, place: str) -> None:
        self.kind: MemoryKind = "VRAM" if place == "device" else "DRAM"
        self.read: Callable[[], bytes]
        self.write: Callable[[bytes], None]
        if place == "device":
            # Before NIXL is loaded: libfabric looks for a runtime that is started.
            self._tensor = NrtRuntime(load_nrt()).init().allocate(NUM_BYTES, 0, "neuron-di doctor")
            self.address = self._tensor.address
            self.read, self.write = self._read_device, lambda data: self._tensor.write(0, data)
        else:
            self._host = np.zeros(NUM_BYTES, np.uint8)
            self.address = int(self._host.__array_interface__["data"][0])
            self.read, self.write = self._host.tobytes, self._write_host

    def _read_device(self) -> bytes:
        found = bytearray(NUM_BYTES)
        self._tensor.read(0, found)
        return bytes(found)

    def _write_host(self, data: bytes) -> None:
        self._host[:] = np.frombuffer(data, np.uint8)


def _agent(name: str, backend: str, memory: _Memory, *, is_serving: bool) -> NixlAgent:
    """As a worker's, with that memory registered."""
    agent = NixlAgent(name, cast("Backend", backend), {}, is_serving=is_serving)
    agent.register_rows(_rows(memory.address), memory.kind)
    return agent


def _rows(address: int) -> Rows:
    return rows_of(address, np.zeros(1, np.int64), np.array([NUM_BYTES]))


def examine(backend: str, place: str, peer_lnc: int) -> None:
    """Steps "nixl", "memory", "register", "peer" and "read"."""
    memories: list[_Memory] = []
    agents: list[NixlAgent] = []
    words = ("second", backend, place)
    with second_process(peer_lnc, *words, module="first_hour_nixl") as peer:

        def register() -> None:
            agents.append(_agent("reads", backend, memories[0], is_serving=False))

        if (
            take("memory", lambda: memories.append(_Memory(place)))
            and take("nixl", _nixl)
            and take("register", register)
        ):
            take("read", lambda: _read(agents[0], memories[0], peer))


def _nixl() -> None:
    load_nixl()


def _read(agent: NixlAgent, memory: _Memory, peer: Peer) -> Facts:
    said = peer.answer()
    memory.write(bytes(NUM_BYTES))
    start_s, deadline = now_s(), Deadline.after(_READ_TIMEOUT_S)
    agent.connect("offers", [base64.b64decode(said["metadata"])], _READ_TIMEOUT_S)
    own, peers = _rows(memory.address), _rows(int(said["address"]))
    agent.read(own, peers, deadline, own_kind=memory.kind, peers_kind=memory.kind)
    duration_s = round(now_s() - start_s, 6)
    wanted = pattern(1, NUM_BYTES)
    is_there = memory.read() == wanted
    sleep_s(_LATER_S)
    facts: Facts = {
        "num_bytes": NUM_BYTES,
        "duration_s": duration_s,
        "there_at_once": is_there,
        "there_later": memory.read() == wanted,
    }
    return facts if facts["there_later"] else facts | {"failed": "other bytes arrived"}


def follow(backend: str, place: str, channel: socket.socket) -> None:
    """Offer memory, until the other process is gone."""
    with channel, channel.makefile("r") as lines:
        try:
            memory = _Memory(place)
            memory.write(pattern(1, NUM_BYTES))
            agent = _agent("offers", backend, memory, is_serving=True)
            metadata = base64.b64encode(agent.metadata()).decode()
            facts: Facts = {"address": memory.address, "metadata": metadata}
        except Exception as error:  # whatever it is, the other process tells of it
            facts = {"failed": f"{type(error).__name__}: {error}"}
        channel.sendall(json.dumps(facts).encode() + b"\n")
        lines.readline()


if __name__ == "__main__":
    if sys.argv[1] == "second":
        _, its_backend, its_place, _, descriptor, parent = sys.argv[1:]
        end_with_parent(int(parent))
        follow(its_backend, its_place, socket.socket(fileno=int(descriptor)))
    else:
        its_backend, its_place, _, peers_lnc = sys.argv[1:]
        examine(its_backend, its_place, int(peers_lnc))
    os._exit(0)  # NIXL's threads, and the library, do not have to end in order
