"""What the transfer benchmark's contenders share: the memory, the channel, and the commands.

Each contender is two processes, `source` and `sink`. Both map the same file that the benchmark
has, take commands as JSON lines and answer with JSON lines. Between them is a TCP connection of
their own, over which the sink asks for blocks and hears that they have come.

The standard library only: it also runs in environments that have no neuron_di.
"""

import contextlib
import ctypes
import json
import mmap
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

_POPULATE_WRITE = 23  # madvise, Linux 5.14
_LISTEN_TIMEOUT_S = 60.0

Obey = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Settings:
    role: str  # source or sink
    path: str  # of the file
    offset: int  # where its block 0 begins
    num_bytes: int  # from there on
    block_bytes: int
    transport: str  # which of the contender's


class Segment:
    """The blocks, mapped and touched."""

    def __init__(self, settings: Settings) -> None:
        with open(settings.path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), settings.offset + settings.num_bytes)
        with contextlib.suppress(OSError):  # an older kernel: then it is touched at first use
            self._map.madvise(_POPULATE_WRITE, settings.offset, settings.num_bytes)
        self._first = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._first) + settings.offset
        self.num_bytes = settings.num_bytes
        self._block_bytes = settings.block_bytes


def pieces_of(
    source_ids: list[int], block_ids: list[int], block_bytes: int
) -> tuple[list[int], list[int], list[int]]:
    """Offsets in the source's blocks and in the sink's, and lengths; neighbours are one piece."""
    sources: list[int] = []
    destinations: list[int] = []
    lengths: list[int] = []
    before = (-2, -2)
    for pair in zip(source_ids, block_ids, strict=True):
        if pair == (before[0] + 1, before[1] + 1):
            lengths[-1] += block_bytes
        else:
            sources.append(pair[0] * block_bytes)
            destinations.append(pair[1] * block_bytes)
            lengths.append(block_bytes)
        before = pair
    return sources, destinations, lengths


class Channel:
    """The connection between the two processes. The sink listens."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self.sock: socket.socket | None = None

    def listen(self) -> int:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_LISTEN_TIMEOUT_S)
        port: int = self._listener.getsockname()[1]
        return port

    def accept(self) -> None:
        assert self._listener is not None
        self._ready(self._listener.accept()[0])

    def connect(self, port: int) -> None:
        self._ready(socket.create_connection(("127.0.0.1", port)))

    def say(self) -> None:
        assert self.sock is not None
        self.sock.sendall(b"x")

    def hear(self) -> None:
        assert self.sock is not None
        if self.sock.recv(1) != b"x":
            raise EOFError("the other process is gone")

    def has_heard(self, wait_s: float) -> bool:
        """Like `hear`, but waits no longer than that."""
        assert self.sock is not None
        is_readable, _, _ = select.select([self.sock], [], [], wait_s)
        if is_readable:
            self.hear()
        return bool(is_readable)

    def _ready(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        self.sock = sock


class Stopwatch:
    """Wall and CPU time of this process, in seconds."""

    def __init__(self) -> None:
        self._cpu_s = time.process_time()
        self._start_s = time.perf_counter()

    def read(self) -> dict[str, float]:
        wall_s = time.perf_counter() - self._start_s
        return {"wall_s": wall_s, "cpu_s": time.process_time() - self._cpu_s}


def obey(package: str, open_contender: Callable[[Settings], Obey]) -> None:
    """Open with the settings of argv[1], say how long that took, then answer commands.

    `package` is whose version is told. Ends when standard input does.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    start_s = time.perf_counter()
    carry_out = open_contender(Settings(**json.loads(sys.argv[1])))
    open_s = time.perf_counter() - start_s
    name = f"{package} {version(package)}"
    print(json.dumps({"open_s": open_s, "version": name}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        if (answer := carry_out(command)) is not None:
            print(json.dumps(answer), file=answers)
    os._exit(0)  # some libraries' threads do not end by themselves
