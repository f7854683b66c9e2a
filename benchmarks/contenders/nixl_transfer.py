"""NIXL over UCX: the sink reads the source's blocks, or the source writes them into the sink's.

`transport` is what UCX may use: empty for its own choice, which is process_vm_readv (CMA) on one
host, or tcp. Descriptor lists of all blocks are prepared at set-up; a transfer of scattered blocks
names them by index, one of neighbours has a single descriptor.
"""

import base64
import os
import time
from typing import Any

import numpy as np

from benchmarks.contenders.transfer_segment import (
    Channel,
    Obey,
    Segment,
    Settings,
    Stopwatch,
    obey,
    pieces_of,
)


class Nixl:
    def __init__(self, settings: Settings) -> None:
        if settings.transport:
            os.environ["UCX_TLS"] = settings.transport
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._settings = settings
        self._segment = Segment(settings)
        self._channel = Channel()
        self._name = settings.role
        self._agent: Any = nixl_agent(
            self._name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        )
        address, num_bytes = self._segment.address, self._segment.num_bytes
        self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")
        self._peer = ""
        self._peer_address = 0
        self._sides: tuple[Any, Any] | None = None
        self._handle: Any = None

    def obey(self, command: dict[str, Any]) -> Any:
        return getattr(self, f"_{command.pop('do')}")(**command)

    def _offer(self) -> dict[str, Any]:
        """How this process is reached."""
        port = self._channel.listen() if self._settings.role == "sink" else 0
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self._segment.address, "port": port}

    def _connect(self, metadata: str, address: int, port: int) -> dict[str, float]:
        watch = Stopwatch()
        if port:
            self._channel.connect(port)
        else:
            self._channel.accept()
        name = self._agent.add_remote_agent(base64.b64decode(metadata))
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._peer_address = address
        self._agent.make_connection(self._peer)
        own, theirs = self._blocks(self._segment.address), self._blocks(address)
        self._sides = (
            self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", own, "DRAM"),
            self._agent.prep_xfer_dlist(self._peer, theirs, "DRAM"),
        )
        return watch.read()

    def _blocks(self, address: int) -> Any:
        size = self._settings.block_bytes
        count = self._segment.num_bytes // size
        rows = np.zeros((count, 3), np.uint64)
        rows[:, 0] = address + np.arange(count, dtype=np.uint64) * size
        rows[:, 1] = size
        return rows

    def _progress(self) -> dict[str, float]:
        """Source: help the sink's reads along until it says that it has them.

        UCX over tcp emulates reads, so both processors must turn. Shared memory needs the other
        end now and then: looking after it every millisecond is enough.
        """
        watch = Stopwatch()
        pause_s = 0.0 if self._settings.transport == "tcp" else 0.001
        while not self._channel.has_heard(pause_s):
            self._agent.get_new_notifs()
        return watch.read()

    def _read(self, source_ids: list[int], block_ids: list[int]) -> dict[str, float]:
        """Sink: fetch the blocks, while the source is in `_progress`."""
        init_s = self._prepare("READ", block_ids, source_ids)
        watch = Stopwatch()
        self._run(b"")
        found = watch.read() | {"init_s": init_s}
        self._channel.say()
        self._handle.release()
        return found

    def _write(self, source_ids: list[int], block_ids: list[int]) -> dict[str, float]:
        """Source: be ready, and when the sink asks, write and notify it."""
        return {"init_s": self._prepare("WRITE", source_ids, block_ids)}

    def _write_now(self) -> dict[str, float]:
        self._channel.hear()
        watch = Stopwatch()
        self._run(b"done")
        found = watch.read()
        self._handle.release()
        return found

    def _await(self) -> dict[str, float]:
        """Sink: ask for what the source has prepared, and wait for its notification."""
        watch = Stopwatch()
        self._channel.say()
        while not self._agent.get_new_notifs():
            pass
        return watch.read()

    def _prepare(self, operation: str, own_ids: list[int], peer_ids: list[int]) -> float:
        """A request that needs only to be posted. Returns how long that took."""
        start_s = time.perf_counter()
        own, theirs, lengths = pieces_of(own_ids, peer_ids, self._settings.block_bytes)
        if len(lengths) == 1:
            pieces = [
                self._agent.get_xfer_descs([(address, lengths[0], 0)], "DRAM")
                for address in (self._segment.address + own[0], self._peer_address + theirs[0])
            ]
            self._handle = self._agent.initialize_xfer(operation, *pieces, self._peer)
        else:
            assert self._sides is not None
            start_s = time.perf_counter()  # it merges neighbours by itself
            own_side, peer_side = self._sides
            self._handle = self._agent.make_prepped_xfer(
                operation,
                own_side,
                np.asarray(own_ids, np.int32),
                peer_side,
                np.asarray(peer_ids, np.int32),
            )
        return time.perf_counter() - start_s

    def _run(self, notification: bytes) -> None:
        state = self._agent.transfer(self._handle, notification)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state}")


def open_nixl(settings: Settings) -> Obey:
    return Nixl(settings).obey


if __name__ == "__main__":
    obey("nixl-cu12", open_nixl)
