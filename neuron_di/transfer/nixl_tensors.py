"""A Neuron device as NIXL has it: tensors at device addresses, and the rows that a plan makes.

NIXL numbers devices; what it makes of Neuron memory uses no number, but wants the same at both ends
of a registration. Here it is the core, as the host counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from neuron_di.errors import ConfigError, RemoteProtocolError
from neuron_di.kv import DeviceKv, KvGeometry, KvLayout, KvPool, NeuronPool, head_bytes
from neuron_di.kv.runs import Ints
from neuron_di.transfer.nixl_agent import Rows, rows_of
from neuron_di.transfer.nrt_plan import device_geometry
from neuron_di.wire import MemoryKind, NixlNeuronRegion
from neuron_di_bindings.nrt import NrtError, NrtMisuse, NrtUnsupported

_ADDRESS_END = 1 << 63  # addresses are signed here, and are added to


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceMemory:
    """Where the tensors of a device's KV lie: this worker's, or, as it says, a peer's."""

    geometry: KvGeometry  # the part of each slot that requests use
    kind: MemoryKind
    addresses: Ints  # [tensors]
    sizes: Ints  # [tensors], bytes
    devices: Ints  # [tensors]

    def __post_init__(self) -> None:
        assert len(self.addresses) == len(self.sizes) == len(self.devices)

    def whole(self, tensors: Ints) -> Rows:
        """These tensors, as they are registered."""
        offsets = np.zeros(len(tensors), np.int64)
        return self.rows(tensors, offsets, self.sizes[tensors])

    def rows(self, tensors: Ints, offsets: Ints, lengths: Ints) -> Rows:
        """Runs within tensors. The caller checked the bounds."""
        return rows_of(self.addresses[tensors], offsets, lengths, self.devices[tensors])

    def position_offsets(self, position: int) -> Ints:
        """Where each tensor has the first number of this position of slot 0."""
        offsets = np.empty(len(self.addresses), np.int64)
        for part, strides in enumerate(self.geometry.strides):  # of keys, of values
            offsets[self.geometry.tensors[:, :, part]] = position * strides.token
        return offsets


def neuron_pool(pool: KvPool) -> NeuronPool:
    """ConfigError where it is not one, or nobody says where its tensors lie."""
    if not isinstance(pool, NeuronPool):
        raise ConfigError("this is for KV on a Neuron device: --device neuron", param="transfer")
    try:
        addresses = [tensor.address for tensor in pool.device.tensors]
    except (NrtError, NrtMisuse, NrtUnsupported) as error:
        raise ConfigError(
            f"the Neuron runtime does not tell where KV tensors lie: {error}", param="transfer"
        ) from None
    if num_bare := sum(address is None for address in addresses):
        raise ConfigError(
            f"{num_bare} of {len(addresses)} KV tensors have no device address: the installed "
            "packages give none; --transfer shm,tcp moves KV by way of the host",
            param="transfer",
        )
    return pool


def own_memory(pool: NeuronPool, kind: MemoryKind) -> DeviceMemory:
    """Of a pool whose tensors have addresses."""
    device = pool.device
    geometry = replace(device.geometry, num_blocks=pool.num_blocks)
    return DeviceMemory(
        geometry=DeviceKv.used_part(geometry, pool.layout.block_size),
        kind=kind,
        addresses=np.array([tensor.address for tensor in device.tensors], np.int64),
        sizes=np.array([tensor.num_bytes for tensor in device.tensors], np.int64),
        devices=_devices(geometry, device.lncs),
    )


def peer_memory(region: NixlNeuronRegion, layout: KvLayout) -> DeviceMemory:
    """Of a peer whose pool has `layout`.

    RemoteProtocolError where no device has its tensors there. That they are registered is for NIXL
    to say: it reads nowhere else.
    """
    geometry = device_geometry(region, layout)
    sizes = geometry.tensor_bytes()
    if len(region.addresses) != len(sizes):
        raise RemoteProtocolError(f"{len(region.addresses)} addresses of {len(sizes)} KV tensors")
    parts = [(address, sizes[number]) for number, address in enumerate(region.addresses)]
    for address, num_bytes in [*parts, (region.head_address, head_bytes(region.num_blocks))]:
        if not 0 < address <= _ADDRESS_END - num_bytes:
            raise RemoteProtocolError("KV that lies nowhere")
    return DeviceMemory(
        geometry=geometry,
        kind=region.kind,
        addresses=np.array(region.addresses, np.int64),
        sizes=np.array([sizes[number] for number in range(len(sizes))], np.int64),
        devices=_devices(geometry, region.lncs),
    )


def _devices(geometry: KvGeometry, lncs: Sequence[int]) -> NDArray[np.int64]:
    ranks = geometry.rank_of_tensor()
    return np.array([lncs[ranks[number]] for number in range(len(ranks))], np.int64)
