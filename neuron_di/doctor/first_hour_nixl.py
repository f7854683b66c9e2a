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
from typing import Any

import numpy as np

from neuron_di.clock import Deadline, now_s, sleep_s
from neuron_di.doctor.nrt_end import Peer, pattern, second_process
from neuron_di.doctor.steps import Facts, take
from neuron_di.transfer.nixl_agent import load_nixl
from neuron_di_bindings.nrt import NrtRuntime, load_nrt
from neuron_di_bindings.process import end_with_parent

NUM_BYTES = 1 << 20
_READ_TIMEOUT_S = 30.0
_POLL_S = 0.0005
_LATER_S = 0.5  # a read may be over before the device's memory has the bytes
_PROGRESS_DELAY_US = 1000


class _Memory:
    """NUM_BYTES of a core's memory, or of the host's: where they are, and their bytes."""

    def __init__(self, place: str) -> None:
        self.segment = "VRAM_SEG" if place == "device" else "DRAM_SEG"
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


class _Agent:
    """One agent of NIXL, with that memory registered."""

    def __init__(self, name: str, backend: str, memory: _Memory) -> None:
        self._nixl = nixl = load_nixl()
        self._segment = getattr(nixl, memory.segment)
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        self._agent: Any = nixl.nixlAgent(name, config)
        self._agent.createBackend(backend, {})
        rows = [(memory.address, NUM_BYTES, 0, "")]
        self._agent.registerMem(nixl.nixlRegDList(self._segment, rows))

    def metadata(self) -> bytes:
        return bytes(self._agent.getLocalMD())

    def read(self, address: int, peer_address: int, metadata: bytes) -> None:
        """All of the peer's memory into this one. OSError where it does not end well."""
        nixl, agent = self._nixl, self._agent
        peer = agent.loadRemoteMD(metadata).decode()
        own, theirs = (
            nixl.nixlXferDList(self._segment, np.array([[where, NUM_BYTES, 0]], np.uint64))
            for where in (address, peer_address)
        )
        transfer = agent.createXferReq(nixl.NIXL_READ, own, theirs, peer)
        status, deadline = agent.postXferReq(transfer), Deadline.after(_READ_TIMEOUT_S)
        while status == nixl.NIXL_IN_PROG:
            if deadline.has_passed():
                raise OSError(f"the read is not over after {_READ_TIMEOUT_S:g} s")
            sleep_s(_POLL_S)
            status = agent.getXferStatus(transfer)
        if status != nixl.NIXL_SUCCESS:
            raise OSError(f"the read ended with {status}")
        agent.releaseXferReq(transfer)


def examine(backend: str, place: str, peer_lnc: int) -> None:
    """Steps "nixl", "memory", "register", "peer" and "read"."""
    memories: list[_Memory] = []
    agents: list[_Agent] = []
    words = ("second", backend, place)
    with second_process(peer_lnc, *words, module="first_hour_nixl") as peer:
        if (
            take("memory", lambda: _made(memories, lambda: _Memory(place)))
            and take("nixl", _nixl)
            and take(
                "register", lambda: _made(agents, lambda: _Agent("reads", backend, memories[0]))
            )
        ):
            take("read", lambda: _read(agents[0], memories[0], peer))


def _made(into: list[Any], make: Callable[[], Any]) -> Facts:
    into.append(_guarded(make))
    return {}


def _nixl() -> Facts:
    load_nixl()
    return {}


def _guarded(action: Callable[[], Any]) -> Any:
    """NIXL's exceptions are classes of its own."""
    try:
        return action()
    except Exception as error:
        if type(error).__module__.startswith("nixl"):
            raise OSError(f"{type(error).__name__}: {error}") from None
        raise


def _read(agent: _Agent, memory: _Memory, peer: Peer) -> Facts:
    said = peer.answer()
    memory.write(bytes(NUM_BYTES))
    start_s = now_s()
    metadata = base64.b64decode(said["metadata"])
    _guarded(lambda: agent.read(memory.address, int(said["address"]), metadata))
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
            agent = _guarded(lambda: _Agent("offers", backend, memory))
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
