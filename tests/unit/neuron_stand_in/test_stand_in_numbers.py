"""The stand-in computes what the CPU backend computes, whatever the ranks and the layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_kit import decode, make_request, opened, prefill, random_prompt
from stand_in_kit import encode, key_name, nxd_model, step, value_name

from neuron_di.core import PrefillChunk
from neuron_di.request import Request

NUM_TOKENS = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transposed": {"k_cache_transposed": True},
    "tiled": {"kv_cache_tiling": True},
    "transposed and tiled": {"k_cache_transposed": True, "kv_cache_tiling": True},
}
all_layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))


def reference_logits(folder: Path, dtype: str, request: Request) -> list[torch.Tensor]:
    """Of the prompt and each greedy step on the CPU backend; `request` gets the tokens."""
    with opened(folder, dtype=dtype, use_kernels=False) as backend:
        chunk = PrefillChunk(request, 0, request.num_prompt)
        logits = backend.prefill(chunk)
        assert logits is not None
        chunk.mark_computed()
        request.generated.append(int(logits.argmax()))
        rows = [logits]
        while len(request.generated) < NUM_TOKENS:
            rows.append(decode(backend, request)[0])
    return rows


@all_layouts
@pytest.mark.parametrize("num_ranks", [1, 2, 4])  # of 4 the two KV heads have two replicas each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_the_shipped_model_equal_the_cpu_backends(
    tales_folder: Path,
    make_model: Callable[..., Any],
    num_ranks: int,
    layout: dict[str, Any],
    dtype: str,
) -> None:
    request = make_request(random_prompt(45), list(range(8)))
    expected = reference_logits(tales_folder, dtype, request)
    model = make_model(tales_folder, tp_degree=num_ranks, torch_dtype=dtype, **layout)
    slot = 1
    found = [encode(model, slot, request.prompt_ids)]
    for number, token in enumerate(request.generated[:-1]):
        found.append(step(model, {slot: (token, 45 + number)})[0])
    tolerance = {"float32": 1e-4, "bfloat16": 0.5}[dtype]
    for logits, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(logits, wanted, atol=tolerance, rtol=0)
    if dtype == "float32":
        assert [int(logits.argmax()) for logits in found] == request.generated


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_rows_of_a_batch_do_not_depend_on_each_other(
    family_folder: Path, make_model: Callable[..., Any], num_ranks: int
) -> None:
    prompts = {0: random_prompt(20, 0), 1: random_prompt(33, 1), 2: random_prompt(64, 2)}
    requests = {slot: make_request(prompt, []) for slot, prompt in prompts.items()}
    with opened(family_folder, use_kernels=False) as backend:
        for slot, request in requests.items():
            request.block_ids = list(range(10 * slot, 10 * slot + 10))
            prefill(backend, request)
            for _ in range(3):
                decode(backend, request)
    model = make_model(family_folder, tp_degree=num_ranks)
    for slot, prompt in prompts.items():
        assert int(encode(model, slot, prompt).argmax()) == requests[slot].generated[0]
    for slots in ([0, 1, 2], [2], [0, 1]):
        places = {slot: 0 if slots == [0, 1, 2] else 1 for slot in slots}
        rows = {
            slot: (requests[slot].generated[place], len(prompts[slot]) + place)
            for slot, place in places.items()
        }
        logits = step(model, rows)
        tokens = {slot: requests[slot].generated[place + 1] for slot, place in places.items()}
        assert [int(row.argmax()) for row in logits] == list(tokens.values())


def test_the_state_holds_each_head_where_its_rank_is(
    tales_folder: Path, make_model: Callable[..., Any]
) -> None:
    request = make_request(random_prompt(20), list(range(8)))
    with opened(tales_folder, use_kernels=False) as backend:
        prefill(backend, request)
        pool = backend.pool.tensor()  # [N, L, C, K, S, D]
        expected = torch.cat([pool[0], pool[1]], dim=3)[:, :, :, :20]
    model = make_model(tales_folder, tp_degree=4, k_cache_transposed=True)
    encode(model, 2, request.prompt_ids)
    for rank, head in enumerate((0, 0, 1, 1)):
        tensors = nxd_model(model).state[rank]
        for layer in range(len(expected)):
            keys = tensors[key_name(layer)][2, 0].to("cpu")[:, :20]
            values = tensors[value_name(layer)][2, 0].to("cpu")[:20]
            torch.testing.assert_close(keys.T, expected[layer, 0, head], atol=1e-4, rtol=0)
            torch.testing.assert_close(values, expected[layer, 1, head], atol=1e-4, rtol=0)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("name", [key_name(0), value_name(4)])
def test_every_byte_on_every_rank_decides(
    tales_folder: Path, make_model: Callable[..., Any], rank: int, name: str
) -> None:
    """KV is nowhere else than on the device, and replicas are not taken from another rank."""
    prompt = random_prompt(20)
    model = make_model(tales_folder, tp_degree=4)
    encode(model, 0, prompt)
    before = step(model, {0: (7, 20)})
    tensor = nxd_model(model).state[rank][name]
    one = tensor[0, 0, 11]
    one.copy_(one.to("cpu") + 1.0)
    assert not torch.equal(step(model, {0: (7, 20)}), before)
    one.copy_(one.to("cpu") - 1.0)
    torch.testing.assert_close(step(model, {0: (7, 20)}), before, atol=1e-3, rtol=0)


def test_kv_moved_to_another_model_goes_on_there(
    tiny_folder: Path, make_model: Callable[..., Any]
) -> None:
    prompt = random_prompt(40)
    source = make_model(tiny_folder, tp_degree=2)
    logits = encode(source, 0, prompt)
    token = int(logits.argmax())
    expected = step(source, {0: (token, 40)})
    target = make_model(tiny_folder, tp_degree=2)
    for sent, received in zip(nxd_model(source).state, nxd_model(target).state, strict=True):
        for name, tensor in sent.items():
            received[name][2, :, :40].copy_(tensor[0, :, :40])
    assert torch.equal(step(target, {2: (token, 40)}), expected)
