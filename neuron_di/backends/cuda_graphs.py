"""Decode steps at a few batch sizes, each a CUDA graph: one launch instead of hundreds.

A graph runs on the addresses it was captured with, so a step's inputs lie in buffers that stay. A
batch takes the smallest bucket that it fits into; the rows that are left are at position -1.
Graphs are captured when the pool is made, before any other thread calls CUDA and before there is
a request whose step would wait for it.

In Triton's interpreter the same buffers and buckets are used, without capture.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from neuron_di.backends.cuda_device import CudaDevice
from neuron_di.backends.cuda_model import CudaModel
from neuron_di.request import Request

_FILLER = -1
_DOUBLES_TO = 16


def buckets_up_to(rows_max: int) -> tuple[int, ...]:
    """Batch sizes, ascending: powers of two, from 16 on also their one and a half, `rows_max`."""
    sizes = (size for size in range(1, rows_max) if _is_bucket(size))
    return (*sizes, rows_max)


def _is_bucket(size: int) -> bool:
    power = size & -size
    return size == power or (size == 3 * power and size > _DOUBLES_TO)


class DecodeSteps:
    """Owns the buffers, and the graphs if there are any. Borrows the model. One thread calls it."""

    def __init__(
        self,
        model: CudaModel,
        device: CudaDevice,
        *,
        rows_max: int,
        blocks_max: int,
        has_graphs: bool,
    ) -> None:
        self._model = model
        self._device = device
        self.buckets = buckets_up_to(rows_max)
        on_device = device.torch_device
        # Row 0 has ids, row 1 positions.
        self._number_2B = torch.zeros(2, rows_max, dtype=torch.int32, device=on_device)
        self._table_BN = torch.zeros(rows_max, blocks_max, dtype=torch.int32, device=on_device)
        self._host_number_2B = device.pinned(2, rows_max)
        self._host_table_BN = device.pinned(rows_max, blocks_max)
        with device.runtime.on_device(device.index):
            self._copied = device.runtime.create_event()  # the inputs of the last step
        self._tables: list[list[int]] = [[] for _ in range(rows_max)]  # as they are on the device
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        if has_graphs and not device.is_interpreted:
            self._capture()

    def run(self, requests: Sequence[Request]) -> Tensor:
        """Logits [B, V], float32, of each request's newest token. They hold until the next call."""
        num_rows = len(requests)
        bucket = next(size for size in self.buckets if size >= num_rows)
        numbers = self._host_number_2B
        # As a rule that copy is long done: somebody has waited for the step's tokens.
        self._device.runtime.synchronize_event(self._copied)
        numbers[0, :num_rows] = torch.tensor([each.generated[-1] for each in requests])
        numbers[1, :num_rows] = torch.tensor([each.num_computed for each in requests])
        numbers[0, num_rows:bucket] = 0
        numbers[1, num_rows:bucket] = _FILLER
        self._number_2B.copy_(numbers, non_blocking=True)
        for row, request in enumerate(requests):
            self._place(row, request.block_ids)
        self._device.runtime.record(self._copied, self._device.stream)
        if bucket in self._graphs:
            graph, logits_BV = self._graphs[bucket]
            graph.replay()
        else:
            logits_BV = self._launch(bucket)
        return logits_BV[:num_rows]

    def close(self) -> None:
        """After the last step is done. The graphs go with the object."""
        runtime = self._device.runtime
        with runtime.on_device(self._device.index):
            runtime.destroy_event(self._copied)

    def _place(self, row: int, block_ids: Sequence[int]) -> None:
        """A request's blocks rarely change, so its row of the table is rarely copied."""
        if self._tables[row] != block_ids:
            host_N = self._host_table_BN[row, : len(block_ids)]
            host_N.copy_(torch.tensor(block_ids, dtype=torch.int32))
            self._table_BN[row, : len(block_ids)].copy_(host_N, non_blocking=True)
            self._tables[row] = list(block_ids)

    def _launch(self, bucket: int) -> Tensor:
        numbers = self._number_2B
        return self._model.decode_rows(
            numbers[0, :bucket], numbers[1, :bucket], self._table_BN[:bucket]
        )

    def _capture(self) -> None:
        """The largest first: the smaller ones then find their memory in what it took."""
        self._number_2B[1].fill_(_FILLER)
        memory = torch.cuda.graph_pool_handle()
        for bucket in reversed(self.buckets):
            self._launch(bucket)  # compiles kernels and sets up cuBLAS, which no capture may do
            self._device.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads of this process may call CUDA meanwhile: that is not of this capture.
            with torch.cuda.graph(
                graph,
                pool=memory,
                stream=torch.cuda.current_stream(),
                capture_error_mode="thread_local",
            ):
                logits_BV = self._launch(bucket)
            self._graphs[bucket] = (graph, logits_BV)
