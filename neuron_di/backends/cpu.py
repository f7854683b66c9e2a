"""The CPU backend: torch for prefill, compiled kernels for its attention and for decode.

The reference for all others.
"""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_di.backends.backend import Backend, LayerHook, OnLost
from neuron_di.backends.cpu_numerics import require_threads, set_threads, torch_rounding
from neuron_di.backends.host_logits import HostLogits, decode_one_by_one, tell_layers
from neuron_di.backends.open_backend import BackendOptions
from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.core.require import require
from neuron_di.kv import KvPool
from neuron_di.models import (
    AttendChunk,
    LayerWeights,
    ModelWeights,
    ReadLogits,
    TorchAttention,
    Transformer,
    load_weights,
)
from neuron_di.obs import get_logger
from neuron_di.request import Request
from neuron_di.types import Incarnation
from neuron_di_bindings import cpu_kernels

_log = get_logger(__name__)

_REPLAY_ROWS = 64  # positions of one call: enough to read the weights rarely, little workspace


def open_backend(options: BackendOptions) -> Backend:
    """Allocate the pool, load the weights. Raises ConfigError or CheckpointError."""
    require_threads(options.num_threads, options.layout.dtype)
    if options.layout.num_ranks > 1:
        from neuron_di.backends.tensor_parallel import TensorParallelBackend

        return TensorParallelBackend(options)
    return CpuBackend(options)


class CpuBackend(HostLogits):
    """Serves one model on this process's cores. See `Backend` for the contract."""

    def __init__(self, options: BackendOptions) -> None:
        set_threads(options.num_threads)
        self._options = options
        self.layout = options.layout
        self.num_vocab = options.spec.num_vocab
        self.pool = options.make_pool(self.layout, options.num_blocks, options.incarnation)
        try:
            self._weights = load_weights(
                options.folder,
                options.spec,
                dtype=self.layout.dtype,
                on_progress=options.on_progress,
            )
        except BaseException:
            self.pool.close()
            raise
        self._bind_pool()
        self._has_pool = True
        code = cpu_kernels.load().isas[-1] if self._decoder is not None else "torch"
        # A replay runs the decode step's own code, and a prompt's chunks are cut alike.
        self.numerics: str | None = (
            f"cpu {self.layout.dtype} {code} {torch_rounding()} threads={options.num_threads}"
        )

    def close_pool(self) -> None:
        if self._has_pool:
            # The kernels know the weights and the pool by address only: they go first.
            del self._decoder, self._transformer
            self._has_pool = False
            self.pool.close()

    def open_pool(self, num_blocks: int, incarnation: Incarnation) -> None:
        self.pool = self._options.make_pool(self.layout, num_blocks, incarnation)
        self._options = replace(self._options, num_blocks=num_blocks, incarnation=incarnation)
        try:
            self._bind_pool()
        except BaseException:
            self.pool.close()
            raise
        self._has_pool = True

    def _bind_pool(self) -> None:
        """Make what computes: it knows where the weights and the pool lie."""
        options, spec = self._options, self._options.spec
        # A request cannot be longer than the pool, whatever the model's context.
        num_positions = min(spec.context_tokens, options.num_blocks * self.layout.block_size)
        angle_tables = spec.rope.angle_tables(spec.head_dim, num_positions)
        self._decoder = _open_decoder(options, self._weights, angle_tables, self.pool)
        pool = self.pool.tensor()
        attend: AttendChunk = TorchAttention(pool, spec.sliding_window)
        if self._decoder is not None and self.layout.dtype == "float32":
            attend = self._attend_by_kernel  # in 16 bits torch may use the matrix unit
        self._transformer = Transformer(spec, self._weights, angle_tables, pool, attend)

    def prefill(
        self,
        chunk: PrefillChunk,
        after_layer: LayerHook | None = None,
        read_logits: ReadLogits | None = None,
    ) -> Tensor | None:
        if chunk.is_replay:
            return self._replay(chunk, after_layer)
        request = chunk.request
        return self._transformer.run_chunk(
            request.token_ids(chunk.start, chunk.end),
            start=chunk.start,
            block_ids=request.block_ids,
            with_logits=chunk.is_last,
            after_layer=after_layer,
            read_logits=read_logits,
        )

    def decode(self, batch: DecodeBatch) -> Tensor:
        if self._decoder is None:
            return decode_one_by_one(self._decode_one, batch)
        requests = batch.requests
        size = self.layout.block_size
        # Of those that are reserved, as many as the step reads, and the one that it writes to.
        nums_used = [request.num_computed // size + 1 for request in requests]
        tables = np.zeros((len(requests), max(nums_used)), np.int32)
        for row, request, num_used in zip(tables, requests, nums_used, strict=True):
            # Behind its blocks stands block 0, which is another's: the kernel would write there.
            require(num_used <= len(request.block_ids), "a request goes on behind its last block")
            row[:num_used] = request.block_ids[:num_used]
        logits_BV = torch.empty(len(requests), self.num_vocab, dtype=torch.float32)
        self._decoder.step(
            np.array([request.generated[-1] for request in requests], np.int32),
            np.array([request.num_computed for request in requests], np.int32),
            tables,
            logits_BV.numpy(),
        )
        return logits_BV

    def _attend_by_kernel(
        self, layer: int, query_THD: Tensor, start: int, table_N: Tensor
    ) -> Tensor:
        assert self._decoder is not None
        out_THD = torch.empty(query_THD.shape, dtype=torch.float32)
        self._decoder.attend_chunk(
            layer, query_THD.numpy(), out_THD.numpy(), start=start, block_table=table_N.numpy()
        )
        return out_THD.flatten(1)

    def _decode_one(self, request: Request, token_id: int, position: int) -> Tensor:
        """Without the kernels."""
        logits_V = self._transformer.run_chunk(
            [token_id], start=position, block_ids=request.block_ids, with_logits=True
        )
        assert logits_V is not None
        return logits_V

    def _replay(self, chunk: PrefillChunk, after_layer: LayerHook | None) -> Tensor | None:
        """Compute a chunk as decode steps did: each position is a row, or a call of its own."""
        request, start, end = chunk.request, chunk.start, chunk.end
        logits_V = torch.empty(0)
        if self._decoder is None:
            for position, token_id in enumerate(request.token_ids(start, end), start):
                logits_V = self._decode_one(request, token_id, position)
        else:
            for begin in range(start, end, _REPLAY_ROWS):
                stop = min(begin + _REPLAY_ROWS, end)
                logits_V = self._replay_rows(self._decoder, request, begin, stop)
        if after_layer is not None:
            tell_layers(after_layer, chunk, self.layout)
        return logits_V if chunk.is_last else None

    def _replay_rows(
        self, decoder: cpu_kernels.CpuDecoder, request: Request, start: int, end: int
    ) -> Tensor:
        """One decode step whose rows are these positions. The last one's logits [V]."""
        logits_1V = torch.empty(1, self.num_vocab, dtype=torch.float32)
        table = np.array(request.block_ids, np.int32)
        decoder.step(
            np.array(request.token_ids(start, end), np.int32),
            np.arange(start, end, dtype=np.int32),
            np.tile(table, (end - start, 1)),
            logits_1V.numpy(),
        )
        return logits_1V[0]

    def watch(self, on_lost: OnLost) -> None:
        """Nothing can be lost: it is this process that computes."""

    def close(self) -> None:
        self.close_pool()
        del self._weights


def _open_decoder(
    options: BackendOptions,
    weights: ModelWeights,
    angle_tables: tuple[Tensor, Tensor],
    pool: KvPool,
) -> cpu_kernels.CpuDecoder | None:
    """The compiled decode step, which reads all these where they lie; None without kernels.

    The caller keeps the tensors alive as long as the decoder.
    """
    if not options.use_kernels:
        return None
    try:
        kernels = cpu_kernels.load()
    except cpu_kernels.KernelsNotBuilt as error:
        _log.warning("kernels_missing", effect="decode is slower", mend=str(error))
        return None
    spec = options.spec
    cosines, sines = angle_tables
    return cpu_kernels.CpuDecoder(
        kernels,
        cpu_kernels.DecoderShape(
            num_vocab=spec.num_vocab,
            hidden=spec.hidden,
            intermediate=spec.intermediate,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=options.layout.block_size,
            num_blocks=pool.num_ids,
            num_positions=len(cosines),
            window=spec.sliding_window or 0,
        ),
        [_addresses(layer) for layer in weights.layers],
        cpu_kernels.DecoderAddresses(
            embedding=weights.embedding.data_ptr(),
            final_norm=weights.final_norm.data_ptr(),
            lm_head=weights.lm_head.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            pool=pool.base_address,
        ),
        dtype=options.layout.dtype,
        rms_eps=spec.rms_eps,
        num_threads=options.num_threads,
    )


def _addresses(layer: LayerWeights) -> cpu_kernels.LayerAddresses:
    """Both classes name the weights alike."""
    addresses: dict[str, Any] = {}
    for field in fields(layer):
        tensor: Tensor | None = getattr(layer, field.name)
        addresses[field.name] = None if tensor is None else tensor.data_ptr()
    return cpu_kernels.LayerAddresses(**addresses)
