"""The transfer engine over NIXL: RDMA between hosts, or this host's shared memory.

The decode worker reads prefill's registered pool; prefill's processor is not involved, where the
hardware can do without. Where it cannot (UCX over TCP) prefer the engine tcp: UCX emulates reads
there, and a process whose reader dies in mid-transfer may be aborted by it.
"""

import hashlib
import itertools
import os
from typing import Literal

from neuron_di.errors import ConfigError, NeuronDiError, PeerGone, PeerRefused
from neuron_di.kv import ArenaPool, KvLayout, KvPool, Memory, head_bytes
from neuron_di.obs import get_logger
from neuron_di.transfer.nixl_agent import NixlAgent
from neuron_di.transfer.nixl_devices import devices_of
from neuron_di.transfer.nixl_reader import NixlReader
from neuron_di.transfer.nixl_serving import ServingAgents
from neuron_di.transfer.peer_readers import Readers
from neuron_di.transfer.run_bounds import OwnMemories
from neuron_di.transfer.transfer_engine import Receive, Send, TransferToken
from neuron_di.types import Incarnation
from neuron_di.wire import NixlRegion, Region

_log = get_logger(__name__)

_DEVICES = "UCX_NET_DEVICES"
_chosen: set[str] = set()  # what it was set to here, and not by whoever runs this

TRANSFER_TIMEOUT_S = 30.0  # beside the time for its bytes


class NixlEngine:
    """Owns agents that serve this worker's pool, and a reader per peer; borrows the pool.

    Over UCX it uses the network interface that has the address `host`, unless UCX_NET_DEVICES or
    `ucx_config` name others; `ucx_config` has UCX settings of this engine alone ("TLS=tcp"), where
    the environment (UCX_TLS, …) does not say otherwise. ConfigError where NIXL is not installed, or
    its backend cannot be loaded or started.
    """

    name = "nixl"
    is_one_sided = True

    def __init__(
        self,
        pool: KvPool,
        *,
        backend: Literal["UCX", "LIBFABRIC"] = "UCX",
        host: str = "127.0.0.1",
        ucx_config: str = "",
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        if isinstance(pool, ArenaPool):  # it has no header and generations of its own
            raise ConfigError(
                "the transfer engine nixl reads no pool that is a share of an arena: leave "
                "handover out of --transfer"
            )
        self._pool = pool
        self._backend = backend
        self._options = _ucx_options(host, ucx_config) if backend == "UCX" else {}
        self._timeout_s = timeout_s
        self._memories = OwnMemories(pool.memory())
        self._connections = itertools.count()
        self._readers: Readers[NixlReader] = Readers()
        self._serving = ServingAgents(pool.incarnation, self._open_server)
        self._region = self._region_of(self._serving.present)
        self._regions: dict[Incarnation, NixlRegion] = {}  # of who was accepted

    def local_region(self, peer: Incarnation) -> Region:
        return self._regions.get(peer, self._region)

    def register(self, memory: Memory) -> None:
        self._memories.add(memory)
        for reader in self._readers.all():
            reader.register(self._memories.all())

    def connect(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        if not isinstance(region, NixlRegion):
            raise PeerRefused("the peer's pool is not registered with NIXL")
        if region.backend != self._backend:
            raise PeerRefused(
                f"--nixl-backend is {self._backend} here and {region.backend} at the prefill worker"
            )
        with self._readers.connecting():
            reader = self._reader_of(peer, region, layout)
            self._readers.put(peer, reader)
            reader.register(self._memories.all())  # what came meanwhile

    def accept(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:  # noqa: ARG002
        """The pool is registered: say with which agent."""
        try:
            server = self._serving.take(peer)
        except ConfigError as error:
            raise PeerGone(error.message) from None
        self._regions[peer] = self._region_of(server)

    def post_send(self, peer: Incarnation, send: Send) -> TransferToken:  # noqa: ARG002
        return TransferToken.over()  # the reader does all the work

    def post_receive(self, peer: Incarnation, receive: Receive) -> TransferToken:
        reader = self._readers.get(peer)
        if reader is None:
            return TransferToken.over(PeerGone("no connection to the prefill worker's pool"))
        refusal = self._memories.refusal(
            receive, peer_bytes=reader.num_bytes, peer_blocks=reader.num_blocks
        )
        if refusal is not None:
            return TransferToken.over(refusal)
        token = TransferToken()
        reader.post(receive, token)
        return token

    def cancel(self, peer: Incarnation, tag: int) -> None:
        """Nothing to do: a transfer waits for nobody, and for no longer than its deadline."""

    def fence(self, peer: Incarnation) -> None:
        """Nothing to do: NIXL says that a read is done once its bytes can be read."""

    def commit(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:  # noqa: ARG002
        """Nothing to do: the generations were read, over the link, before the token was done."""
        return None

    def abandon(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:  # noqa: ARG002
        return None

    def disconnect(self, peer: Incarnation) -> None:
        self._regions.pop(peer, None)
        self._serving.drop(peer)
        self._readers.drop(peer)

    def close(self) -> None:
        self._readers.close()
        self._serving.close()

    def _open_server(self, name: str) -> NixlAgent:
        """One that serves the pool."""
        pool = self._pool
        server = NixlAgent(name, self._backend, self._options, is_serving=True)
        head, memory = head_bytes(pool.num_blocks), pool.memory()
        try:
            server.register(Memory(memory.address - head, head + memory.num_bytes))
        except BaseException:
            server.close()
            raise
        return server

    def _region_of(self, server: NixlAgent) -> NixlRegion:
        memory, metadata = self._pool.memory(), server.metadata()
        return NixlRegion(
            agent=server.name,
            metadata=metadata,
            digest=hashlib.sha256(metadata).digest(),
            backend=self._backend,
            address=memory.address,
            num_bytes=memory.num_bytes,
        )

    def _reader_of(self, peer: Incarnation, region: NixlRegion, layout: KvLayout) -> NixlReader:
        # Of its own for each connection: LIBFABRIC at the other end takes no second of one name.
        name = f"{self._pool.incarnation}-{peer}-{next(self._connections)}"
        try:
            agent = NixlAgent(name, self._backend, self._options, is_serving=False)
        except ConfigError as error:  # out of descriptors: another engine may do
            raise PeerGone(error.message) from None
        try:
            reader = NixlReader(agent, peer, region, layout, timeout_s=self._timeout_s)
            self._readers.check_open()
            reader.register(self._memories.all())
            if layout.block_bytes == self._pool.layout.block_bytes:
                reader.prepare(self._pool.memory())
            reader.start()
        except BaseException:
            agent.close()
            raise
        return reader


def _ucx_options(host: str, ucx_config: str) -> dict[str, str]:
    # With mode "peer" a transfer from a process that dies ends with an error.
    options = {"ucx_error_handling_mode": "peer", "engine_config": ucx_config}
    if os.environ.get(_DEVICES) in _chosen:
        del os.environ[_DEVICES]  # another engine's of this process, perhaps of another host
    if _DEVICES in os.environ or "NET_DEVICES=" in ucx_config:
        return options
    devices = devices_of(host)
    if not devices:
        _log.warning("nixl_listens_everywhere", host=host, remedy=f"set {_DEVICES}")
    elif len(devices) == 1:
        options["engine_config"] = f"NET_DEVICES={devices[0]},{ucx_config}"
    else:  # NIXL takes no list there, and ends what it takes elsewhere with ":1"
        os.environ[_DEVICES] = ",".join(devices)
        _chosen.add(os.environ[_DEVICES])
    return options
