import pytest
import torch

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

from kernel_kit import DTYPES, assert_close, assert_same_bits, randn
from reference_kernels import (
    add_and_norm_reference_,
    linear_reference,
    rms_norm_reference,
    silu_and_multiply_reference,
)

from neuron_di.backends.cuda_kernels import (
    add_and_norm_,
    invariant_linear,
    rms_norm,
    silu_and_multiply,
)

ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@ALL_DTYPES
@pytest.mark.parametrize("hidden", [1, 64, 100, 2048, 2050])
def test_rows_are_normalised(dtype, hidden):
    x, weight = randn(3, hidden, dtype=dtype), randn(hidden, dtype=dtype, seed=1)
    before = x.clone()
    assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    assert_same_bits(x, before)


@ALL_DTYPES
def test_the_sum_is_stored_rounded_and_that_is_normalised(dtype):
    hidden, addend = randn(4, 96, dtype=dtype), 30 * randn(4, 96, dtype=dtype, seed=1)
    weight, summed = randn(96, dtype=dtype, seed=2), hidden.clone()
    wanted = add_and_norm_reference_(summed, addend, weight, 1e-6)
    got = add_and_norm_(hidden, addend, weight, 1e-6)
    assert_same_bits(hidden, summed)
    assert_same_bits(got, rms_norm(hidden, weight, 1e-6))
    assert_close(got, wanted)


def test_rows_may_be_apart_and_zeros_give_zeros():
    wide, weight = randn(5, 80), randn(40, seed=1)
    wide[2] = 0.0
    got = rms_norm(wide[:, :40], weight, 1e-6)
    assert_close(got, rms_norm_reference(wide[:, :40], weight, 1e-6))
    assert not got[2].any()


def test_nan_in_one_row_stays_there():
    hidden, weight = randn(3, 64), randn(64, seed=1)
    calm = rms_norm(hidden, weight, 1e-6)
    hidden[1, 5] = torch.nan
    got = rms_norm(hidden, weight, 1e-6)
    assert got[1].isnan().all()
    assert_same_bits(got[[0, 2]], calm[[0, 2]])


@ALL_DTYPES
@pytest.mark.parametrize("intermediate", [1, 100, 2048, 2049])
def test_the_gate_is_silu(dtype, intermediate):
    gate_up = 4 * randn(3, 2 * intermediate, dtype=dtype)
    assert_close(silu_and_multiply(gate_up), silu_and_multiply_reference(gate_up))


def test_a_gate_that_is_far_open_or_shut_gives_no_nan():
    gate_up = torch.cat([torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4]]), torch.ones(1, 5)], dim=1)
    gate_up = gate_up.to(randn(1).device)
    assert_close(silu_and_multiply(gate_up), silu_and_multiply_reference(gate_up))


@ALL_DTYPES
@pytest.mark.parametrize(
    ("num_rows", "num_in", "num_out"), [(1, 64, 64), (5, 100, 70), (65, 33, 1)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_summed_in_full_precision(dtype, num_rows, num_in, num_out, has_bias):
    x = randn(num_rows, num_in, dtype=dtype)
    weight = randn(num_out, num_in, dtype=dtype, seed=1) / num_in**0.5
    bias = randn(num_out, dtype=dtype, seed=2) if has_bias else None
    assert_close(invariant_linear(x, weight, bias), linear_reference(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_a_product_has_the_same_bits_alone_and_in_any_batch(dtype):
    x, weight = randn(130, 200, dtype=dtype), randn(96, 200, dtype=dtype, seed=1)
    together = invariant_linear(x, weight)
    for rows in (slice(0, 1), slice(64, 65), slice(70, 103), slice(129, 130)):
        assert_same_bits(invariant_linear(x[rows], weight), together[rows])
