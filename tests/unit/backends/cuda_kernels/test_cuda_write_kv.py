import pytest
import torch

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

from kernel_kit import DEVICE, DTYPES, NOWHERE, assert_close, assert_same_bits, int32, randn
from reference_kernels import write_kv_reference_

from neuron_di.backends.cuda_kernels import write_kv_
from neuron_di.models.rope import RopeSpec

NUM_KV_HEADS = 2
BLOCK_SIZE = 16
LAYER = 1


def empty_pool(head_dim, dtype, num_blocks=9):
    shape = (num_blocks, 2, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim)
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def angles(head_dim, num_positions=200):
    return [table.to(DEVICE) for table in RopeSpec().angle_tables(head_dim, num_positions)]


def write_both(qkv, table, positions, **norms):
    """The kernel's queries and pool, and the reference's."""
    head_dim, dtype = qkv.shape[2], qkv.dtype
    results = []
    for write in (write_kv_, write_kv_reference_):
        pool = empty_pool(head_dim, dtype)
        query = write(qkv.clone(), pool, LAYER, table, int32(positions), *angles(head_dim), **norms)
        results += [query, pool]
    return results


def assert_equal_pools(got, wanted):
    assert_same_bits(got.isnan(), wanted.isnan())  # not one slot more is written
    assert_same_bits(got[:, LAYER, 1].nan_to_num(), wanted[:, LAYER, 1].nan_to_num())  # values
    assert_close(got.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "num_heads", "has_norm"),
    [(64, 2, False), (64, 16, True), (80, 4, False), (128, 14, True), (6, 2, True)],
)
def test_rows_of_several_requests_go_to_their_own_slots(dtype, head_dim, num_heads, has_norm):
    positions = [0, 15, 16, 130]
    qkv = randn(4, num_heads + 2 * NUM_KV_HEADS, head_dim, dtype=dtype)
    table = torch.full((4, 9), NOWHERE, dtype=torch.int32, device=DEVICE)
    for row, position in enumerate(positions):
        table[row, position // BLOCK_SIZE] = [7, 2, 5, 0][row]
    norms = {}
    if has_norm:
        weights = [randn(head_dim, dtype=dtype, seed=seed) for seed in (5, 6)]
        norms = {"q_norm": weights[0], "k_norm": weights[1], "rms_eps": 1e-6}
    query, pool, wanted_query, wanted_pool = write_both(qkv, table, positions, **norms)
    assert query.shape == (4, num_heads, head_dim)
    assert_close(query, wanted_query)
    assert_equal_pools(pool, wanted_pool)
    assert int((~pool.isnan()).sum()) == 4 * 2 * NUM_KV_HEADS * head_dim


def test_rows_of_one_request_share_a_row_of_the_table():
    num_rows, start = 37, 12
    qkv = randn(num_rows, 4 + 2 * NUM_KV_HEADS, 64)
    table = int32([3, 8, 1, 6, NOWHERE]).expand(num_rows, -1)
    positions = list(range(start, start + num_rows))
    query, pool, wanted_query, wanted_pool = write_both(qkv, table, positions)
    assert_close(query, wanted_query)
    assert_equal_pools(pool, wanted_pool)


def test_a_row_that_fills_a_bucket_writes_nothing():
    qkv = randn(3, 4 + 2 * NUM_KV_HEADS, 64)
    qkv[1] = torch.nan
    table = torch.full((3, 2), NOWHERE, dtype=torch.int32, device=DEVICE)
    table[0, 0], table[2, 1] = 4, 6
    query, pool, wanted_query, wanted_pool = write_both(qkv, table, [3, -1, 20])
    assert_equal_pools(pool, wanted_pool)
    assert_close(query[[0, 2]], wanted_query[[0, 2]])
    assert query[1].isnan().all()


def test_the_keys_and_values_of_the_product_stay_and_the_queries_are_a_view():
    qkv = randn(2, 4 + 2 * NUM_KV_HEADS, 64)
    before = qkv.clone()
    pool = empty_pool(64, torch.float32)
    query = write_kv_(qkv, pool, LAYER, int32([0, 1]).view(2, 1), int32([5, 7]), *angles(64))
    assert_same_bits(qkv[:, 4:], before[:, 4:])
    assert query.data_ptr() == qkv.data_ptr()
    assert not query.equal(before[:, :4])


def test_a_row_has_the_same_bits_alone_and_in_any_batch():
    qkv = randn(3, 12 + 2 * NUM_KV_HEADS, 64, dtype=torch.bfloat16)
    table, weight = int32([[4], [0], [8]]), randn(64, dtype=torch.bfloat16)
    norms = {"q_norm": weight, "k_norm": weight, "rms_eps": 1e-6}
    pool, pool_alone = empty_pool(64, qkv.dtype), empty_pool(64, qkv.dtype)
    query = write_kv_(qkv.clone(), pool, LAYER, table, int32([3, 1, 9]), *angles(64), **norms)
    alone = write_kv_(
        qkv[1:2].clone(), pool_alone, LAYER, table[1:2], int32([1]), *angles(64), **norms
    )
    assert_same_bits(alone[0], query[1])
    assert_same_bits(pool_alone[0], pool[0])
