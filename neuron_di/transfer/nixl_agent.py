"""The NIXL library, and one agent of it: what reaches other processes' registered memory.

The library's own Python interface is not used: there an agent that serves others keeps a core
busy for ever (its thread polls without a pause), and loading it changes how this process logs.
"""

import contextlib
import ctypes
import importlib
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from neuron_di.clock import Deadline
from neuron_di.errors import ConfigError, PeerGone, PeerTimeout
from neuron_di.kv import Memory
from neuron_di.kv.runs import Ints
from neuron_di.transfer.nixl_connect import Attempt, check_given_up, finish
from neuron_di.wire import MemoryKind

Rows = NDArray[np.uint64]  # [runs, 3]: address, bytes, device

Backend = Literal["UCX", "LIBFABRIC"]

# How often a serving agent looks after its peers when nothing wakes it up. Nothing ever wakes up
# LIBFABRIC's thread.
_SERVE_DELAY_US = {"UCX": 20_000, "LIBFABRIC": 1_000}
_NEEDS = {
    "LIBFABRIC": ": it needs libfabric.so.1 (see docs/nixl.md for its version), libhwloc.so.15, "
    "libcuda.so.1 and libcudart.so.12, which NIXL's package does not have"
}
_HINTS = {
    "UCX": "; UCX_TLS, if it is set, must name lanes that notice the end of a peer, such as tcp",
    "LIBFABRIC": "; `fi_info` lists what libfabric finds here",
}
# The host's own, and not that which NIXL's package brings.
_LIBNL = "libnl-route-3.so.200"
_ZERO = np.zeros(1, np.int64)
# How long to wait before looking whether a transfer is done: twice as long each time.
_POLL_S_MIN, _POLL_S_MAX = 20e-6, 200e-6


@cache
def load_nixl() -> Any:
    """NIXL's compiled interface. ConfigError, which names the extra, where it cannot be loaded."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # not between what this process prints
    # Where the host has libefa.so.1, UCX's part for EFA loads that, and with it the host's libnl.
    # Its calls of itself would go to NIXL's libnl, and the process would end with a segmentation
    # fault, unless it is here before NIXL's. Not libefa itself: NIXL's libibverbs would miss EFA.
    with contextlib.suppress(OSError):
        ctypes.CDLL(_LIBNL)
    raises = logging.raiseExceptions
    try:
        return importlib.import_module("nixl_cu12._bindings")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"the transfer engine nixl needs NIXL ({error}): pip install '.[nixl]' in neuron-di's "
            "folder"
        ) from None
    finally:
        logging.raiseExceptions = raises  # NIXL sets it for the whole process


@cache
def _failures(nixl: Any) -> tuple[type[Exception], ...]:
    found = [
        one for one in vars(nixl).values() if isinstance(one, type) and issubclass(one, Exception)
    ]
    return (*found, RuntimeError, ValueError, TypeError)


def rows_of(address: int | Ints, offsets: Ints, lengths: Ints, devices: int | Ints = 0) -> Rows:
    """Runs of bytes as NIXL takes them. The caller checked the bounds."""
    rows = np.zeros((len(offsets), 3), np.uint64)
    rows[:, 0] = offsets + address
    rows[:, 1] = lengths
    rows[:, 2] = devices
    return rows


class NixlAgent:
    """Reads peers' memory, or, where `is_serving`, lets them read this process's.

    ConfigError where it cannot be made. A reading agent is one thread's, but for `register`.
    """

    def __init__(
        self, name: str, backend: Backend, backend_options: Mapping[str, str], *, is_serving: bool
    ) -> None:
        self.name = name
        self.backend = backend
        self._nixl = nixl = load_nixl()
        self._failures = _failures(nixl)
        config = nixl.nixlAgentConfig()
        config.useProgThread = is_serving
        config.pthrDelay = _SERVE_DELAY_US[backend]
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent: Any = nixl.nixlAgent(name, config)
            if not self._has_plugin(backend):
                raise ConfigError(
                    f"NIXL's plugin {backend} (libplugin_{backend}.so) cannot be loaded"
                    f"{_NEEDS.get(backend, '')}; with NIXL_LOG_LEVEL=DEBUG NIXL says what it lacks",
                    param="nixl_backend",
                )
            made = self._agent.createBackend(backend, dict(backend_options))
            _, kinds = self._agent.getBackendParams(made)
        except self._failures as error:
            hint = _HINTS.get(backend, "")
            raise ConfigError(
                f"NIXL's {backend} backend cannot be started: {error}{hint}"
            ) from None
        self.kinds = frozenset(kinds)  # of memory that it can register: DRAM_SEG, …
        self._peers: list[str] = []  # the one that is read
        self._transfer: int | None = None  # in progress
        self._prepared: list[int] = []  # own blocks, the peer's blocks
        self._never = threading.Event()
        self._last = Deadline(math.inf)  # no transfer goes on after it
        # Held by whoever uses the agent on a thread that does not own it: close() waits for that.
        self._lent = threading.Lock()

    def _has_plugin(self, backend: str) -> bool:
        try:
            self._agent.getPluginParams(backend)
        except self._failures:
            return False
        return True

    def end_by(self, deadline: Deadline) -> None:
        """Whatever is read after that fails, however long it had. From any thread."""
        self._last = deadline

    def register(self, memory: Memory) -> None:
        """Host memory that transfers may touch, until close(). ConfigError where it cannot be."""
        self.register_rows(rows_of(memory.address, _ZERO, np.array([memory.num_bytes], np.int64)))

    def register_rows(self, rows: Rows, kind: MemoryKind = "DRAM") -> None:
        """As register, of memory of this kind: all of it or nothing."""
        with self._lent:
            if self._agent is None:
                return  # it was closed meanwhile
            try:
                self._agent.registerMem(self._registered(rows, kind))
            except self._failures as error:
                num_bytes = int(rows[:, 1].sum())
                raise ConfigError(f"NIXL cannot register {num_bytes} bytes: {error}") from None

    def metadata(self) -> bytes:
        """What a peer loads to reach the memory that was registered."""
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def metadata_of(self, rows: Rows, kind: MemoryKind) -> bytes:
        """As metadata, of some of it: each row as it was registered. ConfigError where it was not.

        Any thread may ask.
        """
        with self._lent:
            if self._agent is None:
                raise ConfigError("NIXL's agent is closed")
            try:
                metadata: bytes = self._agent.getLocalPartialMD(self._registered(rows, kind), True)
            except self._failures as error:
                words = f"NIXL has no metadata of {len(rows)} memories: {error}"
                raise ConfigError(words) from None
            return metadata

    def _registered(self, rows: Rows, kind: MemoryKind) -> Any:
        described = [(*row, "") for row in rows.tolist()]
        return self._nixl.nixlRegDList(self._segment(kind), described)

    def _segment(self, kind: MemoryKind) -> Any:
        return getattr(self._nixl, f"{kind}_SEG")

    def connect(self, agent: str, metadata: Sequence[bytes], timeout_s: float) -> None:
        """Reach this peer within this time. PeerGone or PeerTimeout where it cannot be.

        `metadata` are the parts of what it registered.
        """
        check_given_up()
        attempt = Attempt()
        # No variable here has NIXL's agent: who keeps an error, keeps this frame.
        thread = threading.Thread(
            target=attempt.run,
            args=(self._agent, agent, metadata, self._failures),
            name="kv-nixl-connect",
            daemon=True,
        )
        thread.start()
        try:
            finish(thread, timeout_s)
        except PeerTimeout:
            self._agent = None  # the thread's
            raise
        self._peers += (name.decode(errors="replace") for name in attempt.names)
        if attempt.error is not None:
            raise PeerGone(f"NIXL does not reach the prefill worker: {attempt.error}")
        if attempt.names != {agent.encode()}:
            raise PeerGone("NIXL's metadata is of another agent than the named")

    def check(self, peers: Rows, kind: MemoryKind) -> None:
        """PeerGone where any of this is not within what the peer registered, as it says."""
        nixl = self._nixl
        try:
            described = nixl.nixlXferDList(self._segment(kind), peers)
            self._agent.releasedDlistH(self._agent.prepXferDlist(self._peers[0], described))
        except self._failures as error:
            raise PeerGone(f"what the prefill worker named is not registered: {error}") from None

    def read(
        self,
        own: Rows,
        peers: Rows,
        deadline: Deadline,
        *,
        own_kind: MemoryKind = "DRAM",
        peers_kind: MemoryKind = "DRAM",
    ) -> None:
        """Copy the peer's bytes into own memory: row for row. Blocks.

        PeerGone or PeerTimeout: then bytes may still come, until close().
        """
        nixl = self._nixl
        self._run(
            lambda: self._agent.createXferReq(
                nixl.NIXL_READ,
                nixl.nixlXferDList(self._segment(own_kind), own),
                nixl.nixlXferDList(self._segment(peers_kind), peers),
                self._peers[0],
            ),
            deadline,
        )

    def prepare(self, own: Memory, peers: Memory, block_bytes: int) -> None:
        """For read_blocks: describe all blocks of both once. PeerGone where that cannot be."""
        try:
            for agent, memory in (("", own), (self._peers[0], peers)):
                count = memory.num_bytes // block_bytes
                row = np.array([[memory.address, block_bytes, 0, block_bytes, count]], np.uint64)
                name = agent or self._nixl.NIXL_INIT_AGENT
                blocks = self._agent.prepXferDlist(name, self._nixl.DRAM_SEG, row)
                self._prepared.append(blocks)
        except self._failures as error:
            raise PeerGone(f"NIXL cannot prepare the transfer of blocks: {error}") from None

    def read_blocks(
        self, own: NDArray[np.int64], peers: NDArray[np.int64], deadline: Deadline
    ) -> None:
        """Like `read`, of blocks that were prepared, by their numbers."""
        own_blocks, peers_blocks = self._prepared
        self._run(
            lambda: self._agent.makeXferReq(
                self._nixl.NIXL_READ,
                own_blocks,
                own.astype(np.int32),
                peers_blocks,
                peers.astype(np.int32),
            ),
            deadline,
        )

    def _run(self, make_transfer: Callable[[], int], deadline: Deadline) -> None:
        nixl = self._nixl
        try:
            transfer = self._transfer = make_transfer()
            status = self._agent.postXferReq(transfer)
            delay_s = _POLL_S_MIN
            while status == nixl.NIXL_IN_PROG:
                if deadline.has_passed() or self._last.has_passed():
                    raise PeerTimeout("a transfer from the prefill worker came to a halt")
                self._never.wait(delay_s)
                delay_s = min(2 * delay_s, _POLL_S_MAX)
                status = self._agent.getXferStatus(transfer)
            if status != nixl.NIXL_SUCCESS:
                raise PeerGone(f"a transfer from the prefill worker failed: {status}")
            self._agent.releaseXferReq(transfer)
            self._transfer = None
        except self._failures as error:
            raise PeerGone(f"a transfer from the prefill worker failed: {error}") from None

    def close(self) -> None:
        """Nothing reads or writes this process's memory through the agent any more.

        Only the end of the agent makes sure of it: a transfer that NIXL was told to give up may
        write later.
        """
        with self._lent:
            agent, self._agent = self._agent, None
        if agent is None:
            return
        ends = [partial(agent.releasedDlistH, blocks) for blocks in self._prepared]
        if self._transfer is not None:
            ends.insert(0, partial(agent.releaseXferReq, self._transfer))
        ends += [partial(agent.invalidateRemoteMD, peer) for peer in self._peers]
        for end in ends:
            with contextlib.suppress(*self._failures):  # the peer is gone: the agent goes anyway
                end()
