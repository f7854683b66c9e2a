"""What forward returns: logits, or tokens of on-device sampling; and steps that run ahead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_kit import random_prompt
from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig
from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params
from stand_in.sampling import sample
from stand_in_kit import (
    MAX_LENGTH,
    encode,
    key_name,
    kv_on_host,
    nxd_model,
    step,
    step_arguments,
)

Make = Callable[..., Any]
PROMPT = random_prompt(20)
GREEDY = OnDeviceSamplingConfig(dynamic=True)
DRAWN = OnDeviceSamplingConfig(dynamic=True, do_sample=True)


def first_tokens(model: Any, slot: int, prompt: list[int], **sampling: Any) -> Any:
    return model(
        input_ids=torch.tensor([prompt]),
        position_ids=torch.arange(len(prompt))[None],
        seq_ids=torch.tensor([slot]),
        sampling_params=prepare_sampling_params(1, **sampling),
    )


def test_without_on_device_sampling_logits_are_the_answer(
    tiny_folder: Path, make_model: Make
) -> None:
    model = make_model(tiny_folder)
    out = first_tokens(model, 0, PROMPT)
    assert out.logits.shape == (1, 1, 2048)
    assert out.logits.dtype == torch.float32
    assert out.hidden_states is out.logits
    assert step(model, {0: (5, 20), 2: (5, 1)}).isfinite().all()


@pytest.mark.parametrize("has_logits", [False, True])
def test_with_on_device_sampling_tokens_are_the_answer(
    tiny_folder: Path, make_model: Make, has_logits: bool
) -> None:
    plain = make_model(tiny_folder)
    expected = [encode(plain, slot, PROMPT[: 20 - slot]) for slot in range(2)]
    rows = {slot: (int(each.argmax()), 20 - slot) for slot, each in enumerate(expected)}
    following = step(plain, rows)
    model = make_model(tiny_folder, on_device_sampling_config=GREEDY, output_logits=has_logits)
    for slot in range(2):
        out = first_tokens(model, slot, PROMPT[: 20 - slot])
        assert out.tokens.tolist() == [int(expected[slot].argmax())]
    out = model(**step_arguments(rows))
    assert out.tokens.dtype == torch.int32
    assert out.tokens.tolist() == following.argmax(1).tolist()
    if has_logits:
        assert torch.equal(out.logits[:, -1], following)
    else:
        assert out.logits is None
        assert out.hidden_states is out.tokens


def test_sampling_parameters_reach_the_graph(tiny_folder: Path, make_model: Make) -> None:
    torch.manual_seed(0)
    model = make_model(tiny_folder, on_device_sampling_config=DRAWN)
    greedy = int(encode(make_model(tiny_folder), 0, PROMPT).argmax())
    for sampling in ({}, {"top_k": [50], "temperature": [0.0]}, {"top_k": 50, "top_p": 1e-6}):
        assert first_tokens(model, 0, PROMPT, **sampling).tokens.tolist() == [greedy]
    wide = {"top_k": [200], "temperature": [50.0]}
    drawn = {int(first_tokens(model, 0, PROMPT, **wide).tokens) for _ in range(20)}
    assert len(drawn) > 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": [257]},
        {"top_k": [1.5]},
        {"top_p": [0.0]},
        {"top_p": [1.1]},
        {"temperature": [-0.1]},
        {"temperature": [0.0], "top_k": [-1]},
    ],
    ids=str,
)
def test_sampling_parameters_out_of_range(
    tiny_folder: Path, make_model: Make, wrong: dict[str, Any]
) -> None:
    model = make_model(tiny_folder, on_device_sampling_config=DRAWN)
    with pytest.raises(ValueError, match=r"top_k|top_p|temperature"):
        first_tokens(model, 0, PROMPT, **wrong)
    assert not nxd_model(model).num_runs


def test_sampling_parameters_are_rows_of_three() -> None:
    params = prepare_sampling_params(2, top_k=[5, 10], top_p=[0.5, 0.9], temperature=[0.9, 0.5])
    assert params.dtype == torch.float32
    torch.testing.assert_close(params, torch.tensor([[5, 0.5, 0.9], [10, 0.9, 0.5]]))
    assert prepare_sampling_params(3).tolist() == [[1, 1, 1]] * 3
    with pytest.raises(AssertionError):
        prepare_sampling_params(2, top_k=[5, 10])


def test_only_what_top_k_and_top_p_leave_is_drawn() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 3.0, 2.9, 2.8, -1.0]])

    def drawn(*params: float) -> set[int]:
        rows = torch.tensor([params])
        return {int(sample(logits, rows, 256, is_greedy=False)) for _ in range(100)}

    assert drawn(3, 1.0, 1.0) == {1, 2, 3}
    assert drawn(2, 1.0, 1.0) == {1, 2}
    assert drawn(256, 0.3, 1.0) == {1}
    assert drawn(0, 1.0, 100.0) == {0, 1, 2, 3, 4}


def tokens_of(model: Any, num_tokens: int) -> list[int]:
    """A prompt in slot 0, and greedy steps of it alone."""
    tokens = first_tokens(model, 0, PROMPT).tokens.tolist()
    while len(tokens) < num_tokens:
        rows = {0: (tokens[-1], 19 + len(tokens))}
        tokens += model(**step_arguments(rows)).tokens.tolist()
    return tokens


def test_steps_that_run_ahead_give_the_same_tokens(tiny_folder: Path, make_model: Make) -> None:
    expected = tokens_of(make_model(tiny_folder, on_device_sampling_config=GREEDY), 60)
    model = make_model(tiny_folder, on_device_sampling_config=GREEDY, async_mode=True)
    assert tokens_of(model, 60) == expected


def test_a_step_in_flight_writes_late_into_a_slot_that_was_given_away(
    tiny_folder: Path, make_model: Make
) -> None:
    arguments = {"on_device_sampling_config": GREEDY, "async_mode": True, "tp_degree": 2}
    model = make_model(tiny_folder, **arguments)
    tokens_of(model, 4)  # the last step wrote position 22; one is in flight for position 23
    received = torch.full((1, 40, 32), 0.5)
    for tensors in nxd_model(model).state:
        for tensor in tensors.values():
            tensor[0, :, :40].copy_(received)
    model(**step_arguments({1: (5, 1)}))
    for tensor in kv_on_host(model).values():
        changed = (tensor[0, :, :40] != 0.5).any(2).any(0)
        assert changed.nonzero().flatten().tolist() == [23]


@pytest.mark.parametrize("ends_by", ["another batch", "a prompt"])
def test_a_step_in_flight_is_over_once_forward_was_called_for_something_else(
    tiny_folder: Path, make_model: Make, ends_by: str
) -> None:
    model = make_model(tiny_folder, on_device_sampling_config=GREEDY, async_mode=True)
    tokens_of(model, 4)
    if ends_by == "a prompt":
        first_tokens(model, 1, PROMPT)
    else:
        model(**step_arguments({1: (5, 1)}))
    for tensors in nxd_model(model).state:
        tensors[key_name(0)][0].copy_(torch.full((2, MAX_LENGTH + 128, 32), 0.5))
    model(**step_arguments({1: (5, 2)}))
    model(**step_arguments({1: (5, 3)}))
    slot = nxd_model(model).state[0][key_name(0)][0].cpu()
    assert (slot[:, :MAX_LENGTH] == 0.5).all()


def test_steps_do_not_run_ahead_where_a_bucket_ends(tiny_folder: Path, make_model: Make) -> None:
    model = make_model(tiny_folder, on_device_sampling_config=GREEDY, async_mode=True)
    prompt = random_prompt(60)
    token = int(first_tokens(model, 0, prompt).tokens)
    in_flight = []
    for position in range(60, 67):
        token = int(model(**step_arguments({0: (token, position)})).tokens)
        in_flight.append(model._async_steps._in_flight is not None)
    assert in_flight == [True, True, False, False, True, True, True]


def test_without_on_device_sampling_no_step_can_run_ahead(
    tiny_folder: Path, make_model: Make
) -> None:
    model = make_model(tiny_folder, async_mode=True)
    encode(model, 0, PROMPT)
    with pytest.raises(RuntimeError, match="needs on-device sampling"):
        step(model, {0: (5, 20)})
