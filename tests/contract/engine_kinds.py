"""Every kind of transfer engine. Each must pass the same tests: one entry here is all it takes."""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from neuron_di.errors import ConfigError
from neuron_di.kv import ArenaPool, KvLayout, KvPool
from neuron_di.transfer import ShmEngine, TransferEngine
from neuron_di.transfer.cuda_ipc_engine import CudaIpcEngine
from neuron_di.transfer.handover_engine import HandoverEngine
from neuron_di.transfer.nixl_agent import NixlAgent
from neuron_di.transfer.nixl_engine import NixlEngine
from neuron_di.transfer.tcp_engine import TcpEngine
from neuron_di.types import Incarnation, WorkerId
from neuron_di_bindings import owner_words

from . import fake_cuda, nixl_end, nrt_end


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """How to make one end; what else is known of it beforehand."""

    name: str
    make: Callable[[Any], TransferEngine]  # of what `make_pool` makes
    make_pool: Callable[[KvLayout, int, Incarnation], KvPool] = KvPool.create
    # Blocks change owner: both ends' pools lie in the arena of this descriptor, nothing is copied.
    join_pool: Callable[[int, KvLayout, int, Incarnation], KvPool] | None = None
    package: str | None = None  # that it needs, beyond this project's own
    lack: str | None = None  # what else is not there
    lands: bool = True  # receives bytes into registered memory, too; else it refuses them
    is_variant: bool = False  # of another kind: only what differs between processes is tested
    # Prefill lives on when a decode worker dies in mid-transfer. Not where what was posted to a
    # device cannot be taken back: there the worker is started again.
    outlives_its_readers: bool = True
    # A receive of many bytes fails when its peer dies as the first of them are here. Else it may
    # succeed: the bytes are in memory that stays, or are seen only when all have come.
    needs_its_peer: bool = False
    environment: Callable[[], Mapping[str, str]] = dict  # of another process, beside this one's

    @property
    def hands_over(self) -> bool:
        return self.join_pool is not None

    @property
    def why_not(self) -> str | None:
        """Why it cannot be tested here."""
        if self.package is not None and find_spec(self.package) is None:
            return f"{self.name}: the package {self.package} is not installed"
        return self.lack


def _join(arena_fd: int, layout: KvLayout, num_blocks: int, incarnation: Incarnation) -> KvPool:
    return ArenaPool.join(arena_fd, WorkerId(incarnation), layout, num_blocks, incarnation)


def _lack_of_libfabric() -> str | None:
    """NIXL's package has the plugin, and not what it needs."""
    try:
        ctypes.CDLL("libfabric.so.1")
    except OSError as error:
        return f"nixl over libfabric: {error}"
    try:
        NixlAgent("try", "LIBFABRIC", {}, is_serving=False).close()
    except ConfigError as error:
        return f"nixl over libfabric: {error}"
    return None


_LACK_OF_LIBFABRIC = _lack_of_libfabric()

_KINDS = (
    EngineKind(
        name="handover",
        make=HandoverEngine,
        join_pool=_join,
        lack=None if owner_words.is_available() else "handover: owner_words was not compiled",
        lands=False,
    ),
    EngineKind(name="shm", make=ShmEngine),
    EngineKind(name="shm, by its thread", make=lambda pool: ShmEngine(pool, small_bytes_max=0)),
    EngineKind(name="tcp", make=TcpEngine, needs_its_peer=True),
    EngineKind(name="nixl", make=NixlEngine, package="nixl_cu12", needs_its_peer=True),
    EngineKind(
        name="nixl over tcp",
        make=lambda pool: NixlEngine(pool, ucx_config="TLS=tcp"),
        package="nixl_cu12",
        is_variant=True,
        outlives_its_readers=False,  # UCX emulates reads there, and aborts when it cannot answer
        needs_its_peer=True,
    ),
    EngineKind(
        name="nixl over libfabric",
        make=lambda pool: NixlEngine(pool, backend="LIBFABRIC", timeout_s=10.0),
        package="nixl_cu12",
        lack=_LACK_OF_LIBFABRIC,
        is_variant=True,
    ),
    EngineKind(  # the real engine, with tensors in host memory
        name="nixl_neuron",
        make=nixl_end.make_engine,
        make_pool=nixl_end.make_pool,
        package="nixl_cu12",
        lands=False,  # it moves what is on devices, and any other memory is the host's
    ),
    EngineKind(
        name="nixl_neuron over libfabric",
        make=nixl_end.make_libfabric_engine,
        make_pool=nixl_end.make_pool,
        package="nixl_cu12",
        lack=_LACK_OF_LIBFABRIC,
        lands=False,
        is_variant=True,
    ),
    EngineKind(  # on a simulated GPU: tests/device has a real one
        name="cuda_ipc", make=CudaIpcEngine, make_pool=fake_cuda.make_pool, lack=fake_cuda.WHY_NOT
    ),
    EngineKind(  # out of the mirror, and into it
        name="tcp, with KV in GPU memory",
        make=TcpEngine,
        make_pool=fake_cuda.make_pool,
        lack=fake_cuda.WHY_NOT,
        is_variant=True,
    ),
    EngineKind(
        name="shm, with KV in GPU memory",
        make=ShmEngine,
        make_pool=fake_cuda.make_mirrored_pool,
        lack=fake_cuda.WHY_NOT,
        is_variant=True,
    ),
    EngineKind(
        name="nixl, with KV in GPU memory",
        make=NixlEngine,
        make_pool=fake_cuda.make_mirrored_pool,
        package="nixl_cu12",
        lack=fake_cuda.WHY_NOT,
        is_variant=True,
    ),
    EngineKind(  # on a simulated device
        name="nrt",
        make=nrt_end.make_engine,
        make_pool=nrt_end.make_pool,
        lack=nrt_end.WHY_NOT,
        lands=False,  # it moves what is on devices, and any other memory is the host's
        outlives_its_readers=False,
        environment=nrt_end.environment,
    ),
    EngineKind(  # the same, by classes that torch-neuronx has
        name="nrt by torch",
        make=nrt_end.make_engine,
        make_pool=nrt_end.make_torch_pool,
        lack=nrt_end.WHY_NOT,
        lands=False,
        outlives_its_readers=False,
        environment=nrt_end.environment,
    ),
)

KINDS = {kind.name: kind for kind in _KINDS}
