import asyncio
from collections.abc import Callable

from neuron_di_proxy.histogram import Histogram

class Outlet:
    has_written: bool
    head: bytes | None
    @property
    def fd(self) -> int: ...
    def __init__(self, fd: int, transport: asyncio.Transport) -> None: ...
    def write(self, data: bytes | bytearray | memoryview, /) -> None: ...
    def block(self) -> None: ...
    def close(self) -> None: ...

class Lane:
    due: int
    end: int
    @property
    def last_s(self) -> float: ...
    def __init__(
        self,
        outlet: Outlet,
        write: Callable[[bytes], None],
        before: bytes,
        behind: bytes,
        due: int,
        record: object,
        ids: list[int],
        gaps: Histogram,
        last_s: float,
        begun: Callable[[], None] | None = None,
    ) -> None: ...
    def take(self) -> int: ...
    def close(self) -> None: ...

class LinkReader:
    num_silent: int
    has_partial: bool
    @property
    def lanes(self) -> dict[int, Lane]: ...
    def __init__(self, now_s: Callable[[], float]) -> None: ...
    def data_received(self, data: bytes, /) -> None: ...

def relay_told(
    payload: bytes | bytearray | memoryview, lanes: dict[int, Lane], now_s: float, /
) -> tuple[list[tuple[int, int, int, str]], bytes | None, list[tuple[int, Exception]]]: ...
