"""What a caller of forward must not do: the stand-in refuses it, or corrupts as the real one."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_kit import random_prompt
from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params
from stand_in.kv_state import GARBAGE
from stand_in.rules import RuleBroken
from stand_in_kit import (
    MAX_LENGTH,
    encode,
    key_name,
    kv_on_host,
    nxd_model,
    step,
    step_arguments,
    value_name,
)

PROMPT = random_prompt(20)


@pytest.fixture
def model(tiny_folder: Path, make_model: Callable[..., Any]) -> Any:
    """With slots 0 and 1 encoded."""
    loaded = make_model(tiny_folder)
    encode(loaded, 0, PROMPT)
    encode(loaded, 1, PROMPT[:10])
    return loaded


def prompt_arguments(num_tokens: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.tensor([random_prompt(num_tokens)]),
        "position_ids": torch.arange(num_tokens)[None],
        "seq_ids": torch.tensor([2]),
        "sampling_params": prepare_sampling_params(1),
    }


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("input_ids", torch.float32),
        ("input_ids", torch.int16),
        ("position_ids", torch.int16),
        ("seq_ids", torch.uint8),
        ("sampling_params", torch.float64),
        ("sampling_params", torch.int32),
    ],
)
def test_other_number_formats_are_refused(model: Any, name: str, dtype: torch.dtype) -> None:
    arguments = step_arguments({0: (7, 20), 1: (7, 10)})
    arguments[name] = arguments[name].to(dtype)
    # Of positions comes the mask that the caller left out.
    with pytest.raises(RuleBroken, match=f"({name}|attention_mask) is {dtype}, the graph takes"):
        model(**arguments)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_of_both_widths_are_taken(model: Any, dtype: torch.dtype) -> None:
    rows = {0: (7, 20), 1: (7, 10)}
    expected = step(model, rows)
    arguments = step_arguments(rows)
    for name in ("input_ids", "position_ids", "seq_ids"):
        arguments[name] = arguments[name].to(dtype)
    assert torch.equal(model(**arguments).logits[:, -1], expected)


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": torch.tensor([[7, 8], [7, 8]])},  # two tokens each
        {"position_ids": torch.tensor([[20, 21], [10, 11]])},
        {"sampling_params": torch.ones(2, 4)},
        {"input_ids": None},
        {"position_ids": None},
    ],
    ids=["ids", "positions", "sampling", "no ids", "no positions"],
)
def test_other_shapes_of_a_step_are_refused(model: Any, change: dict[str, Any]) -> None:
    with pytest.raises(RuleBroken):
        model(**(step_arguments({0: (7, 20), 1: (7, 10)}) | change))


def test_default_sampling_parameters_fit_a_full_batch_only(model: Any) -> None:
    full = step_arguments({0: (7, 20), 1: (7, 10), 2: (7, 1)})
    del full["sampling_params"]
    assert model(**full).logits.shape[0] == 3
    prompt = prompt_arguments(20)
    del prompt["sampling_params"]
    with pytest.raises(RuleBroken, match="no context graph"):
        model(**prompt)


@pytest.mark.parametrize("slots", [[1, 0], [0, 0], [2, 0, 1]])
def test_slots_are_sorted_and_there_once(model: Any, slots: list[int]) -> None:
    arguments = step_arguments(dict.fromkeys(range(len(slots)), (7, 5)))
    with pytest.raises(RuleBroken, match="sorted"):
        model(**(arguments | {"seq_ids": torch.tensor(slots)}))


@pytest.mark.parametrize("slot", [-1, 3])
def test_slots_are_in_range(model: Any, slot: int) -> None:
    with pytest.raises(IndexError, match="3 slots"):
        step(model, {slot: (7, 5)})
    with pytest.raises(IndexError, match="3 slots"):
        encode(model, slot, PROMPT)


def test_a_prompt_call_has_one_sequence(model: Any) -> None:
    with pytest.raises(RuleBroken, match="2 sequences in one call of context_encoding_model"):
        model(
            input_ids=torch.tensor([PROMPT, PROMPT]),
            position_ids=torch.arange(20).repeat(2, 1),
            seq_ids=torch.tensor([0, 1]),
            sampling_params=prepare_sampling_params(2),
        )


def test_a_batch_with_position_0_is_taken_for_prompts(model: Any) -> None:
    with pytest.raises(RuleBroken, match="context_encoding_model"):
        step(model, {0: (7, 20), 2: (7, 0)})
    before = kv_on_host(model)
    with pytest.raises(RuleBroken, match="a prompt of"):
        step(model, {2: (7, 0)})
    after = kv_on_host(model)
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


def test_a_prompt_of_one_token_needs_inputs_of_the_largest_buckets_width(model: Any) -> None:
    """Else NxD Inference's own padding, with position 1, is taken for the last token."""
    arguments = prompt_arguments(1)
    with pytest.raises(RuleBroken, match="infers no mask"):
        model(**arguments)
    with pytest.raises(RuleBroken, match="a padding position"):
        model(**arguments, attention_mask=torch.ones(1, 1, dtype=torch.int32))
    mask = torch.zeros(1, 128, dtype=torch.int32)
    mask[0, 0] = 1
    arguments["position_ids"] = torch.zeros(1, 128, dtype=torch.int32)
    ids = torch.zeros(1, 128, dtype=torch.int32)
    ids[0, 0] = arguments["input_ids"][0, 0]
    logits = model(**(arguments | {"input_ids": ids}), attention_mask=mask).logits[0, -1]
    # The first position of a longer prompt has the same KV.
    encode(model, 0, [int(ids[0, 0]), 5])
    kv = kv_on_host(model)[0, key_name(2)]
    torch.testing.assert_close(kv[2, :, 0], kv[0, :, 0])
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("mask", "positions"),
    [
        ([0, 0, 1, 1], [0, 0, 0, 1]),  # padded on the left
        ([1, 0, 1, 1], [0, 1, 1, 2]),
        ([1, 0, 1, 0], [0, 1, 0, 0]),
        ([1, 1, 1, 0], [0, 1, 3, 0]),
        ([1, 1, 0, 0], [0, 1, 2, 3]),  # the greatest position is padding
    ],
)
def test_prompts_are_padded_on_the_right(model: Any, mask: list[int], positions: list[int]) -> None:
    with pytest.raises(RuleBroken):
        model(
            input_ids=torch.tensor([[5, 6, 7, 8]]),
            attention_mask=torch.tensor([mask]),
            position_ids=torch.tensor([positions]),
            seq_ids=torch.tensor([2]),
            sampling_params=prepare_sampling_params(1),
        )


def test_a_prompt_padded_by_the_caller_is_the_same(model: Any) -> None:
    expected = encode(model, 2, PROMPT)
    out = model(
        input_ids=torch.tensor([PROMPT + [0] * 12]),
        attention_mask=torch.tensor([[1] * 20 + [0] * 12]),
        position_ids=torch.tensor([[*range(20), *[0] * 12]]),
        seq_ids=torch.tensor([2]),
        sampling_params=prepare_sampling_params(1),
    )
    assert torch.equal(out.logits[0, -1], expected)


@pytest.mark.parametrize(
    ("num_tokens", "bucket"),
    [(31, 32), (32, 64), (63, 64), (64, 128), (127, 128), (128, 128)],
)
def test_a_bucket_is_longer_than_its_prompts_but_the_last(
    model: Any, num_tokens: int, bucket: int
) -> None:
    runs = nxd_model(model).num_runs
    runs.clear()
    model(**prompt_arguments(num_tokens))
    assert runs == {("context", bucket): 1}


@pytest.mark.parametrize(
    ("position", "bucket"), [(63, 64), (64, 128), (127, 128), (128, MAX_LENGTH), (255, MAX_LENGTH)]
)
def test_a_bucket_is_longer_than_the_position(model: Any, position: int, bucket: int) -> None:
    runs = nxd_model(model).num_runs
    runs.clear()
    step(model, {0: (7, 5), 1: (7, position)})
    assert runs == {("token", bucket): 1}


def test_what_is_longer_than_the_last_bucket_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="the largest bucket of context_encoding_model is 128"):
        model(**prompt_arguments(129))
    with pytest.raises(ValueError, match="the largest bucket of token_generation_model is 256"):
        step(model, {0: (7, MAX_LENGTH + 1)})
    with pytest.raises(RuleBroken, match="position 256 of a cache of 256"):
        step(model, {0: (7, MAX_LENGTH)})


def test_a_mask_that_hides_earlier_tokens_is_refused(model: Any) -> None:
    arguments = step_arguments({0: (7, 20)})
    mask = torch.ones(1, 20, dtype=torch.int32)
    mask[0, 3] = 0
    with pytest.raises(RuleBroken, match="attention mask of position 20"):
        model(**arguments, attention_mask=mask)


def test_forward_has_one_thread(model: Any) -> None:
    errors: list[BaseException] = []

    def call() -> None:
        try:
            step(model, {0: (7, 20)})
        except RuleBroken as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "second thread" in str(errors[0])
    step(model, {0: (7, 20)})


def test_a_prompts_padding_is_written_too(model: Any) -> None:
    """A slot whose KV is still being sent must not be encoded into, not even a shorter prompt."""
    before = kv_on_host(model)[0, value_name(1)]
    encode(model, 1, PROMPT[:5])
    after = kv_on_host(model)[0, value_name(1)]
    assert (after[1, :, 5:32] == GARBAGE).all()
    assert torch.equal(after[1, :, 32:], before[1, :, 32:])
    assert torch.equal(after[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("is_transposed", [False, True])
def test_with_the_mask_idle_slots_are_written_in_their_pad_only(
    tiny_folder: Path, make_model: Callable[..., Any], is_transposed: bool
) -> None:
    model = make_model(tiny_folder, k_cache_transposed=is_transposed, tp_degree=2)
    for slot in range(3):
        encode(model, slot, PROMPT)
    before = kv_on_host(model)
    step(model, {1: (7, 20)})
    for key, tensor in kv_on_host(model).items():
        is_keys = int(key[1].rpartition(".")[2]) % 2 == 0
        old, new = before[key], tensor
        if is_keys and is_transposed:
            old, new = old.transpose(2, 3), new.transpose(2, 3)
        changed = (old != new).any(3).any(1)  # [slot, position]
        assert changed.nonzero().tolist() == [[0, MAX_LENGTH], [1, 20], [2, MAX_LENGTH]]


def test_without_the_mask_a_step_writes_garbage_into_idle_slots(
    tiny_folder: Path, make_model: Callable[..., Any]
) -> None:
    model = make_model(tiny_folder, apply_seq_ids_mask=False)
    for slot in range(3):
        encode(model, slot, random_prompt(30, slot))
    alone = step(model, {2: (9, 30)})
    before = kv_on_host(model)
    step(model, {0: (7, 15)})
    for key, tensor in kv_on_host(model).items():
        changed = (before[key] != tensor).any(3).any(1)
        assert changed.nonzero().tolist() == [[0, 15], [1, 15], [2, 15]]
    assert not torch.equal(step(model, {2: (9, 30)}), alone)
