"""The compiled decode step against the same model written with torch, in float64."""

import ctypes
from dataclasses import dataclass, field, replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuron_di_bindings import cpu_kernels
from neuron_di_bindings.cpu_kernels import (
    CpuDecoder,
    DecoderAddresses,
    DecoderShape,
    LayerAddresses,
)

SHAPE = DecoderShape(
    num_vocab=97,
    hidden=64,
    intermediate=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    block_size=4,
    num_blocks=120,
    num_positions=64,
    window=0,
)
ODD = {"hidden": 77, "intermediate": 53}  # not whole vectors
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}  # the KV is rounded to the dtype
ISAS = cpu_kernels.load().isas


@dataclass
class Model:
    """Random weights and a random pool of one shape."""

    shape: DecoderShape
    dtype: str = "float32"
    has_biases: bool = False
    has_head_norms: bool = False
    rms_eps: float = 1e-5
    layers: list[dict[str, Tensor | None]] = field(init=False)

    def __post_init__(self):
        shape, self.generator = self.shape, torch.Generator().manual_seed(1)
        hidden, inner, D = shape.hidden, shape.intermediate, shape.head_dim
        num_q, num_kv = shape.num_heads * D, shape.num_kv_heads * D
        self.layers = [
            {
                "input_norm": self.random(hidden),
                "qkv": self.random(num_q + 2 * num_kv, hidden),
                "qkv_bias": self.random(num_q + 2 * num_kv) if self.has_biases else None,
                "q_norm": self.random(D) if self.has_head_norms else None,
                "k_norm": self.random(D) if self.has_head_norms else None,
                "out": self.random(hidden, num_q),
                "out_bias": self.random(hidden) if self.has_biases else None,
                "post_norm": self.random(hidden),
                "gate_up": self.random(2 * inner, hidden),
                "gate_up_bias": self.random(2 * inner) if self.has_biases else None,
                "down": self.random(hidden, inner),
                "down_bias": self.random(hidden) if self.has_biases else None,
            }
            for _ in range(shape.num_layers)
        ]
        self.embedding = self.random(shape.num_vocab, hidden)
        self.final_norm = self.random(hidden)
        self.lm_head = self.random(shape.num_vocab, hidden)
        self.pool = self.random(
            shape.num_blocks,
            shape.num_layers,
            2,
            shape.num_kv_heads,
            shape.block_size,
            D,
        )
        angles = torch.rand(shape.num_positions, D // 2, generator=self.generator) * 6
        self.cosines, self.sines = angles.cos(), angles.sin()

    def random(self, *sizes):
        """Of a spread that keeps activations near 1, norms' gains included."""
        values = torch.randn(sizes, generator=self.generator)
        values = values / sizes[-1] ** 0.5 if len(sizes) == 2 else values * 0.5 + 0.5
        return values.to(getattr(torch, self.dtype))

    def decoder(self, isa=None, num_threads=1):
        return CpuDecoder(
            cpu_kernels.load(),
            self.shape,
            [
                LayerAddresses(**{k: None if v is None else v.data_ptr() for k, v in layer.items()})
                for layer in self.layers
            ],
            DecoderAddresses(
                embedding=self.embedding.data_ptr(),
                final_norm=self.final_norm.data_ptr(),
                lm_head=self.lm_head.data_ptr(),
                cosines=self.cosines.data_ptr(),
                sines=self.sines.data_ptr(),
                pool=self.pool.data_ptr(),
            ),
            dtype=self.dtype,
            rms_eps=self.rms_eps,
            num_threads=num_threads,
            isa=isa,
        )

    def batch(self, size):
        """Tokens, positions and shuffled block tables of `size` requests."""
        rng = np.random.default_rng(2)
        shape = self.shape
        max_blocks = shape.num_blocks // size if size > 2 else 16
        max_blocks = min(max_blocks, shape.num_positions // shape.block_size)
        tables = rng.permutation(shape.num_blocks)[: size * max_blocks].reshape(size, max_blocks)
        positions = rng.integers(0, max_blocks * shape.block_size, size)
        positions[0] = max_blocks * shape.block_size - 1
        tokens = rng.integers(0, shape.num_vocab, size)
        return tokens.astype(np.int32), positions.astype(np.int32), tables.astype(np.int32)

    def step(self, batch, **options):
        """Logits and the pool afterwards; the model's own pool stays as it is."""
        logits = np.full((len(batch[0]), self.shape.num_vocab), np.nan, np.float32)
        before = self.pool.clone()
        self.decoder(**options).step(*batch, logits)
        after = self.pool.clone()
        self.pool.copy_(before)
        return torch.from_numpy(logits), after


def reference_row(model, token, position, table, pool):
    """Logits [V] in float64. Writes the token's KV into `pool`, which holds any float dtype."""
    shape, S = model.shape, model.shape.block_size
    hidden = model.embedding[token].double()
    blocks = torch.from_numpy(table).long()
    for number, layer in enumerate(model.layers):
        w = {name: None if value is None else value.double() for name, value in layer.items()}
        normed = F.rms_norm(hidden, (shape.hidden,), w["input_norm"], model.rms_eps)
        heads = F.linear(normed, w["qkv"], w["qkv_bias"]).view(-1, shape.head_dim)
        q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads])
        if model.has_head_norms:
            q = F.rms_norm(q, (shape.head_dim,), w["q_norm"], model.rms_eps)
            k = F.rms_norm(k, (shape.head_dim,), w["k_norm"], model.rms_eps)
        q, k = rotated(model, q, position), rotated(model, k, position)
        pool[table[position // S], number, 0, :, position % S] = k.to(pool.dtype)
        pool[table[position // S], number, 1, :, position % S] = v.to(pool.dtype)
        start = max(0, position + 1 - shape.window) if shape.window else 0
        kv = pool[blocks, number].double()  # [blocks, C, K, S, D]
        keys, values = kv.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, start : position + 1]
        attended = F.scaled_dot_product_attention(
            q[None, :, None], keys[None], values[None], enable_gqa=True
        )
        hidden = hidden + F.linear(attended.flatten(), w["out"], w["out_bias"])
        normed = F.rms_norm(hidden, (shape.hidden,), w["post_norm"], model.rms_eps)
        gate, up = F.linear(normed, w["gate_up"], w["gate_up_bias"]).chunk(2)
        hidden = hidden + F.linear(F.silu(gate) * up, w["down"], w["down_bias"])
    normed = F.rms_norm(hidden, (shape.hidden,), model.final_norm.double(), model.rms_eps)
    return F.linear(normed, model.lm_head.double())


def rotated(model, heads, position):
    cosine, sine = model.cosines[position].double(), model.sines[position].double()
    low, high = heads.chunk(2, dim=-1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)


def check_step(model, size, isa=None):
    batch = model.batch(size)
    logits, pool = model.step(batch, isa=isa)
    expected_pool = model.pool.clone()
    expected = torch.stack(
        [reference_row(model, *row, expected_pool) for row in zip(*batch, strict=True)]
    )
    tolerance = TOLERANCE[model.dtype]
    assert torch.allclose(logits.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.allclose(pool.double(), expected_pool.double(), atol=tolerance, rtol=tolerance)
    assert torch.equal(pool == model.pool, expected_pool == model.pool)  # and nothing else


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sizes", [{}, ODD], ids=["whole", "odd"])
def test_equals_torch_in_each_dtype_and_instruction_set(dtype, isa, sizes):
    check_step(Model(replace(SHAPE, **sizes), dtype, has_biases=True), 5, isa)


@pytest.mark.parametrize("heads_per_kv_head", [1, 2, 4, 7])
@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 80, 128])
def test_equals_torch_for_head_counts_and_dims(heads_per_kv_head, head_dim):
    shape = replace(SHAPE, num_heads=2 * heads_per_kv_head, head_dim=head_dim)
    check_step(Model(shape, "bfloat16"), 3)
    check_step(Model(shape), 3)


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("has_head_norms", [False, True])
@pytest.mark.parametrize("window", [0, 1, 6, 1000])
def test_equals_torch_for_each_feature(has_biases, has_head_norms, window):
    shape = replace(SHAPE, window=window, num_heads=6)
    check_step(Model(shape, "float32", has_biases, has_head_norms), 4)


@pytest.mark.parametrize("size", range(1, 18))
def test_equals_torch_for_each_batch_size(size):
    check_step(Model(SHAPE), size)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sizes", [{}, ODD], ids=["whole", "odd"])
def test_a_row_does_not_depend_on_its_batch_or_the_threads(dtype, isa, sizes):
    model = Model(replace(SHAPE, num_heads=6, **sizes), dtype, has_head_norms=True)
    tokens, positions, tables = model.batch(17)
    alone = [
        model.step(
            (tokens[row : row + 1], positions[row : row + 1], tables[row : row + 1]), isa=isa
        )
        for row in range(17)
    ]
    for size in range(1, 18):
        for num_threads in (1, 2):
            rows = np.roll(np.arange(17), size)[:size]  # not always at the same place
            batch = (tokens[rows], positions[rows], tables[rows])
            logits, pool = model.step(batch, isa=isa, num_threads=num_threads)
            for place, row in enumerate(rows):
                assert torch.equal(logits[place], alone[row][0][0])
                assert torch.equal(pool[tables[row]], alone[row][1][tables[row]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("window", "num_threads"), [(0, 1), (0, 2), (5, 2)])
def test_positions_of_one_request_in_one_step_equal_steps_one_by_one(isa, window, num_threads):
    model = Model(replace(SHAPE, window=window), "bfloat16")
    tokens, _, tables = model.batch(13)
    batch = tokens, np.arange(2, 15, dtype=np.int32), np.tile(tables[:1, :5], (13, 1))
    wanted = np.empty((2, SHAPE.num_vocab), np.float32)  # of the last two rows only
    one_by_one = model.pool.clone()
    model.decoder(isa, num_threads).step(*batch, wanted)
    together, model.pool = model.pool, one_by_one
    for row in range(13):
        logits, model.pool = model.step([array[row : row + 1] for array in batch], isa=isa)
        if row >= 11:
            assert np.array_equal(logits[0], wanted[row - 11])
    assert torch.equal(together, model.pool)


def test_more_logits_than_rows_are_refused():
    batch = (model := Model(SHAPE)).batch(2)
    with pytest.raises(ValueError, match="3 rows of logits for a batch of 2"):
        model.decoder().step(*batch, np.empty((3, SHAPE.num_vocab), np.float32))


def test_wider_block_tables_change_nothing():
    model = Model(SHAPE)
    tokens, positions, tables = model.batch(3)
    wider = np.pad(tables, ((0, 0), (0, 5)))
    logits, _ = model.step((tokens, positions, tables))
    assert torch.equal(logits, model.step((tokens, positions, wider))[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_half_precision_number_is_read_right(dtype, isa):
    every = torch.arange(65536).to(torch.uint16).view(getattr(torch, dtype))
    model = first_column_model(dtype, num_vocab=len(every))
    model.lm_head[:, 0] = every
    model.lm_head[:, 1] = 0
    logits, _ = model.step(FIRST_POSITION, isa=isa)
    assert torch.equal(logits[0].isnan(), every.isnan())
    assert torch.equal(logits[0].nan_to_num(7, torch.inf, -torch.inf), as_float(every))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kv_is_rounded_as_torch_rounds(dtype, isa):
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-30, 20, (20_000,), generator=generator)
    numbers = torch.randn(20_000, generator=generator) * 2.0**exponents
    numbers[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    high = numbers.to(getattr(torch, dtype))
    low = (high.float() * 2.0**-9).to(high.dtype)  # the sum has more bits than the dtype
    model = first_column_model(dtype, head_dim=len(numbers))
    layer = model.layers[0]
    layer["qkv"].zero_()
    layer["qkv"][-len(numbers) :, 0] = high
    layer["qkv_bias"][-len(numbers) :] = low
    _, pool = model.step(FIRST_POSITION, isa=isa)
    expected = (high.float() + low.float()).to(high.dtype)
    assert torch.equal(as_float(pool[0, 0, 1, 0, 0]), as_float(expected))
    assert expected.isinf().any()
    assert expected.isnan().any()


FIRST_POSITION = (np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32))


def as_float(numbers):
    """With 7 for NaN, so that two can be compared."""
    return numbers.float().nan_to_num(7, torch.inf, -torch.inf)


def first_column_model(dtype, **sizes):
    """A model whose every matrix meets the vector [1, 0], so that its first column shows."""
    sizes = {"hidden": 2, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, **sizes}
    model = Model(replace(SHAPE, num_blocks=1, **sizes), dtype, has_biases=True, rms_eps=0.0)
    model.embedding.fill_(1)
    for name in ("out", "out_bias", "down", "down_bias"):
        model.layers[0][name].zero_()
    for gain in (model.layers[0]["input_norm"], model.final_norm):
        gain.copy_(torch.tensor([1.0, 0.0]))
    return model


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        (0, SHAPE.num_vocab),
        (0, -1),
        (1, SHAPE.num_positions),
        (1, -1),
        (2, SHAPE.num_blocks),
        (2, -1),
    ],
)
def test_what_would_leave_memory_is_refused(argument, value):
    model = Model(SHAPE)
    batch = model.batch(2)
    batch[argument].flat[1] = value
    with pytest.raises(ValueError, match=r"lies outside \[0, \d+\)"):
        model.step(batch)


def test_a_position_beyond_the_block_table_is_refused():
    model = Model(SHAPE)
    tokens, positions, tables = model.batch(2)
    with pytest.raises(ValueError, match=r"position lies outside \[0, 4\)"):
        model.step((tokens, positions, tables[:, :1].copy()))


def test_arrays_of_another_type_shape_or_order_are_refused():
    model = Model(SHAPE)
    tokens, positions, tables = model.batch(2)
    for batch in (
        (tokens.astype(np.int64), positions, tables),
        (tokens, positions[:1], tables),
        (tokens, positions, np.asfortranarray(tables)),
    ):
        with pytest.raises(ValueError, match="needs a contiguous int32 array"):
            model.step(batch)


@pytest.mark.parametrize(
    "sizes", [{"num_kv_heads": 3}, {"head_dim": 15}, {"hidden": 0}, {"window": -1}]
)
def test_shapes_that_cannot_be_are_refused(sizes):
    model = Model(SHAPE)
    model.shape = replace(SHAPE, **sizes)
    with pytest.raises(ValueError):
        model.decoder()


@pytest.mark.parametrize("lacking", [0b0001, 0b0010, 0b0100], ids=["avx2", "fma", "f16c"])
def test_a_processor_that_lacks_what_vectors_are_compiled_for_runs_none(lacking):
    """Any of these ends the process at the first step: float16 is converted by F16C."""
    path = next(Path(cpu_kernels.__file__).parent.glob("_cpu_kernels*.so"))
    library = ctypes.CDLL(str(path))
    assert library.num_isas_with(ctypes.c_int64(0b1111 & ~lacking)) == 1
    assert library.num_isas_with(ctypes.c_int64(0b0111)) == 2
    assert library.num_isas_with(ctypes.c_int64(0b1111)) == 3


def test_absent_kernels_name_the_mend(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "__file__", str(tmp_path / "cpu_kernels.py"))
    with pytest.raises(cpu_kernels.KernelsNotBuilt, match=r"setup\.py build_ext"):
        cpu_kernels.load.__wrapped__()


def test_a_library_that_is_not_ours_names_the_mend(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "__file__", str(tmp_path / "cpu_kernels.py"))
    (tmp_path / f"_cpu_kernels{EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    with pytest.raises(cpu_kernels.KernelsNotBuilt, match="cannot be loaded"):
        cpu_kernels.load.__wrapped__()
