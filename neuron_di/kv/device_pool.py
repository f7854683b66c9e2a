"""A worker's KV pool in the memory of one NVIDIA GPU, and a mirror of it in the host's memory.

    device    the blocks (device_memory.py), which what computes reads and writes
    mirror    an ordinary KvPool of the same layout; it has what is on its way, and no more

Engines that move the host's bytes, resharding and landing work on the mirror, unchanged: `to_host`
brings blocks there, `end_fill` takes what came there to the device, and gives the pages back.
Digests of what is on the device pass through pinned memory and leave the mirror alone.

Run on one GPU so far (docs/cuda.md); tests/device does it again.

Next: neuron_di/kv/device_copies.py, neuron_di/kv/device_memory.py
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from mmap import mmap
from typing import Self
from weakref import WeakValueDictionary

import numpy as np

from neuron_di.errors import BackendLost, ConfigError, LocalProtocolError, WorkerFailed
from neuron_di.kv.device_copies import DeviceCopies
from neuron_di.kv.device_memory import DeviceMemory
from neuron_di.kv.digest import KvIdentity, block_digests, digests_of
from neuron_di.kv.layout import KvLayout
from neuron_di.kv.loss import Loss
from neuron_di.kv.mirror_pages import drop_blocks
from neuron_di.kv.pool import KvPool, head_bytes, segment_bytes
from neuron_di.kv.runs import Memory, as_ids
from neuron_di.types import BlockId, Incarnation
from neuron_di_bindings import shared_memory
from neuron_di_bindings.cuda_runtime import (
    PATH_VARIABLE,
    CudaError,
    CudaMissing,
    CudaRuntime,
    load_cuda,
)

# Errors of one call. After any other the device answers nothing else any more.
_INVALID_VALUE, _NO_MEMORY = 1, 2

_DROP_BYTES = 16 << 20  # of a mirror at a time: others wait meanwhile

# A handle cannot be opened in the process that made it: whoever asks for one of these has it.
_pools_here: "WeakValueDictionary[bytes, DevicePool]" = WeakValueDictionary()


def pool_here(memory_handle: bytes) -> "DevicePool | None":
    """The pool of this process that the handle was made for."""
    return _pools_here.get(memory_handle)


def open_runtime(path: str | None = None) -> CudaRuntime:
    """The CUDA runtime library. ConfigError, which says how to get it, where it is not there."""
    try:
        return load_cuda(path)
    except (CudaMissing, CudaError) as error:
        raise ConfigError(
            f"KV in GPU memory needs the CUDA runtime, 12.0 or newer: {error}; "
            f"pip install '.[cuda]' in neuron-di's folder, or name its file in {PATH_VARIABLE}"
        ) from None


class DevicePool(Loss, KvPool):
    """As KvPool: `memory`, `view` and `tensor` are the mirror. A block is *on the device* when it
    has the request's KV there; if not, the mirror has it, or nobody.

    Kernels and transfers meet by `record`: a transfer out of the pool or into it starts after what
    was launched before the last `record`. Who launches kernels that write blocks calls it before
    anybody is told that the blocks are there, and before a block's next owner is.

    Without `not_shared` other processes can open the memory: by `memory_handle` and `event_handle`.
    With `keeps_mirror`, to be set before the first request, a digest leaves what it digested in the
    mirror, for peers that read there without asking.

    Thread-safe, for different blocks at once. BackendLost where the device fails; then the pool is
    lost. WorkerFailed where only a call failed.
    """

    streams_layers = False  # its kernels are launched then, and nothing of it is in the mirror
    digested_at_once_bytes = 0  # the device is asked for them, and may let wait

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        incarnation: Incarnation,
        fd: int,
        view: mmap,
        *,
        runtime: CudaRuntime,
        device: int,
    ) -> None:
        super().__init__(layout, num_blocks, incarnation, fd, view)
        self.runtime = runtime
        self.device = device
        self.keeps_mirror = False
        self._stream_of_kernels: int | None = None
        self._lock = threading.Lock()
        self._on_device = np.zeros(num_blocks, np.bool_)
        self._in_mirror: dict[BlockId, int] = {}  # may have pages there: how many read them
        self._is_stuck = False
        self._mirror = self.memory()  # close() forgets it, and some may still be copying
        self._device_memory = DeviceMemory(
            runtime, device, num_blocks * layout.block_bytes, incarnation
        )
        made = self._device_memory
        self.nonce, self.not_shared = made.nonce, made.not_shared
        self.memory_handle, self.event_handle = made.memory_handle, made.event_handle
        self.kernels_done = made.kernels_done
        try:
            self._copies = DeviceCopies(
                runtime, device, layout, address=made.address, after=made.kernels_done
            )
        except BaseException:
            made.free()
            raise
        if not self.not_shared:
            _pools_here[self.memory_handle] = self

    @classmethod
    def create(
        cls,
        layout: KvLayout,
        num_blocks: int,
        incarnation: Incarnation,
        *,
        runtime: CudaRuntime | None = None,
        device: int = 0,
    ) -> Self:
        """Allocate all of it on the device, zeros, and reserve the mirror, untouched. ConfigError
        when it cannot be had."""
        runtime = open_runtime() if runtime is None else runtime
        try:
            num_devices = runtime.num_devices()
            if not 0 <= device < num_devices:
                raise ConfigError(f"there is no CUDA device {device} among {num_devices}")
            size_bytes = segment_bytes(layout, num_blocks)
            fd, view = shared_memory.create_segment("neuron-di-kv", size_bytes, is_touched=False)
            try:
                return cls(
                    layout, num_blocks, incarnation, fd, view, runtime=runtime, device=device
                )
            except BaseException:
                os.close(fd)
                raise
        except (CudaError, OSError, ValueError, OverflowError) as error:
            size_bytes = num_blocks * layout.block_bytes
            raise ConfigError(
                f"cannot allocate {size_bytes} bytes of GPU memory for the KV pool: {error}"
            ) from None

    def record(self, stream: int) -> None:
        """Transfers from now on come after what was launched on this stream, until the next call.

        `stream` is a cudaStream_t, as torch's `cuda_stream`. It is the same in every call: another
        stream's work would not be waited for any more. LocalProtocolError else.
        """
        if self._stream_of_kernels not in (None, stream):
            raise LocalProtocolError("the kernels of a KV pool are recorded on two streams")
        self._stream_of_kernels = stream
        with self._errors(), self.runtime.on_device(self.device):
            self.runtime.record(self.kernels_done, stream)

    def device_memory(self) -> Memory:
        """All blocks on the device: block i as far from the first as in `memory`. No processor
        reads there."""
        return Memory(self.device_address, self.num_blocks * self.layout.block_bytes)

    @property
    def device_address(self) -> int:
        """Address of block 0 on the device, as this process has it."""
        return self._device_memory.address

    def mark_on_device(self, block_ids: Sequence[BlockId]) -> None:
        """They have the request's KV there: says whoever wrote it, or launched what writes it."""
        with self._lock:
            self._on_device[as_ids(block_ids)] = True
            stale = self._in_mirror.keys() & block_ids if self._in_mirror else ()
        if stale:
            self._drop_unread(stale)

    def is_on_device(self, block_id: BlockId) -> bool:
        """Whether the device has the KV of the block's request."""
        return bool(self._on_device[block_id])

    def to_host(self, block_ids: Sequence[BlockId], num_tokens: int | None = None) -> list[BlockId]:
        """Bring the blocks that hold so many tokens into the mirror; None: all of these. What is
        not on the device is there already. Which were brought: they stay until each who asked for
        them has said `drop_mirror`, or `retire` does.

        Blocks.
        """
        return self._to_mirror(block_ids, num_tokens, num_readers=1)

    def drop_mirror(self, block_ids: Iterable[BlockId]) -> None:
        """Whoever was told by `to_host` that these were brought reads them no more: the pages of
        those that nobody else reads go."""
        block_ids = list(block_ids)
        with self._lock:
            for block_id in block_ids:
                if self._in_mirror.get(block_id):
                    self._in_mirror[block_id] -= 1
        if not self.keeps_mirror:
            self._drop_unread(block_ids)

    def _to_mirror(
        self, block_ids: Sequence[BlockId], num_tokens: int | None, *, num_readers: int
    ) -> list[BlockId]:
        if num_tokens is not None:
            block_ids = block_ids[: self.layout.num_blocks_for(num_tokens)]
        self._check_ids(block_ids)
        with self.hold(), self._errors():
            with self._lock:
                found = [block_id for block_id in block_ids if self._on_device[block_id]]
                for block_id in found:  # from now on nobody else drops them
                    self._in_mirror[block_id] = self._in_mirror.get(block_id, 0) + num_readers
            size, address = self.layout.block_bytes, self._mirror.address
            try:
                with contextlib.closing(self._copies.read(found)) as blocks:
                    for block_id, block in zip(found, blocks, strict=True):
                        source = ctypes.addressof(ctypes.c_uint8.from_buffer(block))
                        ctypes.memmove(address + block_id * size, source, size)
            except BaseException:
                if num_readers:
                    self.drop_mirror(found)
                raise
        return found

    def read_blocks(self, block_ids: Sequence[BlockId]) -> Generator[memoryview, None, None]:
        """The bytes of these blocks on the device, each valid until the next is asked for.

        It costs a copy over the bus (some 25 GB/s of PCIe 4) beside what is done with the bytes.
        Waits for recorded kernels. Whoever does not read them all closes the iterator.
        """
        self._check_ids(block_ids)
        with self.hold(), self._errors(), contextlib.closing(self._copies.read(block_ids)) as found:
            yield from found

    def digests(
        self,
        block_ids: Sequence[int],
        identity: KvIdentity,
        num_tokens: int,
        *,
        first_place: int = 0,
    ) -> list[int]:
        """As KvPool's, of what is on the device where a block is, else of what is in the mirror."""
        ids = [BlockId(int(block_id)) for block_id in block_ids]
        self._check_ids(ids)
        on_device = frozenset(n for n in ids if self._on_device[n])
        if self.keeps_mirror and on_device:
            self._to_mirror(ids, None, num_readers=0)
            on_device = frozenset()
        size, whole = self.layout.block_bytes, self._mirror
        if not on_device:
            with self.hold():
                return block_digests(
                    whole, ids, identity, self.layout, num_tokens, first_place=first_place
                )
        with (
            self.hold(),
            contextlib.closing(self.read_blocks([n for n in ids if n in on_device])) as found,
        ):
            mirror = (ctypes.c_uint8 * whole.num_bytes).from_address(whole.address)
            view = memoryview(mirror).cast("B")
            blocks = (
                next(found) if n in on_device else view[n * size : (n + 1) * size] for n in ids
            )
            return digests_of(
                blocks, len(ids), identity, self.layout, num_tokens, first_place=first_place
            )

    def begin_fill(self, block_ids: Sequence[BlockId], *, num_kept: int = 0) -> None:
        brought = self.to_host(block_ids, num_kept) if num_kept else []
        with self._lock:  # what came late for a request that was cancelled may have marked them
            self._on_device[as_ids(block_ids)] = False
            for block_id in block_ids:
                self._in_mirror.setdefault(block_id, 0)
        self.drop_mirror(brought)  # which leaves them there: they are being filled

    def end_fill(self, block_ids: Sequence[BlockId], num_tokens: int) -> None:
        """Take to the device what is not there yet. Blocks until it is there."""
        used = block_ids[: self.layout.num_blocks_for(num_tokens)]
        self._check_ids(used)
        with self.hold(), self._errors():
            missing = [block_id for block_id in used if not self._on_device[block_id]]
            if missing:
                self._copies.write(missing, self._mirror.address)
        self.mark_on_device(block_ids)

    def retire(self, block_ids: Sequence[BlockId]) -> bool:
        with self._lock:
            self._on_device[as_ids(block_ids)] = False
            stale = self._in_mirror.keys() & block_ids
        is_not_yet = super().retire(block_ids)  # before the bytes go: a reader sees why
        self._drop(stale, lambda _: True)
        return is_not_yet

    def check_device(self, error: CudaError) -> None:
        """After an error that may be a peer's alone: BackendLost where the device has failed."""
        if self._lost is None and not self._copies.is_alive():
            self.lose(BackendLost(f"the GPU failed: {error}"))
        self.require_not_lost()

    def leave_memory(self) -> None:
        """A stream of this process may stand still for ever, and CUDA frees nothing before it has
        come to its end: so close() frees nothing."""
        self._is_stuck = True

    def close(self) -> None:
        """Give the memory back. Safe to call twice.

        After the workers that opened it were disconnected: what they read from freed memory is
        undefined. Every block shows as given up first, so that none of it counts.
        """
        if self._view is None:
            return
        _pools_here.pop(self.memory_handle, None)
        super().close()
        if self._is_stuck:  # for ever, maybe: what is on its way, and what it touches, goes with us
            return
        for end in (self._copies.close, self._device_memory.free):
            with contextlib.suppress(CudaError):  # the device has failed
                end()

    def _check_ids(self, block_ids: Sequence[BlockId]) -> None:
        if len(block_ids) and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise LocalProtocolError(f"a block outside of a pool of {self.num_blocks}")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """What CUDA says, as errors of ours."""
        self.require_not_lost()
        try:
            yield
        except CudaError as error:
            if error.code in (_INVALID_VALUE, _NO_MEMORY):
                raise WorkerFailed(f"KV could not be copied: {error}") from None
            lost = BackendLost(f"the GPU failed: {error}")
        except TimeoutError as error:
            self._is_stuck = True
            lost = BackendLost(f"the GPU failed: {error}")
        else:
            return
        self.lose(lost)
        raise lost

    def _drop_unread(self, block_ids: Iterable[BlockId]) -> None:
        """What is on the device, so that nobody is filling it, and read by nobody."""
        self._drop(block_ids, lambda n: bool(self._on_device[n]) and not self._in_mirror[n])

    def _drop(self, block_ids: Iterable[BlockId], may_go: Callable[[BlockId], bool]) -> None:
        """Give back the mirror's pages that hold nothing else than these blocks. Nobody begins to
        read a block, or to fill it, between what `may_go` says of it and that."""
        in_order, at_once = sorted(block_ids), max(1, _DROP_BYTES // self.layout.block_bytes)
        for first in range(0, len(in_order), at_once):
            with self._lock:
                some = in_order[first : first + at_once]
                dropped = [n for n in some if n in self._in_mirror and may_go(n)]
                for block_id in dropped:
                    if not self._in_mirror[block_id]:
                        del self._in_mirror[block_id]
                if dropped and (view := self._view) is not None:
                    drop_blocks(
                        view,
                        dropped,
                        data_offset=head_bytes(self.num_blocks),
                        block_bytes=self.layout.block_bytes,
                    )
