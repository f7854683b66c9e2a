"""The transfer engine over NIXL between Neuron devices: decode reads prefill's device memory.

The prefill worker's processors, and its device's cores, are not involved, and a reader that dies
harms nobody. Any number of ranks reads from any other: both ends reckon one plan of both
geometries, as for send and receive (nrt_plan.py). Only tokens that were used move.

A slot that a peer may read has its KV on the device: prefill computed it there, or `end_fill` of
the pool brought it there before anybody was told of it.

NIXL reads Neuron memory by its LIBFABRIC. On a device this has never run: tests move real bytes by
UCX and by LIBFABRIC over TCP, with tensors in host memory.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from neuron_di.errors import ConfigError, NeuronDiError, PeerGone, PeerRefused
from neuron_di.kv import KvLayout, KvPool, Memory, head_bytes
from neuron_di.transfer.nixl_agent import NixlAgent
from neuron_di.transfer.nixl_engine import TRANSFER_TIMEOUT_S
from neuron_di.transfer.nixl_fence import Fence
from neuron_di.transfer.nixl_neuron_reader import NixlNeuronReader, OwnDevice
from neuron_di.transfer.nixl_serving import ServingAgents
from neuron_di.transfer.nixl_tensors import DeviceMemory, neuron_pool, own_memory, peer_memory
from neuron_di.transfer.nrt_plan import DevicePlan, device_fields, device_geometry
from neuron_di.transfer.peer_readers import Readers
from neuron_di.transfer.run_bounds import slot_refusal
from neuron_di.transfer.transfer_engine import Receive, Send, TransferToken
from neuron_di.types import Incarnation
from neuron_di.wire import MemoryKind, NixlNeuronRegion, Region
from neuron_di.wire.regions import NIXL_METADATA_BYTES_MAX

# An agent of this name that serves, if it is told to, or else reads.
OpenAgent = Callable[[str, bool], NixlAgent]

# Until a peer's device was read once. Shorter than a transfer may take: `auto` tries this engine
# first, and a request waits.
CONNECT_TIMEOUT_S = 10.0


def open_libfabric(name: str, is_serving: bool) -> NixlAgent:
    return NixlAgent(name, "LIBFABRIC", {}, is_serving=is_serving)


class NixlNeuronEngine:
    """Owns agents that serve this worker's tensors, a reader per peer and a fence for them all.
    Borrows the pool and its tensors, which may be freed after close().

    `kind` is how NIXL takes the tensors' memory: tests have it in the host's. ConfigError, with
    cause and mend, where NIXL cannot have it.
    """

    name = "nixl_neuron"
    is_one_sided = True

    def __init__(
        self,
        pool: KvPool,
        *,
        open_agent: OpenAgent = open_libfabric,
        kind: MemoryKind = "VRAM",
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        self._pool = pool = neuron_pool(pool)
        self._open_agent = open_agent
        self._timeout_s = timeout_s
        self._connect_timeout_s = min(timeout_s, CONNECT_TIMEOUT_S)
        self._memory = own_memory(pool, kind)
        self._connections = itertools.count()
        self._readers: Readers[NixlNeuronReader] = Readers()
        head = head_bytes(pool.num_blocks)
        self._head = Memory(pool.memory().address - head, head)
        fields = device_fields(pool.device, pool.num_blocks)
        self._serving = ServingAgents(pool.incarnation, self._open_server)
        self._fence = Fence(
            f"{pool.incarnation}-fence",
            self._memory,
            self._serving,
            lambda name: open_agent(name, False),
            timeout_s=timeout_s,
        )
        # What a peer is told that was not accepted, and each that was.
        server = self._serving.present
        self._region = NixlNeuronRegion(
            agent=server.name,
            backend=server.backend,
            kind=kind,
            **msgspec.structs.asdict(fields),
        )
        self._regions: dict[Incarnation, NixlNeuronRegion] = {}

    def local_region(self, peer: Incarnation) -> Region:
        """With addresses and NIXL's metadata for a decode worker that was accepted."""
        return self._regions.get(peer, self._region)

    def register(self, memory: Memory) -> None:
        """Nothing to do: nothing is received outside of the device's slots."""

    def connect(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        """Registers the tensors that receives go to once more, for this peer alone."""
        region = self._checked(region, layout)
        if not region.metadata:
            raise PeerRefused("it has not accepted this worker")
        if _digest(region.metadata) != region.digest:
            raise PeerRefused("NIXL's metadata came damaged")  # it would end this process
        source = peer_memory(region, layout)
        plan = DevicePlan(source.geometry, self._memory.geometry)
        with self._readers.connecting():
            self._fence.open(self._connect_timeout_s)
            self._readers.put(peer, self._reader_of(peer, region, plan, source))

    def accept(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        """Tell it of the tensors that it will read: which these are, follows from its geometry."""
        region = self._checked(region, layout)
        plan = DevicePlan(self._memory.geometry, device_geometry(region, layout))
        head = np.array([[self._head.address, self._head.num_bytes, 0]], np.uint64)
        tensors = self._memory.whole(np.unique(plan.moves([0], [0], 1).source_tensors))
        try:
            server = self._serving.take(peer)
            metadata = [
                server.metadata_of(tensors, self._memory.kind),
                server.metadata_of(head, "DRAM"),
            ]
        except ConfigError as error:
            raise PeerGone(error.message) from None
        if (num_bytes := sum(map(len, metadata))) > NIXL_METADATA_BYTES_MAX:
            raise PeerRefused(
                f"NIXL's metadata of its KV tensors has {num_bytes} bytes, more than "
                f"{NIXL_METADATA_BYTES_MAX}"
            )
        self._regions[peer] = msgspec.structs.replace(
            self._region,
            agent=server.name,
            metadata=metadata,
            digest=_digest(metadata),
            addresses=self._memory.addresses.tolist(),
            head_address=self._head.address,
        )

    def post_send(self, peer: Incarnation, send: Send) -> TransferToken:  # noqa: ARG002
        return TransferToken.over()  # the reader does all the work

    def post_receive(self, peer: Incarnation, receive: Receive) -> TransferToken:
        reader = self._readers.get(peer)
        if reader is None:
            return TransferToken.over(PeerGone("no connection to the prefill worker's device"))
        error = slot_refusal(receive, self._pool, reader.num_blocks)
        if error is not None:
            return TransferToken.over(error)
        token = TransferToken()
        reader.post(receive, token)
        return token

    def cancel(self, peer: Incarnation, tag: int) -> None:
        """Nothing to do: a transfer waits for nobody, and for no longer than its deadline."""

    def fence(self, peer: Incarnation) -> None:
        """Nothing to do: no token is done before its bytes were fenced."""

    def commit(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:  # noqa: ARG002
        """Fill the other replicas of each head, with what was verified.

        The generations were read, over the link, before the token was done.
        """
        return self._pool.fill_replicas(receive.block_ids, receive.num_tokens)

    def abandon(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:  # noqa: ARG002
        return None

    def disconnect(self, peer: Incarnation) -> None:
        self._regions.pop(peer, None)
        self._serving.drop(peer)
        self._readers.drop(peer)

    def close(self) -> None:
        self._readers.close()
        self._fence.close()
        self._serving.close()

    def _open_server(self, name: str) -> NixlAgent:
        """One that serves the tensors."""
        server = self._open_agent(name, True)
        try:
            self._register_with(server)
        except BaseException:
            server.close()
            raise
        return server

    def _register_with(self, server: NixlAgent) -> None:
        """The tensors, and the pool's head, which lies in host memory."""
        memory = self._memory
        if f"{memory.kind}_SEG" not in server.kinds:
            raise ConfigError(
                "NIXL's LIBFABRIC finds no Neuron device here, or no EFA for it (`fi_info -p efa`)",
                param="transfer",
            )
        server.register(self._head)
        try:
            server.register_rows(memory.whole(np.arange(len(memory.addresses))), memory.kind)
        except ConfigError as error:
            raise ConfigError(
                f"{error.message} of device memory: the driver and EFA must share it "
                "(FI_LOG_LEVEL=info says more)",
                param="transfer",
            ) from None

    def _checked(self, region: Region, layout: KvLayout) -> NixlNeuronRegion:
        if not isinstance(region, NixlNeuronRegion):
            raise PeerRefused("it has no Neuron device that is registered with NIXL")
        if region.backend != self._region.backend:
            raise PeerRefused("its NIXL is of another backend")
        if layout != self._pool.layout:
            raise PeerRefused("its slots are of another length, or its model's KV another")
        return region

    def _reader_of(
        self, peer: Incarnation, region: NixlNeuronRegion, plan: DevicePlan, source: DeviceMemory
    ) -> NixlNeuronReader:
        # Of its own for each connection: LIBFABRIC at the other end takes no second of one name.
        name = f"{self._pool.incarnation}-{peer}-{next(self._connections)}"
        own = OwnDevice(
            memory=self._memory,
            num_positions=self._pool.device.geometry.block_size,
            fence=self._fence,
        )
        agent: NixlAgent | None = None
        try:
            agent = self._open_agent(name, False)
            reader = NixlNeuronReader(
                agent,
                peer,
                region,
                plan,
                source,
                own,
                self._mark,
                self._readers.check_open,
                connect_timeout_s=self._connect_timeout_s,
                timeout_s=self._timeout_s,
            )
            reader.start()
        except BaseException as error:
            if agent is not None:
                agent.close()
            if isinstance(error, ConfigError):  # out of descriptors: another engine may do
                raise PeerGone(error.message) from None
            raise
        return reader

    def _mark(self, receive: Receive) -> None:
        self._pool.mark_on_device(receive.block_ids)


def _digest(metadata: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"".join(metadata)).digest()
