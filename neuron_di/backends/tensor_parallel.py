"""One worker on several ranks: each has a part of the weights, and of each block of the KV pool.

This process is the first rank, and the worker: scheduler, transfers and HTTP know nothing of the
others. It tells them each chunk, all compute it, and they add up what each has twice per layer.
A row of a decode step is computed alone, so that it cannot depend on the others; a replay runs the
same code.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from neuron_di.backends.backend import LayerHook, OnLost
from neuron_di.backends.cpu_numerics import torch_rounding
from neuron_di.backends.host_logits import HostLogits, decode_one_by_one, tell_layers
from neuron_di.backends.open_backend import BackendOptions
from neuron_di.backends.rank_group import RankGroup
from neuron_di.backends.rank_messages import (
    ClosePool,
    Connect,
    Connected,
    Loaded,
    OpenPool,
    PoolClosed,
    PoolOpened,
    RunChunk,
    Start,
)
from neuron_di.backends.rank_model import RankModel
from neuron_di.backends.ranks import Ranks, open_rendezvous
from neuron_di.clock import Deadline
from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.kv.rank_pool import place_of, reopen
from neuron_di.models import ReadLogits, Shard, require_divisible
from neuron_di.request import Request
from neuron_di.types import BlockId, Incarnation

_LOAD_TIMEOUT_S = 600.0  # after the first rank has loaded its part: on a slow disk they take turns
_ANSWER_TIMEOUT_S = 60.0  # to connect; to map a large pool, or let go of it
_TENSOR_TIMEOUT_S = 60.0  # how much later than the first a rank may be in its part of a layer


class TensorParallelBackend(HostLogits):
    """Serves one model on several processes' cores. See `Backend` for the contract.

    A rank has written a layer's KV before its part of the sum, so a step has when it returns.
    """

    def __init__(self, options: BackendOptions) -> None:
        """ConfigError or CheckpointError where it cannot start; nothing is left running then."""
        layout = self.layout = options.layout
        require_divisible(options.spec, layout.num_ranks)
        self.num_vocab = options.spec.num_vocab
        self._options = options
        num_threads = max(1, options.num_threads // layout.num_ranks)
        self.numerics: str | None = (
            f"cpu {layout.dtype} {torch_rounding()} threads={num_threads} tp={layout.num_ranks}"
        )
        rendezvous_fd = open_rendezvous()
        try:
            self._start(num_threads, rendezvous_fd)
        finally:
            os.close(rendezvous_fd)

    def _start(self, num_threads: int, rendezvous_fd: int) -> None:
        options, num_ranks = self._options, self.layout.num_ranks
        starts = [
            Start(
                rank=rank,
                parent_pid=os.getpid(),
                folder=str(options.folder),
                spec=options.spec,
                layout=options.layout,
                num_threads=num_threads,
                timeout_s=_TENSOR_TIMEOUT_S,
            )
            for rank in range(1, num_ranks)
        ]
        self._group: RankGroup | None = None
        self._ranks = Ranks(starts, rendezvous_fd)
        try:
            self._model = RankModel(
                Shard(model=options.spec, num_ranks=num_ranks, rank=0),
                folder=options.folder,
                dtype=options.layout.dtype,
                num_threads=num_threads,
                on_progress=options.on_progress,
            )
            self._ranks.hear(Loaded, Deadline.after(_LOAD_TIMEOUT_S))
            self._ranks.tell(Connect())
            try:
                self._group = RankGroup(0, num_ranks, rendezvous_fd, _TENSOR_TIMEOUT_S)
            except RuntimeError:
                raise self._ranks.cause("they did not connect in time") from None
            self._ranks.hear(Connected, Deadline.after(_ANSWER_TIMEOUT_S))
            self._has_pool = False
            self.open_pool(options.num_blocks, options.incarnation)
        except BaseException:
            self._ranks.close()
            if self._group is not None:
                self._group.close()
            raise

    @property
    def rank_pids(self) -> list[int]:
        """The processes of the other ranks."""
        return self._ranks.pids

    def watch(self, on_lost: OnLost) -> None:
        self._ranks.watch_loss(on_lost)

    def close_pool(self) -> None:
        if self._has_pool:
            self._has_pool = False
            self._model.unbind()
            try:
                self._close_pool_of_ranks()
            except BaseException:
                self._ranks.close()  # they were killed, which takes a moment
                raise
            finally:
                self.pool.close()  # behind the ranks: nothing of it is given away while they write

    def _close_pool_of_ranks(self) -> None:
        self._ranks.tell(ClosePool())
        self._ranks.hear(PoolClosed, Deadline.after(_ANSWER_TIMEOUT_S))

    def open_pool(self, num_blocks: int, incarnation: Incarnation) -> None:
        group = self._group
        assert group is not None, "the ranks are connected"
        self._ranks.require_not_lost()
        self.pool = self._options.make_pool(self.layout, num_blocks, incarnation)
        self._options = replace(self._options, num_blocks=num_blocks, incarnation=incarnation)
        context_tokens = self._options.spec.context_tokens
        num_positions = min(context_tokens, num_blocks * self.layout.block_size)
        try:
            order = OpenPool(place=place_of(self.pool), num_positions=num_positions)
            with _closing_fd(reopen(self.pool)) as fd:
                self._ranks.tell(order, fd)
            try:
                self._model.bind(self.pool.tensor(0), num_positions, group.gather)
            except BaseException:  # the ranks open it all the same, and say so
                self._ranks.hear(PoolOpened, Deadline.after(_ANSWER_TIMEOUT_S))
                self._close_pool_of_ranks()
                raise
            self._ranks.hear(PoolOpened, Deadline.after(_ANSWER_TIMEOUT_S))
        except BaseException:
            self._model.unbind()
            self.pool.close()
            raise
        self._has_pool = True

    def prefill(
        self,
        chunk: PrefillChunk,
        after_layer: LayerHook | None = None,
        read_logits: ReadLogits | None = None,
    ) -> Tensor | None:
        if chunk.is_replay:
            return self._replay(chunk, after_layer)
        request = chunk.request
        order = RunChunk(
            token_ids=list(request.token_ids(chunk.start, chunk.end)),
            start=chunk.start,
            block_ids=list(request.block_ids),
            with_logits=chunk.is_last,
            reads_logits=read_logits is not None,
        )
        return self._run(order, after_layer, read_logits)

    def decode(self, batch: DecodeBatch) -> Tensor:
        return decode_one_by_one(self._decode_one, batch)

    def _decode_one(self, request: Request, token_id: int, position: int) -> Tensor:
        order = RunChunk(
            token_ids=[token_id],
            start=position,
            block_ids=list(request.block_ids),
            with_logits=True,
        )
        logits_V = self._run(order)
        assert logits_V is not None
        return logits_V

    def _replay(self, chunk: PrefillChunk, after_layer: LayerHook | None) -> Tensor | None:
        """Compute a chunk as decode steps did."""
        request, start, end = chunk.request, chunk.start, chunk.end
        logits_V = torch.empty(0)
        for position, token_id in enumerate(request.token_ids(start, end), start):
            logits_V = self._decode_one(request, token_id, position)
        if after_layer is not None:
            tell_layers(after_layer, chunk, self.layout)
        return logits_V if chunk.is_last else None

    def _run(
        self,
        order: RunChunk,
        after_layer: LayerHook | None = None,
        read_logits: ReadLogits | None = None,
    ) -> Tensor | None:
        """Run a chunk on all ranks. BackendLost where one of them did not get to its end."""
        self._ranks.tell(order)
        hooks = _Hooks(after_layer, read_logits)
        try:
            logits_V = self._model.run(
                order,
                None if after_layer is None else hooks.after_layer,
                None if read_logits is None else hooks.read_logits,
            )
        except BaseException as error:  # the others are in the middle of it, out of step
            raise self._ranks.cause(f"a step failed: {type(error).__name__}") from error
        if hooks.error is not None:
            raise hooks.error
        return logits_V

    def close(self) -> None:
        self._model.unbind()
        self._ranks.close()
        if self._group is not None:
            self._group.close()
        if self._has_pool:
            self._has_pool = False
            self.pool.close()
        del self._model


@contextlib.contextmanager
def _closing_fd(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


class _Hooks:
    """The caller's hooks, of which none may stop a chunk that the other ranks go on with."""

    def __init__(self, after_layer: LayerHook | None, read_logits: ReadLogits | None) -> None:
        self._after_layer = after_layer
        self._read_logits = read_logits
        self.error: Exception | None = None  # the first one's

    def after_layer(self, layer: int, blocks: Sequence[BlockId]) -> None:
        if self._after_layer is not None and self.error is None:
            try:
                self._after_layer(layer, blocks)
            except Exception as error:
                self.error = error

    def read_logits(self, first: int, logits: Tensor) -> None:
        if self._read_logits is not None and self.error is None:
            try:
                self._read_logits(first, logits)
            except Exception as error:
                self.error = error
