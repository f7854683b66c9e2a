"""Copies of KV between memories: byte runs, and vectors of other strides and number formats.

Compiled where it could be built (_kv_copy.c), which frees the interpreter meanwhile; else numpy.
Addresses are this process's; the caller has checked every bound.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuron_di_bindings.block_runs import UNSUITABLE, Numbers, Words, are_words

try:
    from neuron_di_bindings import _kv_copy
except ImportError:
    _kv_copy = None  # type: ignore[assignment]

_IS_COMPILED: bool = _kv_copy is not None

_FORMATS = ("float32", "bfloat16", "float16")  # kv_copy.c knows them by index
_BITS: tuple[type[np.uint32] | type[np.uint16], ...] = (np.uint32, np.uint16, np.uint16)


@dataclass(frozen=True, slots=True)
class Grain:
    """How the numbers of one memory lie: strides in bytes, from one token or dim to the next."""

    token: int
    dim: int
    dtype: str  # one of float32, bfloat16, float16


# The structs of kv_copy.c.
class _Grain(ctypes.Structure):
    _fields_ = (("token", ctypes.c_int64), ("dim", ctypes.c_int64), ("format", ctypes.c_int64))


class _Placing(ctypes.Structure):
    _fields_ = (
        ("dst", ctypes.c_void_p),
        ("src", ctypes.c_void_p),
        ("dst_spans", ctypes.c_void_p),
        ("src_spans", ctypes.c_void_p),
        ("span_tokens", ctypes.c_void_p),
        ("num_spans", ctypes.c_int64),
        ("dst_rows", ctypes.c_void_p),
        ("src_rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_dims", ctypes.c_int64),
        ("to", _Grain),
        ("from_", _Grain),
    )


def copy_runs(
    *,
    destination_address: int,
    source_address: int,
    destination_offsets: NDArray[np.int64],
    source_offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> None:
    """Copy lengths[i] bytes from source_offsets[i] to destination_offsets[i], for each i.

    What the caller reads afterwards is read after the last byte of the source: it then checks
    whose the bytes were.
    """
    count = len(lengths)
    assert destination_offsets.shape == source_offsets.shape == lengths.shape == (count,)
    rows = tuple(map(_contiguous, (destination_offsets, source_offsets, lengths)))
    if _IS_COMPILED:
        _kv_copy.copy(destination_address, source_address, *rows)
        return
    for destination, source, length in zip(*(row.tolist() for row in rows), strict=True):
        ctypes.memmove(destination_address + destination, source_address + source, length)


def copy_promised(
    *,
    destination_address: int,
    source_address: int,
    destination_offsets: NDArray[np.int64],
    source_offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    words: Words,
    ids: Numbers,
    numbers: Numbers,
) -> bool:
    """copy_runs, and after the last byte are_words, whose arguments are the last three."""
    if _IS_COMPILED:
        addresses = destination_address, source_address
        rows = destination_offsets, source_offsets, lengths
        table, tag, number_max = words
        try:
            return _kv_copy.copy_promised(*addresses, *rows, table, ids, numbers, tag, number_max)
        except UNSUITABLE:
            pass
    copy_runs(
        destination_address=destination_address,
        source_address=source_address,
        destination_offsets=destination_offsets,
        source_offsets=source_offsets,
        lengths=lengths,
    )
    return are_words(words, ids, numbers)


def place(
    *,
    destination_address: int,
    source_address: int,
    destination_spans: NDArray[np.int64],
    source_spans: NDArray[np.int64],
    span_tokens: NDArray[np.int64],
    destination_rows: NDArray[np.int64],
    source_rows: NDArray[np.int64],
    num_dims: int,
    destination: Grain,
    source: Grain,
) -> None:
    """Copy the vectors of every span's tokens in every row, `num_dims` numbers each.

    A span is some tokens that lie in one block at either end, a row one head of a layer's keys or
    values. Token t of span s in row r lies at address + spans[s] + rows[r] + t * stride. Numbers
    are converted where the formats differ: to the nearest, ties to even; what is too large to
    infinity; NaN stays NaN. A span of no tokens is passed over.
    """
    arrays = (destination_spans, source_spans, span_tokens, destination_rows, source_rows)
    to_spans, from_spans, tokens, to_rows, from_rows = map(_contiguous, arrays)
    assert to_spans.shape == from_spans.shape == tokens.shape
    assert to_rows.shape == from_rows.shape
    if _IS_COMPILED:
        placing = _Placing(
            destination_address,
            source_address,
            *(row.ctypes.data for row in (to_spans, from_spans, tokens)),
            len(tokens),
            *(row.ctypes.data for row in (to_rows, from_rows)),
            len(to_rows),
            num_dims,
            *(_Grain(g.token, g.dim, _FORMATS.index(g.dtype)) for g in (destination, source)),
        )
        _kv_copy.place(placing)
        return
    for to_span, from_span, count in zip(to_spans, from_spans, tokens, strict=True):
        for to_row, from_row in zip(to_rows, from_rows, strict=True):
            shape = (int(count), num_dims)
            if 0 in shape:
                continue
            numbers = _array(source_address + int(from_span + from_row), shape, source)
            target = _array(destination_address + int(to_span + to_row), shape, destination)
            target[:] = _converted(numbers, source.dtype, destination.dtype)


def is_compiled() -> bool:
    """Whether the compiled copies are there."""
    return _IS_COMPILED


def _contiguous(array: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.ascontiguousarray(array, np.int64)


def _array(
    address: int, shape: tuple[int, int], grain: Grain
) -> NDArray[np.uint32] | NDArray[np.uint16]:
    """The bits of these numbers, where they lie."""
    bits = _BITS[_FORMATS.index(grain.dtype)]
    extent = (shape[0] - 1) * grain.token + (shape[1] - 1) * grain.dim + bits().itemsize
    memory = memoryview((ctypes.c_uint8 * extent).from_address(address))
    return np.ndarray(shape, bits, memory, strides=(grain.token, grain.dim))


def _converted(
    bits: NDArray[np.uint32] | NDArray[np.uint16], source: str, destination: str
) -> NDArray[np.uint32] | NDArray[np.uint16]:
    if source == destination:
        return bits
    if source == "bfloat16":
        wide = (bits.astype(np.uint32) << 16).view(np.float32)
    elif source == "float16":
        wide = np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    else:
        wide = np.ascontiguousarray(bits).view(np.float32)
    if destination == "float32":
        return wide.view(np.uint32)
    if destination == "float16":
        with np.errstate(over="ignore"):
            return wide.astype(np.float16).view(np.uint16)
    words = wide.view(np.uint32)
    rounded = (words + np.uint32(0x7FFF) + (words >> 16 & 1)) >> 16
    quiet = words >> 16 | 0x40
    return np.where(np.isnan(wide), quiet, rounded).astype(np.uint16)
