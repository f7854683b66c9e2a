"""How a peer reaches a worker's KV: one member per kind of transfer engine, and its geometry.

All of it comes from another process, so every number has a bound (B37), and nothing is mapped,
registered or allocated by it before the engine has checked it against what it knows itself. A
region is read only by who has its engine: what a newer peer offers beside it harms nobody.
"""

from typing import Annotated, Literal, Self

import msgspec

from neuron_di.errors import RemoteProtocolError
from neuron_di.types import Incarnation
from neuron_di.wire.codec import WORDS_CHARS_MAX, encode_msgpack

OFFERS_MAX = 16
_COUNT_MAX = 1 << 40
ENGINE_NAME_CHARS_MAX = 32
_RANKS_MAX = 256
_RANK_HEADS_MAX = 256
_TENSORS_MAX = 1 << 17  # of a device's KV: 64 ranks of 80 layers have 10,240
NIXL_METADATA_BYTES_MAX = 6 << 20  # of a device's tensors; a message on the link has 8 MiB

Count = Annotated[int, msgspec.Meta(ge=1, le=_COUNT_MAX)]
_Lnc = Annotated[int, msgspec.Meta(ge=0, lt=4096)]
_RankHeads = Annotated[
    list[Annotated[int, msgspec.Meta(ge=-1, lt=4096)]],
    msgspec.Meta(min_length=1, max_length=_RANK_HEADS_MAX),
]
_Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
EngineName = Annotated[str, msgspec.Meta(min_length=1, max_length=ENGINE_NAME_CHARS_MAX)]
# How KV came: straight into its blocks; by way of other memory, because it lies there in another
# order; not at all, because its blocks changed their owner; or layer by layer, while the prefill
# still computed, by way of other memory.
KvForm = Literal["direct", "landed", "handed_over", "streamed"]
MemoryKind = Literal["DRAM", "VRAM"]  # as NIXL names them: a host's, a device's


class LayoutFields(msgspec.Struct, frozen=True, kw_only=True):
    """A KvLayout, field by field."""

    num_layers: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    num_kv_heads: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    head_dim: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    dtype: Literal["float32", "bfloat16", "float16"]
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


class HandoverRegion(msgspec.Struct, frozen=True, kw_only=True, tag="handover"):
    """Blocks of an arena that several workers of this host map: only owners change."""

    arena: Annotated[str, msgspec.Meta(min_length=32, max_length=32)]  # random, told by its maker
    slot: Annotated[int, msgspec.Meta(ge=0, le=255)]  # the worker's number in the arena
    incarnation: Incarnation


class ShmRegion(msgspec.Struct, frozen=True, kw_only=True, tag="shm"):
    """A KV pool in shared memory of this host, reached as an open file of its owner."""

    pid: int
    fd: int
    incarnation: Incarnation  # also stands in the segment's header: a reused pid is noticed
    num_blocks: int
    is_arena: bool = False  # it lies there, and the incarnation stands in its worker's slot
    # A digest of where the owner runs: others need not look for its process. "": unknown.
    host: Annotated[str, msgspec.Meta(max_length=64)] = ""


class TcpRegion(msgspec.Struct, frozen=True, kw_only=True, tag="tcp"):
    """Where a prefill worker takes data connections, and the secret that proves who connects.

    A decode worker offers its own with port 0: it listens to nobody.
    """

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    secret: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    num_streams: Annotated[int, msgspec.Meta(ge=1, le=64)]
    is_tls: bool = False

    def __repr__(self) -> str:
        return f"TcpRegion(host={self.host!r}, port={self.port})"


class NixlRegion(msgspec.Struct, frozen=True, kw_only=True, tag="nixl"):
    """A pool registered with a NIXL agent; `metadata` is what its peers load.

    NIXL does not survive damage there: `digest`, its SHA-256, is compared first.
    """

    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    backend: Literal["UCX", "LIBFABRIC"] = "UCX"  # of NIXL: both ends have the same
    address: _Address
    num_bytes: Count
    kind: MemoryKind = "DRAM"
    device: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0


class CudaIpcRegion(msgspec.Struct, frozen=True, kw_only=True, tag="cuda_ipc"):
    """A pool in one NVIDIA GPU's memory, exported to processes of the same host."""

    memory_handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    event_handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    device_uuid: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    host: Annotated[str, msgspec.Meta(max_length=64)]  # a kernel's boot id: handles hold in it only
    offset: Annotated[int, msgspec.Meta(ge=0, le=_COUNT_MAX)]  # of block 0 in the exported memory
    num_bytes: Count
    head: ShmRegion  # its header and generations: a segment without blocks
    nonce: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # stands before block 0

    def __repr__(self) -> str:
        return f"CudaIpcRegion(pid={self.head.pid}, num_bytes={self.num_bytes})"


class DeviceFields(msgspec.Struct, frozen=True, kw_only=True):
    """KV in the tensors of a Neuron device, one per rank, layer and K or V, slots within each: all
    of a KvGeometry that the peer does not know."""

    # Of each rank: its core, as the host counts, and its KV heads, -1 where it has none.
    lncs: Annotated[list[_Lnc], msgspec.Meta(min_length=1, max_length=_RANKS_MAX)]
    heads: Annotated[list[_RankHeads], msgspec.Meta(min_length=1, max_length=_RANKS_MAX)]
    keys: Literal["HSD", "SHD", "HDS"]
    values: Literal["HSD", "SHD", "HDS"]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]  # positions of a slot
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class NrtRegion(DeviceFields, frozen=True, kw_only=True, tag="nrt"):
    """A Neuron device that sends and receives.

    Where a prefill worker takes control connections, with the secret that proves who connects (a
    decode worker offers its own with port 0). `host` is the address by which the device's runtime
    finds the peer's, too.
    """

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    secret: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    is_tls: bool = False

    def __repr__(self) -> str:
        return f"NrtRegion(host={self.host!r}, port={self.port}, lncs={self.lncs})"


class NixlNeuronRegion(DeviceFields, frozen=True, kw_only=True, tag="nixl_neuron"):
    """A Neuron device whose tensors are registered with a NIXL agent.

    A prefill worker that accepted this peer tells where its tensors and its pool's head lie, and
    what NIXL must load (`digest` is the SHA-256 of all of it). A decode worker, and a prefill
    worker before that, has nothing to tell of these. The tensors' sizes follow from the geometry.
    """

    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    backend: Literal["UCX", "LIBFABRIC"] = "LIBFABRIC"
    kind: MemoryKind = "VRAM"  # of the tensors; the head is the host's
    metadata: Annotated[
        list[Annotated[bytes, msgspec.Meta(max_length=NIXL_METADATA_BYTES_MAX)]],
        msgspec.Meta(max_length=2),
    ] = []
    digest: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    addresses: Annotated[list[_Address], msgspec.Meta(max_length=_TENSORS_MAX)] = []
    head_address: _Address = 0

    def __repr__(self) -> str:
        return f"NixlNeuronRegion(agent={self.agent!r}, lncs={self.lncs})"


Region = (
    HandoverRegion
    | ShmRegion
    | TcpRegion
    | NixlRegion
    | CudaIpcRegion
    | NrtRegion
    | NixlNeuronRegion
)

_region_decoder: msgspec.msgpack.Decoder[Region] = msgspec.msgpack.Decoder(Region)


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One way to move a worker's KV: a transfer engine, and its region, unread."""

    engine: EngineName
    region: msgspec.Raw

    @classmethod
    def of(cls, engine: str, region: Region) -> Self:
        return cls(engine=engine, region=msgspec.Raw(encode_msgpack(region)))

    def read(self) -> Region:
        """RemoteProtocolError where it is none that this worker knows."""
        try:
            return _region_decoder.decode(self.region)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            words = str(error)[:WORDS_CHARS_MAX]
            raise RemoteProtocolError(f"its region cannot be understood: {words}") from None

    def __repr__(self) -> str:
        return f"Offer({self.engine!r})"


Offers = Annotated[list[Offer], msgspec.Meta(max_length=OFFERS_MAX)]
