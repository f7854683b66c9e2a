"""One rank of the hash chain on the simulator, and what it should hold, computed in Python."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_void_p
from dataclasses import dataclass, field
from typing import Any

from nrt_sim import neff
from nrt_sim.hash_chain import HashChain
from nrt_sim.plain import SUCCESS
from nrt_sim.plain_models import PlainModels


@dataclass(kw_only=True, slots=True)
class Chain:
    """A loaded prefill graph and a decode graph over one rank's KV, and its expected values."""

    models: PlainModels
    sizes: dict[str, Any]
    vnc: int = 0
    has_seq_ids_mask: bool = True
    has_transposed_keys: bool = False
    first_head: int = 0
    num_rows: int = 1  # of the decode graph
    bucket: int = 8  # tokens of the prefill graph
    states: list[c_void_p] = field(default_factory=list)
    graphs: dict[tuple[int, int], c_void_p] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for spec in self._specs(1, 1):
            self.states.append(self.models.allocated(spec.num_bytes, self.vnc))

    @property
    def expected(self) -> HashChain:
        dtype = self.sizes.get("dtype", neff.DType.BFLOAT16)
        return HashChain(
            num_layers=self.sizes["num_layers"],
            num_heads=self.sizes["num_heads"],
            row_bytes=self.sizes["head_elements"] * dtype.num_bytes,
            vocabulary=self.sizes["vocabulary"],
            first_head=self.first_head,
        )

    def container(self, num_rows: int, num_tokens: int) -> bytes:
        return neff.hash_chain(
            **self.sizes,
            num_rows=num_rows,
            num_tokens=num_tokens,
            first_head=self.first_head,
            has_seq_ids_mask=self.has_seq_ids_mask,
            has_transposed_keys=self.has_transposed_keys,
        )

    def _specs(self, num_rows: int, num_tokens: int) -> list[neff.TensorSpec]:
        return neff.hash_chain_states(
            **{k: v for k, v in self.sizes.items() if k != "vocabulary"},
            has_seq_ids_mask=self.has_seq_ids_mask,
            has_transposed_keys=self.has_transposed_keys,
        )

    def graph(self, num_rows: int, num_tokens: int) -> c_void_p:
        key = (num_rows, num_tokens)
        if key not in self.graphs:
            self.graphs[key] = self.models.loaded(self.container(*key), self.vnc)
        return self.graphs[key]

    def run(
        self, rows: Sequence[tuple[int, int, Sequence[int]]], num_tokens: int
    ) -> tuple[int, list[int], list[int]]:
        """Rows of (slot, first position, tokens) -> status, next tokens, partials."""
        with self.bound(rows, num_tokens) as (model, inputs, outputs, results):
            status = self.models.nrt_execute(model, inputs, outputs)
            next_tokens = self.models.read(results[0], 0, 4 * len(rows))
            partials = self.models.read(results[1], 0, 8 * len(rows))
        numbers = (f"<{len(rows)}i", next_tokens), (f"<{len(rows)}Q", partials)
        return status, *(list(struct.unpack(*number)) for number in numbers)

    @contextmanager
    def bound(
        self, rows: Sequence[tuple[int, int, Sequence[int]]], num_tokens: int
    ) -> Iterator[tuple[c_void_p, c_void_p, c_void_p, list[c_void_p]]]:
        """The graph, its two sets, and the tensors of next tokens and partials."""
        models = self.models
        tokens, positions, slots = b"", b"", b""
        for slot, first, row in rows:
            pad = num_tokens - len(row)
            places = [*range(first, first + len(row)), *[-1] * pad]
            tokens += struct.pack(f"<{num_tokens}i", *row, *[0] * pad)
            positions += struct.pack(f"<{num_tokens}i", *places)
            slots += struct.pack("<i", slot)
        given = [models.allocated(len(part), self.vnc) for part in (tokens, positions, slots)]
        for tensor, part in zip(given, (tokens, positions, slots), strict=True):
            models.write(tensor, 0, part)
        results = [models.allocated(size * len(rows), self.vnc) for size in (4, 8)]
        states = {f"kv_mgr.past_key_values.{i}": state for i, state in enumerate(self.states)}
        names = ("input_ids", "position_ids", "seq_ids")
        inputs = models.tensor_set({**dict(zip(names, given, strict=True)), **states})
        outputs = models.tensor_set({"next_tokens": results[0], "partials": results[1], **states})
        yield self.graph(len(rows), num_tokens), inputs, outputs, results
        models.nrt_destroy_tensor_set(byref(inputs))
        models.nrt_destroy_tensor_set(byref(outputs))
        for tensor in (*given, *results):
            models.nrt_tensor_free(byref(tensor))

    def prefill(self, slot: int, tokens: Sequence[int]) -> int:
        status, next_tokens, _ = self.run([(slot, 0, tokens)], self.bucket)
        assert status == SUCCESS, status
        return next_tokens[0]

    def place(self, state: int, slot: int, head: int, position: int, element: int) -> int:
        """Offset of an element in the tensor of a state."""
        spec = self._specs(1, 1)[state]
        slots, heads = spec.shape[:2]
        assert slot < slots
        is_transposed = self.has_transposed_keys and state % 2 == 0
        last = (element, position) if is_transposed else (position, element)
        index = ((slot * heads + head) * spec.shape[2] + last[0]) * spec.shape[3] + last[1]
        return index * spec.dtype.num_bytes

    def kv(self, slot: int, num_tokens: int) -> list[list[bytes]]:
        """What device memory holds, in the form of HashChain.kv()."""
        dtype = self.sizes.get("dtype", neff.DType.BFLOAT16)
        found = []
        for state, tensor in enumerate(self.states):
            content = self.models.read(tensor, 0, self._specs(1, 1)[state].num_bytes)
            found.append(
                [
                    b"".join(
                        content[at : at + dtype.num_bytes]
                        for position in range(num_tokens)
                        for element in range(self.sizes["head_elements"])
                        for at in [self.place(state, slot, head, position, element)]
                    )
                    for head in range(self.sizes["num_heads"])
                ]
            )
        return found
