"""What the compiler makes of the kernels, for the shapes of real models. Needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

pytestmark = pytest.mark.timeout(300)

COMPILER = Path(__file__).parent / "hopper_compiler.py"
PACKAGE = "neuron_di.backends.cuda_kernels"
SHARED_BYTES_MAX = 227 << 10  # of one program, at compute capability 9.0
REGISTERS_MAX = 64 << 10  # of a multiprocessor


def tensor(dtype, *shape, **more):
    return {"shape": shape, "dtype": dtype, **more}


def compiled(folder, calls):
    """Reports on the kernels that each call launches, all of which fit. Calls share a process."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(COMPILER)],
        input=json.dumps([[f"{PACKAGE}.{module}", *rest] for module, *rest in calls]),
        capture_output=True,
        text=True,
        env=environment,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reports = json.loads(done.stdout)
    assert len(reports) == len(calls)
    for kernels in reports:
        assert kernels
        for kernel in kernels:
            assert kernel["spilled_bytes"] == 0, kernel
            assert kernel["shared_bytes"] <= SHARED_BYTES_MAX, kernel
            assert kernel["registers"] * kernel["threads"] <= REGISTERS_MAX, kernel
    return reports


def attention_call(dtype, num_rows, head_dim, more, **named):
    """Llama's heads: 32 of queries, 8 of KV."""
    query = tensor(dtype, num_rows, 48, head_dim, columns=32)
    pool = tensor(dtype, 4, 2, 2, 8, 16, head_dim)
    return [query, pool, 1, *more], named


@pytest.fixture(
    scope="module",
    params=[pytest.param(64, marks=pytest.mark.minutes), 128],
    ids="head_dim{}".format,
)
def attention(request, tmp_path_factory):
    """Decode's kernels in 16 bits and in 32, and prefill's."""
    decode = [tensor("int32", 8, 64), tensor("int32", 8)]
    prefill = [tensor("int32", 2, 64), tensor("int32", 3), tensor("int32", 2)]
    head_dim = request.param
    calls = {
        "attend_decode": [
            attention_call("bfloat16", 8, head_dim, decode, num_splits=16),
            attention_call("float32", 8, head_dim, decode, num_splits=1, window=4096),
        ],
        "attend_prefill": [
            attention_call("bfloat16", 512, head_dim, prefill, rows_max=512),
            attention_call("float32", 512, head_dim, prefill, rows_max=512),
        ],
    }
    return compiled(
        tmp_path_factory.mktemp("triton"),
        [
            (function.removeprefix("attend_") + "_attention", function, *call)
            for function, both in calls.items()
            for call in both
        ],
    )


def test_decode_uses_the_matrix_unit_in_16_bits_and_full_precision_in_32(attention):
    (in_16_bits, join), (in_32_bits,), *_ = attention
    assert {"HMMA", "LDGSTS"} <= set(in_16_bits["instructions"])
    assert join["name"] == "_join_splits"
    assert not {"HMMA", "HGMMA"} & set(in_32_bits["instructions"])


def test_prefill_uses_hoppers_matrix_unit_in_16_bits_and_none_in_32(attention):
    *_, (in_16_bits,), (in_32_bits,) = attention
    assert {"HGMMA", "LDGSTS"} <= set(in_16_bits["instructions"])
    assert not {"HMMA", "HGMMA"} & set(in_32_bits["instructions"])


def test_the_other_kernels_fit_and_a_product_uses_hoppers_matrix_unit(tmp_path):
    norm = tensor("bfloat16", 128)
    angles = [tensor("float32", 4096, 64)] * 2
    kv = [tensor("bfloat16", 4, 2, 2, 8, 16, 128), 1, tensor("int32", 8, 64), tensor("int32", 8)]
    qkv, rows = tensor("bfloat16", 8, 48, 128), tensor("bfloat16", 8, 4096)
    rules = [tensor(dtype, 8) for dtype in ("float32", "int32", "float64", "float32", "float64")]
    workspace = {
        "candidate_BV": tensor("float32", 8, 128256),
        "candidate_id_BV": tensor("int32", 8, 128256),
        "token_B": tensor("int64", 8),
        "is_usable_B": tensor("bool", 8),
    }
    *_, product = compiled(
        tmp_path,
        [
            ("write_kv", "write_kv_", [qkv, *kv, *angles], {"q_norm": norm, "k_norm": norm}),
            ("norm", "add_and_norm_", [rows, rows, tensor("bfloat16", 4096), 1e-5], {}),
            ("silu", "silu_and_multiply", [tensor("bfloat16", 8, 2 * 14336)], {}),
            ("draw_kernel", "draw_rows", [tensor("float32", 8, 128256), rules], workspace),
            ("linear", "invariant_linear", [rows, tensor("bfloat16", 6144, 4096)], {}),
        ],
    )
    (kernel,) = product
    assert {"HGMMA", "LDGSTS"} <= set(kernel["instructions"])
