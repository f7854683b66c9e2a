"""Makes the containers that the simulator of libnrt loads in place of NEFFs.

The layout of the bytes stands in neff.c, the programs in hash_chain.c and programs.c. A real device
loads none of this, and the simulator loads no real NEFF.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from math import prod

__all__ = [
    "DType",
    "Flag",
    "Program",
    "TensorSpec",
    "add",
    "container",
    "copy",
    "hash_chain",
    "hash_chain_states",
]

MAGIC = b"SIM-NEFF"
VERSION = 1
NO_ALIAS = 0xFFFFFFFF
NAME_BYTES = 256
RANK_MAX = 8
NUM_PARAMETERS = 16
PAD_TOKENS = 128  # behind the positions that count, where apply_seq_ids_mask is on


class Program(IntEnum):
    HASH_CHAIN = 1
    COPY_OR_ADD = 2


class Flag(IntFlag):
    NONE = 0
    SEQ_IDS_MASK = 1
    TRANSPOSED_KEYS = 2


class DType(IntEnum):
    """nrt_dtype_t."""

    UINT64 = 1
    INT8 = 2
    UINT8 = 3
    INT16 = 4
    UINT16 = 5
    BFLOAT16 = 6
    FLOAT16 = 7
    INT32 = 8
    UINT32 = 9
    FLOAT32 = 10
    INT64 = 12
    FP8_E3 = 13
    FP8_E4 = 14
    FP8_E5 = 15

    @property
    def num_bytes(self) -> int:
        for num_bytes, letters in ((8, "64"), (2, "16"), (4, "32")):
            if letters in self.name:
                return num_bytes
        return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor that a container declares. `alias`: the name of the output that is the same one."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    alias: str | None = None

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.num_bytes


def container(
    program: int,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    parameters: Sequence[int] = (),
    flags: int = 0,
    num_cores: int = 1,
    delay_us: int = 0,
) -> bytes:
    """The bytes for nrt_load. Says nothing about whether they make sense: the loader judges.

    Aliases of outputs are not looked at, so state may stand in both lists as it is.
    """
    numbers = [VERSION, program, len(inputs) + len(outputs), num_cores, flags, delay_us]
    numbers += [*parameters, *[0] * (NUM_PARAMETERS - len(parameters))]
    body = MAGIC + struct.pack(f"<{len(numbers)}I", *numbers)
    index_of = {spec.name: len(inputs) + i for i, spec in enumerate(outputs)}
    for usage, specs in enumerate((inputs, outputs)):
        for spec in specs:
            body += _record(spec, usage, index_of)
    return body + struct.pack("<Q", _digest(body))


def _record(spec: TensorSpec, usage: int, index_of: Mapping[str, int]) -> bytes:
    alias = NO_ALIAS if spec.alias is None or usage == 1 else index_of[spec.alias]
    shape = [*spec.shape, *[0] * (RANK_MAX - len(spec.shape))]
    numbers = (usage, spec.dtype, alias, len(spec.shape), *shape)
    return spec.name.encode().ljust(NAME_BYTES, b"\0") + struct.pack(f"<{len(numbers)}I", *numbers)


def _digest(data: bytes) -> int:
    """FNV-1a."""
    digest = 0xCBF29CE484222325
    for byte in data:
        digest = (digest ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return digest


def copy(num_bytes: int, *, num_cores: int = 1, delay_us: int = 0) -> bytes:
    """One input "in", one output "out", both `num_bytes` long."""
    shape = (num_bytes,)
    return container(
        Program.COPY_OR_ADD,
        [TensorSpec(name="in", dtype=DType.UINT8, shape=shape)],
        [TensorSpec(name="out", dtype=DType.UINT8, shape=shape)],
        num_cores=num_cores,
        delay_us=delay_us,
    )


def add(num_elements: int, dtype: DType = DType.FLOAT32) -> bytes:
    """Inputs "left" and "right", output "sum". dtype: float32 or int32."""
    specs = [
        TensorSpec(name=name, dtype=dtype, shape=(num_elements,))
        for name in ("left", "right", "sum")
    ]
    return container(Program.COPY_OR_ADD, specs[:2], specs[2:])


def hash_chain(
    *,
    num_layers: int,
    num_slots: int,
    num_heads: int,
    max_length: int,
    head_elements: int,
    vocabulary: int,
    dtype: DType = DType.BFLOAT16,
    num_rows: int = 1,
    num_tokens: int = 1,
    first_head: int = 0,
    has_seq_ids_mask: bool = True,
    has_transposed_keys: bool = False,
    num_cores: int = 1,
    delay_us: int = 0,
) -> bytes:
    """A graph of the chain: `num_rows` sequences of up to `num_tokens` new tokens each.

    A prefill graph and a decode graph over the same KV are two containers that differ in num_rows
    and num_tokens only. Inputs: input_ids, position_ids, seq_ids. Outputs: next_tokens, partials.
    """
    states = hash_chain_states(
        num_layers=num_layers,
        num_slots=num_slots,
        num_heads=num_heads,
        max_length=max_length,
        head_elements=head_elements,
        dtype=dtype,
        has_seq_ids_mask=has_seq_ids_mask,
        has_transposed_keys=has_transposed_keys,
    )
    flags = Flag.SEQ_IDS_MASK if has_seq_ids_mask else Flag.NONE
    return container(
        Program.HASH_CHAIN,
        [
            TensorSpec(name="input_ids", dtype=DType.INT32, shape=(num_rows, num_tokens)),
            TensorSpec(name="position_ids", dtype=DType.INT32, shape=(num_rows, num_tokens)),
            TensorSpec(name="seq_ids", dtype=DType.INT32, shape=(num_rows,)),
            *states,
        ],
        [
            TensorSpec(name="next_tokens", dtype=DType.INT32, shape=(num_rows,)),
            TensorSpec(name="partials", dtype=DType.UINT64, shape=(num_rows,)),
            *states,
        ],
        parameters=(vocabulary, max_length, first_head),
        flags=flags | (Flag.TRANSPOSED_KEYS if has_transposed_keys else Flag.NONE),
        num_cores=num_cores,
        delay_us=delay_us,
    )


def hash_chain_states(
    *,
    num_layers: int,
    num_slots: int,
    num_heads: int,
    max_length: int,
    head_elements: int,
    dtype: DType = DType.BFLOAT16,
    has_seq_ids_mask: bool = True,
    has_transposed_keys: bool = False,
) -> list[TensorSpec]:
    """The KV tensors of such graphs, inputs and outputs at once: kv_mgr.past_key_values.{i},
    i = 2 * layer for K, 2 * layer + 1 for V. With the mask there are 128 more positions, as NxD
    Inference adds them.
    """
    num_positions = max_length + (PAD_TOKENS if has_seq_ids_mask else 0)
    values = (num_slots, num_heads, num_positions, head_elements)
    keys = (num_slots, num_heads, head_elements, num_positions)
    return [
        TensorSpec(
            name=f"kv_mgr.past_key_values.{i}",
            dtype=dtype,
            shape=keys if has_transposed_keys and i % 2 == 0 else values,
            alias=f"kv_mgr.past_key_values.{i}",
        )
        for i in range(2 * num_layers)
    ]
