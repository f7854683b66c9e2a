"""mooncake-transfer-engine over TCP, with its peer-to-peer metadata: no server.

The sink reads the source's blocks, or the source writes them into the sink's when it is asked to.
Neighbours are one descriptor. The limit of queued descriptors is lifted to its highest, as 2,048
are refused otherwise.
"""

import os
from typing import Any

from benchmarks.contenders.transfer_segment import (
    Channel,
    Obey,
    Segment,
    Settings,
    Stopwatch,
    obey,
    pieces_of,
)


class Mooncake:
    def __init__(self, settings: Settings) -> None:
        os.environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] = "65535"
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        from mooncake.engine import TransferEngine

        self._settings = settings
        self._segment = Segment(settings)
        self._channel = Channel()
        self._engine: Any = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("mooncake does not start")
        if self._engine.register_memory(self._segment.address, self._segment.num_bytes) != 0:
            raise RuntimeError("mooncake does not register the memory")
        self._peer = ""
        self._peer_address = 0
        self._pieces: tuple[list[int], list[int], list[int]] = ([], [], [])

    def obey(self, command: dict[str, Any]) -> Any:
        return getattr(self, f"_{command.pop('do')}")(**command)

    def _offer(self) -> dict[str, Any]:
        port = self._channel.listen() if self._settings.role == "sink" else 0
        name = f"127.0.0.1:{self._engine.get_rpc_port()}"
        return {"metadata": name, "address": self._segment.address, "port": port}

    def _connect(self, metadata: str, address: int, port: int) -> dict[str, float]:
        watch = Stopwatch()
        if port:
            self._channel.connect(port)
        else:
            self._channel.accept()
        self._peer, self._peer_address = metadata, address
        return watch.read()

    def _progress(self) -> dict[str, float]:
        """Source: its threads do all; say what they used until the sink has its blocks."""
        watch = Stopwatch()
        self._channel.hear()
        return watch.read()

    def _read(self, source_ids: list[int], block_ids: list[int]) -> dict[str, float]:
        init_s = self._prepare(block_ids, source_ids)
        watch = Stopwatch()
        self._check(self._engine.batch_transfer_sync_read(self._peer, *self._pieces))
        found = watch.read() | {"init_s": init_s}
        self._channel.say()
        return found

    def _write(self, source_ids: list[int], block_ids: list[int]) -> dict[str, float]:
        return {"init_s": self._prepare(source_ids, block_ids)}

    def _write_now(self) -> dict[str, float]:
        self._channel.hear()
        watch = Stopwatch()
        self._check(self._engine.batch_transfer_sync_write(self._peer, *self._pieces))
        self._channel.say()
        return watch.read()

    def _await(self) -> dict[str, float]:
        watch = Stopwatch()
        self._channel.say()
        self._channel.hear()
        return watch.read()

    def _prepare(self, own_ids: list[int], peer_ids: list[int]) -> float:
        """Addresses for its call. Returns how long that took."""
        watch = Stopwatch()
        own, theirs, lengths = pieces_of(own_ids, peer_ids, self._settings.block_bytes)
        self._pieces = (
            [self._segment.address + offset for offset in own],
            [self._peer_address + offset for offset in theirs],
            lengths,
        )
        return watch.read()["wall_s"]

    def _check(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"mooncake says {code}")


def open_mooncake(settings: Settings) -> Obey:
    return Mooncake(settings).obey


if __name__ == "__main__":
    obey("mooncake-transfer-engine-non-cuda", open_mooncake)
