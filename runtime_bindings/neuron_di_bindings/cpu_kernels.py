"""The decode step on CPU: compiled, one call, without the interpreter lock, batch-invariant.

The C code reads weights and the KV pool where they lie, by address, so that the tensors which
prefill uses serve here too. A row of the batch depends on its own request only, bit for bit: not
on the batch size, on its place in the batch, or on the number of threads.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_DTYPES = ("float32", "bfloat16", "float16")  # the C code knows both by index
_ISAS = ("plain", "avx2", "avx512")
_MEND = "build it with `python setup.py build_ext --inplace`, or install again with a C compiler"


class KernelsNotBuilt(ImportError):
    """Raised when the compiled kernels are absent or do not fit this code. Says the mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAddresses:
    """Where one layer's weights lie, all of the model's dtype; None for one the model lacks.

    Matrices are row-major [out, in], contiguous. The caller keeps the memory alive.
    """

    input_norm: int  # [hidden]
    qkv: int  # [(H + 2K) * D, hidden]: queries, keys, values
    qkv_bias: int | None  # [(H + 2K) * D]
    q_norm: int | None  # [D], RMSNorm of each query head before RoPE
    k_norm: int | None  # [D]
    out: int  # [hidden, H * D]
    out_bias: int | None  # [hidden]
    post_norm: int  # [hidden]
    gate_up: int  # [2 * intermediate, hidden]: gate, up
    gate_up_bias: int | None  # [2 * intermediate]
    down: int  # [hidden, intermediate]
    down_bias: int | None  # [hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderAddresses:
    """Where the rest of a model lies. The caller keeps the memory alive."""

    embedding: int  # [num_vocab, hidden]
    final_norm: int  # [hidden]
    lm_head: int  # [num_vocab, hidden]; `embedding` when they are tied
    cosines: int  # float32 [num_positions, D / 2]; pair i is elements i and i + D / 2
    sines: int  # as cosines
    pool: int  # kv_NLCKSD, of the model's dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes of a model and its KV pool, in elements."""

    num_vocab: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    num_positions: int  # of the cosines and sines
    window: int  # positions that one sees, itself included; 0: all


# The structs of cpu_kernels.c, whose members have the names and the order of the classes above.
class _Layer(ctypes.Structure):
    _fields_ = tuple((field.name, ctypes.c_void_p) for field in fields(LayerAddresses))


class _Decoder(ctypes.Structure):
    _fields_ = (
        *((field.name, ctypes.c_int64) for field in fields(DecoderShape)),
        ("dtype", ctypes.c_int64),
        ("isa", ctypes.c_int64),
        ("rms_eps", ctypes.c_double),
        ("layers", ctypes.POINTER(_Layer)),
        *((field.name, ctypes.c_void_p) for field in fields(DecoderAddresses)),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("batch", ctypes.c_int64),
        ("max_blocks", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("num_logits", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    )


class _Chunk(ctypes.Structure):
    _fields_ = (
        ("layer", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("query_stride", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("queries", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
    )


class CpuKernels:
    """The loaded library. Get it from `load()`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for function in (library.decode_step, library.workspace_bytes):
            function.argtypes = (ctypes.POINTER(_Decoder), ctypes.POINTER(_Step))
        for function in (library.attend_chunk, library.chunk_workspace_bytes):
            function.argtypes = (ctypes.POINTER(_Decoder), ctypes.POINTER(_Chunk))
        library.decode_step.restype = library.attend_chunk.restype = None
        library.workspace_bytes.restype = ctypes.c_int64
        library.chunk_workspace_bytes.restype = ctypes.c_int64
        library.num_isas.restype = ctypes.c_int64
        self.isas = _ISAS[: library.num_isas()]  # what this machine can run, the best last

    def workspace_bytes(self, decoder: _Decoder, step: _Step) -> int:
        return int(self._library.workspace_bytes(decoder, step))

    def decode_step(self, decoder: _Decoder, step: _Step) -> None:
        self._library.decode_step(decoder, step)

    def chunk_workspace_bytes(self, decoder: _Decoder, chunk: _Chunk) -> int:
        return int(self._library.chunk_workspace_bytes(decoder, chunk))

    def attend_chunk(self, decoder: _Decoder, chunk: _Chunk) -> None:
        self._library.attend_chunk(decoder, chunk)


class CpuDecoder:
    """One model's decode step. Not for use by two threads at once: it owns a workspace."""

    def __init__(
        self,
        kernels: CpuKernels,
        shape: DecoderShape,
        layers: Sequence[LayerAddresses],
        addresses: DecoderAddresses,
        *,
        dtype: str,
        rms_eps: float,
        num_threads: int,
        isa: str | None = None,
    ) -> None:
        """`dtype` is that of the weights and the KV. `isa` is one of `kernels.isas`."""
        for name, size in zip((field.name for field in fields(shape)), astuple(shape), strict=True):
            if size < (0 if name == "window" else 1):
                raise ValueError(f"{name} is {size}")
        if shape.num_heads % shape.num_kv_heads or shape.head_dim % 2:
            raise ValueError(f"heads that cannot be shared or rotated: {shape}")
        if len(layers) != shape.num_layers or num_threads < 1:
            raise ValueError(f"{len(layers)} layers of {shape.num_layers}, {num_threads} threads")
        self._kernels = kernels
        self._shape = shape
        self._num_threads = num_threads
        self._layers = (_Layer * len(layers))(*(_Layer(*astuple(layer)) for layer in layers))
        self._decoder = _Decoder(
            *astuple(shape),
            _DTYPES.index(dtype),
            kernels.isas.index(isa or kernels.isas[-1]),
            rms_eps,
            self._layers,
            *astuple(addresses),
        )
        self._workspace: NDArray[np.uint8] = np.empty(0, np.uint8)

    def workspace_bytes(self, *, batch: int, max_blocks: int) -> int:
        """What a step of this batch, with block tables of this width, needs beside its inputs."""
        step = _Step(batch=batch, max_blocks=max_blocks, num_threads=self._num_threads)
        return self._kernels.workspace_bytes(self._decoder, step)

    def step(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        logits: NDArray[np.float32],
    ) -> None:
        """Feed each row's token: write its KV into the pool, and the logits of the last rows.

        tokens [B]; positions [B], where the token stands in its request; block_tables
        [B, max_blocks], the request's blocks in order, padded with 0; logits [L, num_vocab],
        written, of the last L rows: often of all, perhaps of none. All C-contiguous. The KV of
        the positions before must be in the pool, or come from rows of this step. ValueError when
        an array does not fit the model and its pool.
        """
        shape = self._shape
        batch, max_blocks = block_tables.shape
        step = _Step(
            batch,
            max_blocks,
            self._num_threads,
            len(logits),
            _address(tokens, np.int32, (batch,)),
            _address(positions, np.int32, (batch,)),
            _address(block_tables, np.int32, (batch, max_blocks)),
            0,
            _address(logits, np.float32, (len(logits), shape.num_vocab)),
        )
        if len(logits) > batch:
            raise ValueError(f"{len(logits)} rows of logits for a batch of {batch}")
        _check_range("token", tokens, shape.num_vocab)
        _check_range("block id", block_tables, shape.num_blocks)
        num_positions = min(shape.num_positions, max_blocks * shape.block_size)
        _check_range("position", positions, num_positions)
        step.workspace = self._room(self._kernels.workspace_bytes(self._decoder, step))
        self._kernels.decode_step(self._decoder, step)

    def attend_chunk(
        self,
        layer: int,
        queries: NDArray[np.float32],
        out: NDArray[np.float32],
        *,
        start: int,
        block_table: NDArray[np.int32],
    ) -> None:
        """Attend a chunk of one prompt over the pool, in one layer of a float32 model.

        queries [T, H, D], the positions [start, start + T), contiguous but for the first
        dimension; out [T, H, D], written; block_table, the request's blocks in order. The KV of
        [0, start + T) must be in the pool. ValueError when an array does not fit.
        """
        shape = self._shape
        count = len(queries)
        if self._decoder.dtype != 0:
            raise ValueError("chunks are attended in float32 only")
        if queries.shape[1:] != (shape.num_heads, shape.head_dim) or queries.strides[1:] != (
            shape.head_dim * 4,
            4,
        ):
            raise ValueError(f"queries of shape {queries.shape} and strides {queries.strides}")
        if not 0 <= layer < shape.num_layers or not 0 < count <= 1 << 30 or start < 0:
            raise ValueError(f"layer {layer}, positions {start} to {start + count}")
        if start + count > len(block_table) * shape.block_size:
            raise ValueError("the block table is too short for the chunk")
        _check_range("block id", block_table, shape.num_blocks)
        chunk = _Chunk(
            layer,
            start,
            count,
            queries.strides[0] // 4,
            self._num_threads,
            int(queries.ctypes.data),
            _address(block_table, np.int32, (len(block_table),)),
            _address(out, np.float32, (count, shape.num_heads, shape.head_dim)),
        )
        chunk.workspace = self._room(self._kernels.chunk_workspace_bytes(self._decoder, chunk))
        self._kernels.attend_chunk(self._decoder, chunk)

    def _room(self, size_bytes: int) -> int:
        """The address of that much workspace. It grows, and is never given back."""
        if len(self._workspace) < size_bytes:
            self._workspace = np.empty(size_bytes, np.uint8)
        return int(self._workspace.ctypes.data)


def _check_range(name: str, values: NDArray[np.int32], end: int) -> None:
    """C would read or write beyond its memory."""
    if values.size and (values.min() < 0 or values.max() >= end):
        raise ValueError(f"a {name} lies outside [0, {end})")


def _address(
    array: NDArray[np.int32] | NDArray[np.float32],
    dtype: type[np.int32] | type[np.float32],
    shape: tuple[int, ...],
) -> int:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"needs a contiguous {dtype.__name__} array of shape {shape}, "
            f"not {array.dtype} of shape {array.shape}"
        )
    return int(array.ctypes.data)


@cache
def load() -> CpuKernels:
    """Load the compiled kernels. Raises KernelsNotBuilt, which says how to build them."""
    folder = Path(__file__).parent
    paths = [folder / f"_cpu_kernels{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise KernelsNotBuilt(f"the compiled CPU kernels are not built: {_MEND}")
    try:
        library = ctypes.CDLL(str(path))
        built_for = list((ctypes.c_int64 * 4).in_dll(library, "struct_bytes"))
    except (OSError, ValueError) as error:
        raise KernelsNotBuilt(f"{path} cannot be loaded ({error}): {_MEND}") from error
    if built_for != [ctypes.sizeof(struct) for struct in (_Layer, _Decoder, _Step, _Chunk)]:
        raise KernelsNotBuilt(f"{path} was built from other sources: {_MEND}")
    return CpuKernels(library)


def is_available() -> bool:
    """True when `load()` works."""
    try:
        load()
    except KernelsNotBuilt:
        return False
    return True
