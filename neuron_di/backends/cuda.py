"""The CUDA backend: kernels in Triton, products by cuBLAS, decode steps as CUDA graphs.

The pool's blocks lie on the device, in plain memory that other processes of the host can open
(kv/device_pool.py). One stream computes; transfers wait for what `DevicePool.record` captured.

Run on one GPU so far (docs/cuda.md).

Next: neuron_di/backends/cuda_model.py
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from neuron_di.backends.backend import Backend, LayerHook, OnLost
from neuron_di.backends.cuda_faults import first_line, lost_by
from neuron_di.backends.cuda_plan import CudaPlan, plan_device
from neuron_di.backends.open_backend import BackendOptions
from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.errors import ConfigError, LocalProtocolError
from neuron_di.kv import KvPool
from neuron_di.kv.device_pool import DevicePool
from neuron_di.models import ReadLogits, load_weights
from neuron_di.obs import get_logger
from neuron_di.request import Request
from neuron_di.types import BlockId, Incarnation
from neuron_di_bindings.cuda_runtime import CudaError

if TYPE_CHECKING:  # they import Triton
    from neuron_di.backends.cuda_graphs import DecodeSteps
    from neuron_di.backends.cuda_model import CudaModel

__all__ = ["CudaBackend", "open_backend", "plan_device"]

_log = get_logger(__name__)

_REPLAY_ROWS = 64  # positions of one call: enough to read the weights rarely, little workspace


def open_backend(options: BackendOptions) -> Backend:
    """Allocate the pool, load the weights. Raises ConfigError or CheckpointError."""
    if not isinstance(options.plan, CudaPlan):
        raise ConfigError("device 'cuda' is not available to options that were planned for cpu")
    return CudaBackend(options, options.plan)


@dataclass(frozen=True, slots=True)
class _Computing:
    """What knows the pool by its address, and goes before it."""

    model: "CudaModel"
    steps: "DecodeSteps"


class CudaBackend:
    """Serves one model on one GPU. See `Backend` for the contract.

    Whoever shares a batch changes a row by rounding, unless the plan `is_invariant`. Layer hooks
    are called when the layer's work is launched and recorded: a transfer out of the pool comes
    after it, a reader on the host has to wait for the device.
    """

    def __init__(self, options: BackendOptions, plan: CudaPlan) -> None:
        # Triton is imported here, and not before somebody wants this device.
        from neuron_di.backends.cuda_draw import draw

        torch.set_num_threads(options.num_threads)  # of what is computed on the host: sampling
        self._draw = draw
        self._options = options
        self._plan = plan
        self._device = plan.device
        self.layout = options.layout
        self.num_vocab = options.spec.num_vocab
        self.numerics: str | None = _numerics(plan) if plan.is_invariant else None
        self._open: _Computing | None = None
        with self._guarded_start(), self._device.computing():
            # The pool first: it is the larger part, and what lacks shows before minutes of loading.
            self._make_pool(options.num_blocks, options.incarnation)
            try:
                self._weights = load_weights(
                    options.folder,
                    options.spec,
                    dtype=self.layout.dtype,
                    on_progress=options.on_progress,
                    device=self._device.torch_device,
                )
                self._bind_pool()
            except BaseException:
                self._drop_pool()
                raise
        _log.info(
            "cuda_loaded",
            gpu=self._device.index,
            name=self._device.name,
            graphs=plan.has_graphs and not self._device.is_interpreted,
            batch_invariant=plan.is_invariant,
        )

    def prefill(
        self,
        chunk: PrefillChunk,
        after_layer: LayerHook | None = None,
        read_logits: ReadLogits | None = None,
    ) -> Tensor | None:
        request, size = chunk.request, self.layout.block_size
        self._require_on_device(request, chunk.start)
        written = request.block_ids[chunk.start // size : -(-chunk.end // size)]

        def tell(layer: int) -> None:
            assert after_layer is not None
            self._blocks.record(self._device.stream)
            after_layer(layer, written)

        with self._step(written):
            if chunk.is_replay:
                logits_V = self._replay(chunk)
                for layer in range(self.layout.num_layers if after_layer is not None else 0):
                    tell(layer)
                return logits_V if chunk.is_last else None
            return self._computing.model.run_chunk(
                request.token_ids(chunk.start, chunk.end),
                start=chunk.start,
                block_ids=request.block_ids,
                with_logits=chunk.is_last,
                after_layer=None if after_layer is None else tell,
                read_logits=read_logits,
            )

    def decode(self, batch: DecodeBatch) -> Tensor:
        size = self.layout.block_size
        for request in batch.requests:
            self._require_on_device(request, request.num_computed)
        written = [each.block_ids[each.num_computed // size] for each in batch.requests]
        with self._step(written):
            return self._computing.steps.run(batch.requests)

    def draw(self, logits_BV: Tensor, requests: Sequence[Request]) -> list[int | None]:
        with self._step([]):
            tokens = self._draw(logits_BV, requests)
            if None in tokens:  # the host reads logits, by a stream that waits for nobody
                self._device.synchronize()
            return tokens

    def copy_blocks(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        with self._step(targets):
            self._computing.model.copy_blocks(sources, targets)

    def quiesce(self, block_ids: Sequence[BlockId]) -> None:  # noqa: ARG002
        """Wait for all that was launched, whichever blocks it writes. As a rule it is done: a
        request ends when its token was read."""
        if self._open is not None and self._blocks.lost is None:
            try:
                self._device.synchronize()
            except Exception as error:
                self._lose(error)
                raise

    def watch(self, on_lost: OnLost) -> None:
        self._blocks.watch_loss(on_lost)

    def close_pool(self) -> None:
        if self._open is not None:
            try:
                self._device.synchronize()
            except Exception as error:  # nothing runs on a device that is lost
                _log.warning("cuda_pool_closed_after_loss", reason=first_line(error))
            self._drop_pool()

    def open_pool(self, num_blocks: int, incarnation: Incarnation) -> None:
        if self._blocks.lost is not None:
            raise ConfigError(f"{self._blocks.lost.message}: only a new process can use it")
        with self._guarded_start(), self._device.computing():
            self._make_pool(num_blocks, incarnation)
            self._options = replace(self._options, num_blocks=num_blocks, incarnation=incarnation)
            try:
                self._bind_pool()
            except BaseException:
                self._drop_pool()
                raise

    def close(self) -> None:
        self.close_pool()
        del self._weights

    def _make_pool(self, num_blocks: int, incarnation: Incarnation) -> None:
        self._blocks = DevicePool.create(
            self.layout,
            num_blocks,
            incarnation,
            runtime=self._device.runtime,
            device=self._device.index,
        )
        self.pool: KvPool = self._blocks

    def _drop_pool(self) -> None:
        """With all that knows it, and the memory that torch keeps for that."""
        if self._open is not None:
            with contextlib.suppress(CudaError):  # of a device that is lost
                self._open.steps.close()
            self._open = None
        self._blocks.close()
        if not self._device.is_interpreted and self._blocks.lost is None:
            torch.cuda.empty_cache()  # the next pool is not torch's to make room for

    @torch.inference_mode()
    def _bind_pool(self) -> None:
        """Make what computes: it knows where the weights and the pool lie."""
        from neuron_di.backends.cuda_draw import warm_up
        from neuron_di.backends.cuda_graphs import DecodeSteps
        from neuron_di.backends.cuda_model import CudaModel

        spec, layout, device, plan = self._options.spec, self.layout, self._device, self._plan
        num_blocks = self._options.num_blocks
        # A request cannot be longer than the pool, whatever the model's context.
        num_positions = min(spec.context_tokens, num_blocks * layout.block_size)
        cosines, sines = spec.rope.angle_tables(spec.head_dim, num_positions)
        pool_NLCKSD = device.tensor_at(
            self._blocks.device_address,
            (num_blocks, *layout.rank_shape),
            getattr(torch, layout.dtype),
        )
        model = CudaModel(
            spec,
            self._weights,
            (cosines.to(device.torch_device), sines.to(device.torch_device)),
            pool_NLCKSD,
            is_invariant=plan.is_invariant,
            num_multiprocessors=device.num_multiprocessors,
        )
        steps = DecodeSteps(
            model,
            device,
            rows_max=plan.decode_batch,
            blocks_max=layout.num_blocks_for(num_positions),
            has_graphs=plan.has_graphs,
        )
        self._open = _Computing(model, steps)
        # Kernels are compiled before the worker says that it is ready. No block is anybody's yet.
        warm_ids = [0] * min(2, num_positions)
        warm_blocks = range(layout.num_blocks_for(len(warm_ids)))
        logits_V = model.run_chunk(warm_ids, start=0, block_ids=warm_blocks, with_logits=True)
        assert logits_V is not None, "they were asked for"
        warm_up(logits_V[None])
        device.synchronize()

    @property
    def _computing(self) -> _Computing:
        if self._open is None:
            raise LocalProtocolError("the pool is closed")
        return self._open

    def _replay(self, chunk: PrefillChunk) -> Tensor:
        """Compute positions as decode steps did: each is a row. The last one's logits [V]."""
        request, device = chunk.request, self._device.torch_device
        table_N = torch.tensor(request.block_ids, dtype=torch.int32, device=device)
        logits_BV = torch.empty(0)
        for begin in range(chunk.start, chunk.end, _REPLAY_ROWS):
            end = min(begin + _REPLAY_ROWS, chunk.end)
            ids = request.token_ids(begin, end)
            logits_BV = self._computing.model.decode_rows(
                torch.tensor(ids, dtype=torch.int32, device=device),
                torch.arange(begin, end, dtype=torch.int32, device=device),
                table_N.expand(end - begin, -1),
            )
        return logits_BV[-1]

    @contextlib.contextmanager
    def _step(self, written: Iterable[BlockId]) -> Iterator[None]:
        """What is launched within the block writes to these blocks.

        BackendLost when the device cannot be used any more: whoever watches is told, too.
        """
        self._blocks.require_not_lost()
        try:
            with torch.inference_mode(), self._device.computing():
                yield
                # Before anybody is told that the blocks are there.
                self._blocks.record(self._device.stream)
        except Exception as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                torch.cuda.empty_cache()
            self._lose(error)
            raise
        self._blocks.mark_on_device(list(written))

    def _lose(self, error: Exception) -> None:
        """Raises BackendLost where it is the end of this process's device; else does nothing."""
        lost = lost_by(error)
        if lost is not None:
            self._blocks.lose(lost)
            raise lost from error

    def _require_on_device(self, request: Request, num_computed: int) -> None:
        """A transfer's end brought its KV there; whatever else its blocks hold is not its own.

        Blocks come there in order, those of a transfer at once: the last of them tells.
        """
        if num_computed > 0:
            block_id = request.block_ids[(num_computed - 1) // self.layout.block_size]
            if not self._blocks.is_on_device(block_id):
                raise LocalProtocolError(f"block {block_id} has no KV on the device")

    @contextlib.contextmanager
    def _guarded_start(self) -> Iterator[None]:
        """What a GPU that is too full says while it is loaded, as an operator wants to read it."""
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"GPU {self._device.index} ran out of memory while the model was loaded: "
                f"{first_line(error)}. Mend: a smaller --kv-memory, --chunk-tokens or "
                "--decode-batch, or end what else runs there (nvidia-smi)"
            ) from error


def _numerics(plan: CudaPlan) -> str:
    import triton

    device = plan.device
    major, minor = device.capability
    return (
        f"cuda {plan.dtype} {device.name} sm{major}{minor} torch {torch.__version__} "
        f"triton {triton.__version__}"
    )
