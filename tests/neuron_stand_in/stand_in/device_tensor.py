"""A tensor in device memory, as the state of a loaded model shows its KV.

Of torch.Tensor it has what documented users of NxD Inference's state call, and no more: nothing
computes with it. Any thread may read and write it at any time; who does so while a forward call
writes the same bytes gets a mixture, as on the device.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from neuron_di_bindings.nrt import NrtTensor

VARIABLE = "STAND_IN_CLOSED_CLASSES"  # see closed_classes.py

Index = int | slice


class DeviceTensor:
    """A whole device allocation, or a view into one. It keeps the allocation alive."""

    def __init__(
        self,
        allocation: NrtTensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        strides: Sequence[int] | None = None,
        first: int = 0,
    ) -> None:
        """`strides` and `first` count elements; None: dense."""
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = torch.device("privateuseone", allocation.core)
        self._allocation = allocation
        self._strides = tuple(_dense_strides(shape) if strides is None else strides)
        self._first = first

    @property
    def nrt_tensor(self) -> NrtTensor:
        """The allocation behind the whole tensor. AttributeError for a part of one.

        No real SDK gives it publicly: it is the seam by which tests try what needs a handle. With
        the closed classes, which need none, there is no such seam.
        """
        if os.environ.get(VARIABLE, "0") != "0":
            raise AttributeError("a state tensor gives no handle")
        return self.allocation

    @property
    def allocation(self) -> NrtTensor:
        """As nrt_tensor, for the stand-in itself."""
        if self._first or self.nbytes != self._allocation.num_bytes or not self.is_contiguous():
            raise AttributeError("a view of a state tensor has no allocation of its own")
        return self._allocation

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    def numel(self) -> int:
        return prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        return self._strides if dim is None else self._strides[dim]

    def is_contiguous(self) -> bool:
        dense = _dense_strides(self.shape)
        triples = zip(self.shape, self._strides, dense, strict=True)
        return all(size == 1 or stride == wanted for size, stride, wanted in triples)

    def data_ptr(self) -> int:
        """The device address of the first element. The host must not look there."""
        return self._allocation.address + self._first * self.element_size()

    def view(self, *shape: int) -> Self:
        if not self.is_contiguous() or prod(shape) != self.numel():
            raise RuntimeError(f"no view {shape} of {tuple(self.shape)}")
        return self._part(shape, _dense_strides(shape), self._first)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Self:
        """A view. Integers, and slices without a step."""
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) > self.dim():
            raise IndexError(f"{len(indices)} indices for {self.dim()} dimensions")
        first, shape, strides = self._first, list[int](), list[int]()
        for number, (size, stride) in enumerate(zip(self.shape, self._strides, strict=True)):
            chosen = indices[number] if number < len(indices) else slice(None)
            if isinstance(chosen, slice):
                start, stop, step = chosen.indices(size)
                if step != 1:
                    raise NotImplementedError("slices of device tensors have no step")
                first += start * stride
                shape.append(max(0, stop - start))
                strides.append(stride)
            elif isinstance(chosen, int):
                if not -size <= chosen < size:
                    raise IndexError(f"index {chosen} is out of bounds for a size of {size}")
                first += chosen % size * stride
            else:
                raise NotImplementedError(f"a device tensor cannot be indexed by {type(chosen)}")
        return self._part(shape, strides, first)

    def __setitem__(self, index: Index | tuple[Index, ...], source: Tensor) -> None:
        self[index].copy_(source)

    def to(self, device: str | torch.device) -> Tensor:
        if torch.device(device).type != "cpu":
            raise NotImplementedError("a device tensor can be copied to the host, nowhere else")
        return self.cpu()

    def cpu(self) -> Tensor:
        """A copy on the host."""
        out = torch.empty(self.shape, dtype=self.dtype)
        if self.numel():
            into = host_bytes(out)
            self._allocation.read_many(
                [(at, into[begin : begin + size]) for at, begin, size in self._runs()]
            )
        return out

    def copy_(self, source: "Tensor | DeviceTensor") -> Self:
        """Overwrite with `source`, of the same shape; another dtype is converted."""
        host = source.cpu() if isinstance(source, DeviceTensor) else source
        if host.shape != self.shape:
            raise RuntimeError(f"{tuple(host.shape)} cannot be copied to {tuple(self.shape)}")
        if self.numel():
            data = host_bytes(host.to(self.dtype).contiguous())
            self._allocation.write_many(
                [(at, data[begin : begin + size]) for at, begin, size in self._runs()]
            )
        return self

    def _part(self, shape: Sequence[int], strides: Sequence[int], first: int) -> Self:
        return type(self)(self._allocation, shape, self.dtype, strides=strides, first=first)

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Device offset, host offset and length, all in bytes, of runs that are dense on both."""
        num_outer, run = self.dim(), 1
        while num_outer and (self.shape[num_outer - 1] == 1 or self._strides[num_outer - 1] == run):
            num_outer -= 1
            run *= self.shape[num_outer]
        item = self.element_size()
        for number, place in enumerate(product(*map(range, self.shape[:num_outer]))):
            at = self._first + sum(map(int.__mul__, place, self._strides))
            yield at * item, number * run * item, run * item

    def __repr__(self) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, device={self.device})"


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a dense tensor on the host, without a copy."""
    # Of a dimension of size 1 the stride can be anything, which a view would not take.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[number + 1 :]) for number in range(len(shape)))
