"""The state of a loaded model: documented names, layouts, and tensors that live on the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in.cores import runtime
from stand_in.device_tensor import DeviceTensor
from stand_in_kit import MAX_LENGTH, NUM_SLOTS, key_name, nxd_model, value_name
from torch import Tensor

from neuron_di_bindings.nrt import NrtTensor

PADDED = MAX_LENGTH + 128
SHAPE = (3, 2, 5, 4)


@pytest.fixture
def tensor(device: object) -> DeviceTensor:
    """Counting up from 0, on core 1."""
    allocation = runtime().allocate(120 * 4, 1, "numbers")
    made = DeviceTensor(allocation, SHAPE, torch.float32)
    made.copy_(numbers())
    return made


def numbers() -> Tensor:
    return torch.arange(120, dtype=torch.float32).view(SHAPE)


def test_a_rank_has_keys_and_values_of_each_layer_on_its_core(
    tiny_folder: Path, make_model: Callable[..., Any]
) -> None:
    model = make_model(tiny_folder, tp_degree=4)
    state = nxd_model(model).state
    assert state is nxd_model(model).state
    assert model.token_generation_model.model is model.context_encoding_model.model
    assert len(state) == 4
    for rank, tensors in enumerate(state):
        assert set(tensors) == {
            name(layer) for layer in range(3) for name in (key_name, value_name)
        }
        for each in tensors.values():
            assert each.shape == (NUM_SLOTS, 1, PADDED, 32)
            assert (each.device.type, each.device.index) == ("privateuseone", rank)
            assert each.dtype == torch.float32
            assert (each.to("cpu") == 0).all()


def test_the_order_of_the_names_is_not_that_of_the_layers(
    tales_folder: Path, make_model: Callable[..., Any]
) -> None:
    names = list(nxd_model(make_model(tales_folder)).state[0])
    assert names != sorted(names, key=lambda name: int(name.rpartition(".")[2]))


@pytest.mark.parametrize(
    ("arguments", "keys", "values"),
    [
        ({}, (PADDED, 32), (PADDED, 32)),
        ({"k_cache_transposed": True}, (32, PADDED), (PADDED, 32)),
        ({"kv_cache_tiling": True}, (128, 3, 32), (128, 3, 32)),
        ({"k_cache_transposed": True, "kv_cache_tiling": True}, (32, 128, 3), (128, 3, 32)),
        ({"apply_seq_ids_mask": False}, (MAX_LENGTH, 32), (MAX_LENGTH, 32)),
    ],
    ids=["plain", "transposed", "tiled", "transposed and tiled", "no mask"],
)
def test_layouts(
    tiny_folder: Path,
    make_model: Callable[..., Any],
    arguments: dict[str, Any],
    keys: tuple[int, ...],
    values: tuple[int, ...],
) -> None:
    tensors = nxd_model(make_model(tiny_folder, tp_degree=2, **arguments)).state[1]
    assert tensors[key_name(2)].shape == (NUM_SLOTS, 1, *keys)
    assert tensors[value_name(2)].shape == (NUM_SLOTS, 1, *values)


def test_slots_are_padded_when_told_so(tiny_folder: Path, make_model: Callable[..., Any]) -> None:
    model = make_model(tiny_folder, kv_cache_padding_size=1)
    assert nxd_model(model).state[0][key_name(0)].shape[0] == NUM_SLOTS + 1


def test_combined_allocations_are_seen_three_ways(
    tiny_folder: Path, make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_COMBINE_KV_ALLOCATIONS", "1")
    tensors = nxd_model(make_model(tiny_folder, tp_degree=2)).state[0]
    both = tensors["kv_mgr.past_key_values.combined.1"]
    keys, values = tensors[key_name(1)], tensors[value_name(1)]
    assert both.shape == (2, *keys.shape)
    keys.copy_(torch.full(keys.shape, 3.0))
    values.copy_(torch.full(values.shape, 4.0))
    on_host = both.cpu()
    assert (on_host[0] == 3.0).all()
    assert (on_host[1] == 4.0).all()
    assert keys.data_ptr() == both.data_ptr()
    assert values.data_ptr() == both.data_ptr() + keys.nbytes


def test_the_memory_of_a_model_that_is_gone_is_free_again(
    tiny_folder: Path, make_model: Callable[..., Any]
) -> None:
    model = make_model(tiny_folder)
    used = runtime().memory_stats(0).bytes_used
    kept = nxd_model(model).state[0][key_name(0)]
    kept[1, 0, 7].copy_(torch.ones(32))
    view = kept[1]
    del model, kept
    assert runtime().memory_stats(0).bytes_used < used
    assert view.cpu()[0, 7].sum() == 32  # as long as somebody has a view of it


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        (2, 1),
        (2, 1, 4, 3),
        slice(1, 3),
        (slice(None), 1),
        (slice(None), slice(None), slice(2, 4)),
        (1, slice(None), slice(None), slice(1, 2)),
        (slice(0, 1), 0, slice(4, 9), 3),
        (1, slice(2, 2)),
    ],
    ids=str,
)
def test_a_view_reads_and_writes_what_torchs_would(tensor: DeviceTensor, index: Any) -> None:
    view, expected = tensor[index], numbers()
    wanted = expected[index]
    assert view.shape == wanted.shape
    assert view.stride() == wanted.stride()
    assert view.numel() == wanted.numel()
    assert view.is_contiguous() == wanted.is_contiguous()
    if wanted.numel():
        assert view.data_ptr() - tensor.data_ptr() == wanted.data_ptr() - expected.data_ptr()
    assert torch.equal(view.to("cpu"), wanted)
    wanted.mul_(-1)
    view.copy_(wanted)
    assert torch.equal(tensor.cpu(), expected)


def test_views_of_views_and_shapes(tensor: DeviceTensor) -> None:
    assert torch.equal(tensor[2][1, 1:4][:, 2].cpu(), numbers()[2][1, 1:4][:, 2])
    assert torch.equal(tensor[1].view(8, 5).cpu(), numbers()[1].view(8, 5))
    with pytest.raises(RuntimeError, match="no view"):
        tensor[:, 0].view(60)
    tensor[0] = torch.zeros(2, 5, 4)
    assert tensor[0].cpu().sum() == 0
    assert (tensor.dim(), len(tensor), tensor.size(2), tensor.element_size()) == (4, 3, 5, 4)
    assert tensor.stride(0) == 40


def test_a_copy_converts_and_goes_between_devices(tensor: DeviceTensor) -> None:
    tensor[0].copy_(tensor[2])
    assert torch.equal(tensor[0].cpu(), numbers()[2])
    tensor[1].copy_(torch.ones(2, 5, 4, dtype=torch.float64))
    assert torch.equal(tensor[1].cpu(), torch.ones(2, 5, 4))
    with pytest.raises(RuntimeError, match="cannot be copied"):
        tensor[1].copy_(torch.ones(5, 4))


def test_16_bit_numbers_go_as_they_are(device: object) -> None:
    allocation = runtime().allocate(16, 0, "numbers")
    tensor = DeviceTensor(allocation, (2, 4), torch.bfloat16)
    source = torch.tensor([[1.5, -2.0, 3e20, 0.0]] * 2, dtype=torch.bfloat16)
    tensor.copy_(source)
    assert torch.equal(tensor.cpu(), source)


def test_what_torch_would_not_do_is_refused(tensor: DeviceTensor) -> None:
    with pytest.raises(IndexError):
        tensor[3]
    with pytest.raises(IndexError):
        tensor[0, 0, 0, 0, 0]
    for index in (slice(None, None, 2), torch.tensor([0])):
        with pytest.raises(NotImplementedError):
            tensor[index]
    with pytest.raises(NotImplementedError):
        tensor.to("cuda")


def test_the_handle_belongs_to_the_whole_tensor(tensor: DeviceTensor) -> None:
    assert isinstance(tensor.nrt_tensor, NrtTensor)
    assert tensor.nrt_tensor.core == 1
    assert tensor.nrt_tensor.address == tensor.data_ptr()
    assert tensor.view(6, 20).nrt_tensor is tensor.nrt_tensor
    for part in (tensor[0], tensor[1:], tensor[:, 0]):
        with pytest.raises(AttributeError):
            part.nrt_tensor  # noqa: B018
