"""State tensors as bytes: shapes, the way without the runtime's handle, and whose turn it is."""

import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from test_neuron_artifact import SETTINGS

from neuron_di.backends.neuron_nxdi import _in_order
from neuron_di.backends.neuron_tensors import StateTensor, Turns, check_copies, device_kv
from neuron_di.errors import BackendLost, ConfigError
from neuron_di.kv.neuron_copies import NeuronCopies
from neuron_di.kv.runs import Memory
from neuron_di.models import ModelSpec
from neuron_di.types import BlockId
from neuron_di_bindings.nrt import NrtRequestError, NrtStatus, NrtWorkerError

LAYERS, HEADS, DIM, PAD = 2, 2, 4, 128
SPEC = ModelSpec.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    },
    eos_token_id=None,
    source="test",
)
CORES = (8, 9, 10, 11)


@dataclass
class Place:
    index: int


class DeviceTensor:
    """What a state tensor shows of itself, in the host's memory; `copied` counts numbers."""

    def __init__(self, host: torch.Tensor, index: int = 0, copied: list[int] | None = None) -> None:
        self.host, self.device, self.copied = host, Place(index), [] if copied is None else copied
        self.shape, self.dtype = host.shape, host.dtype
        self.error: Exception | None = None
        self.loses_writes = False
        self.num_written = [0]  # calls, of its parts, too

    def __getitem__(self, index: int) -> "DeviceTensor":
        part = DeviceTensor(self.host[index], self.device.index, self.copied)
        part.error, part.loses_writes = self.error, self.loses_writes
        part.num_written = self.num_written
        return part

    def to(self, device: str) -> torch.Tensor:
        assert device == "cpu"
        if self.error is not None:
            raise self.error
        self.copied.append(self.host.numel())
        return self.host.clone()

    def copy_(self, source: torch.Tensor) -> None:
        self.num_written[0] += 1
        if not self.loses_writes:
            self.host.copy_(source)


def numbered(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count * dtype.itemsize) % 251).to(torch.uint8).view(dtype).view(shape)


def ranks_of(tp: int = 2, *, transposed: bool = False, **changed: Any) -> list[list[DeviceTensor]]:
    """`changed`: slots, positions, dtype of the first rank's last tensor."""
    positions, num_heads = 256 + PAD, max(1, HEADS // tp)
    ranks = []
    for rank in range(tp):
        tensors = []
        for number in range(2 * LAYERS):
            shape = [4, num_heads, positions, DIM]
            if transposed and number % 2 == 0:
                shape = [4, num_heads, DIM, positions]
            dtype = torch.bfloat16
            if (rank, number) == (0, 2 * LAYERS - 1):
                shape[0] = changed.get("slots", shape[0])
                shape[2] = changed.get("positions", shape[2])
                dtype = changed.get("dtype", dtype)
            tensors.append(DeviceTensor(torch.zeros(shape, dtype=dtype), rank))
        ranks.append(tensors)
    return ranks


def kv_of(ranks: list[list[DeviceTensor]], **fields: Any) -> Any:
    import msgspec

    settings = msgspec.structs.replace(SETTINGS, **fields)
    return device_kv(ranks, settings, SPEC, CORES[: settings.tp], Turns())


def test_tensors_are_numbered_as_nxd_inference_lists_them() -> None:
    ranks = ranks_of(2)
    device = kv_of(ranks)
    listed = [tensor._tensor for tensor in device.tensors]
    by_layer = [ranks[rank][number] for number in range(2 * LAYERS) for rank in range(2)]
    assert all(ours is theirs for ours, theirs in zip(listed, by_layer, strict=True))
    assert device.lncs == (8, 9)
    assert device.geometry.block_size == 256 + PAD
    assert device.geometry.num_blocks == 4
    assert device.geometry.heads == ((0,), (1,))


def test_a_rank_lies_on_the_core_that_its_tensors_say() -> None:
    ranks = ranks_of(2)
    assert kv_of(ranks[::-1]).lncs == (9, 8)
    ranks[0][0].device = Place(5)
    with pytest.raises(ConfigError, match=r"lie on the cores \[5, 1\] of 2"):
        kv_of(ranks)


def test_transposed_keys_have_other_strides() -> None:
    device = kv_of(ranks_of(4, transposed=True), tp=4, k_transposed=True)
    keys, values = device.geometry.strides
    assert (keys.token, keys.dim) == (2, 2 * (256 + PAD))
    assert (values.token, values.dim) == (2 * DIM, 2)
    assert device.geometry.heads == ((0,), (0,), (1,), (1,))


def test_a_tiled_shape_is_the_same_bytes() -> None:
    ranks = ranks_of(1)
    for tensors in ranks:
        for tensor in tensors:
            tensor.shape = torch.Size((4, HEADS, 128, 3, DIM))
    assert kv_of(ranks, tp=1).geometry.block_size == 256 + PAD


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (ranks_of(1), "the loaded model has 1 ranks, not 2"),
        ([each[:-1] for each in ranks_of(2)], "rank 0 has 3 KV tensors, and the model 2 layers"),
        (ranks_of(2, positions=256), r"KV tensor 3 of rank 0 is \(4, 1, 256, 4\) of"),
        (ranks_of(2, slots=5), r"KV tensor 3 of rank 0 is \(5, 1, 384, 4\) of"),
        (ranks_of(2, dtype=torch.float32), r"of torch.float32, not \(4, 1, 384, 4\) of torch.bf"),
        (ranks_of(2, transposed=True), r"KV tensor 0 of rank 0 is \(4, 1, 4, 384\)"),
    ],
)
def test_what_does_not_look_as_the_settings_say_is_refused(
    ranks: list[list[DeviceTensor]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words.replace("torch.bf", "torch.bfloat16")):
        kv_of(ranks)


def test_the_dictionarys_order_says_nothing() -> None:
    names = [f"kv_mgr.past_key_values.{number}" for number in range(12)]
    random.Random(3).shuffle(names)
    found = _in_order({name: name for name in [*names, "kv_mgr.past_key_values.combined.0", "x"]})
    assert found == [f"kv_mgr.past_key_values.{number}" for number in range(12)]
    with pytest.raises(ValueError, match=r"have the numbers \[0, 2\]"):
        _in_order({"kv_mgr.past_key_values.0": 0, "kv_mgr.past_key_values.2": 0})


# Bytes.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 2, 8, 4), (3, 2, 4, 8), (2, 1, 3, 2, 4)])
def test_any_range_is_read_and_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    host = numbered(*shape, dtype=dtype)
    whole = bytes(host.view(-1).view(torch.uint8).numpy())
    tensor, draw = StateTensor(DeviceTensor(host), Turns()), random.Random(1)
    assert tensor.num_bytes == len(whole)
    for _ in range(100):
        begin, end = sorted(draw.sample(range(len(whole) + 1), 2))
        into = bytearray(end - begin)
        tensor.read(begin, memoryview(into))
        assert into == whole[begin:end]
        tensor.write(begin, memoryview(into))
        assert bytes(host.view(-1).view(torch.uint8).numpy()) == whole
        data = draw.randbytes(end - begin)
        tensor.write(begin, memoryview(data))
        whole = whole[:begin] + data + whole[end:]
        assert bytes(host.view(-1).view(torch.uint8).numpy()) == whole


def test_only_the_part_around_a_range_is_copied() -> None:
    """A slot of a large model is hundreds of kilobytes, and its heads are asked for one by one."""
    source = DeviceTensor(numbered(3, 2, 8, 4))
    tensor = StateTensor(source, Turns())
    row_bytes, head_bytes = 4 * 2, 8 * 4 * 2
    tensor.read(5 * head_bytes, memoryview(bytearray(head_bytes)))
    tensor.read(5 * head_bytes + row_bytes, memoryview(bytearray(row_bytes)))
    tensor.read(0, memoryview(bytearray(2 * head_bytes)))
    assert source.copied == [8 * 4, 4, 2 * 8 * 4]


def tensors_without_handles(*, transposed: bool) -> tuple[list[DeviceTensor], Any]:
    """Of 2 ranks with a head each, filled with numbers, as NeuronCopies has them."""
    ranks = ranks_of(2, transposed=transposed)
    for tensors in ranks:
        for tensor in tensors:
            tensor.host[:] = numbered(*tensor.shape)
    device = kv_of(ranks, k_transposed=transposed)
    return [tensor for tensors in ranks for tensor in tensors], device


@pytest.mark.parametrize("transposed", [False, True])
def test_a_slot_moves_in_one_call_for_each_tensor(transposed: bool) -> None:
    """Of transposed keys each dim is a run of its own, and a call of a device takes its time."""
    sources, device = tensors_without_handles(transposed=transposed)
    layout = SPEC.kv_layout(block_size=256, dtype="bfloat16")
    copies, host = NeuronCopies(layout, 4, device), np.zeros(4 * layout.block_bytes, np.uint8)
    mirror = Memory(host.ctypes.data, host.nbytes)
    before = [source.host.clone() for source in sources]
    copies.to_host(BlockId(2), 9, mirror)
    assert [len(source.copied) for source in sources] == [1] * len(sources)
    for source in sources:
        source.host[2] = 0
    copies.to_device(BlockId(2), 9, mirror)
    assert [len(source.copied) for source in sources] == [1] * len(sources), "nothing was read"
    assert [source.num_written[0] for source in sources] == [1] * len(sources)
    for number, (source, old) in enumerate(zip(sources, before, strict=True)):
        found, wanted = source.host.view(torch.int16), old.view(torch.int16)
        others = [0, 1, 3]
        assert torch.equal(found[others], wanted[others]), "other slots stay as they are"
        is_transposed = transposed and number % 2 == 0
        used = (2, 0, slice(None), slice(9)) if is_transposed else (2, 0, slice(9))
        assert torch.equal(found[used], wanted[used])
        assert wanted[used].any()


def test_runs_of_several_slots_change_nothing_beside_them() -> None:
    source = DeviceTensor(numbered(3, 2, 8, 4))
    whole = bytearray(source.host.view(-1).view(torch.uint8).numpy())
    tensor, slot_bytes = StateTensor(source, Turns()), 2 * 8 * 4 * 2
    tensor.write_many([(3, memoryview(b"abc")), (slot_bytes + 5, memoryview(b"de"))])
    whole[3:6], whole[slot_bytes + 5 : slot_bytes + 7] = b"abc", b"de"
    assert bytes(source.host.view(-1).view(torch.uint8).numpy()) == whole
    first, second = bytearray(3), bytearray(2)
    tensor.read_many([(slot_bytes + 5, memoryview(second)), (3, memoryview(first))])
    assert (first, second) == (b"abc", b"de")
    assert len(source.copied) == 2, "once to be written into, once to be read"
    tensor.read_many([])
    tensor.write_many([])
    assert len(source.copied) == 2


class Handle:
    """The runtime's."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def read(self, offset: int, into: memoryview) -> None:
        self.calls.append(("read", offset, len(into)))

    def write(self, offset: int, data: memoryview) -> None:
        self.calls.append(("write", offset, len(data)))


def test_with_a_handle_nobody_waits_for_a_turn() -> None:
    source, turns = DeviceTensor(numbered(3, 2, 8, 4), index=1), Turns()
    source.nrt_tensor = handle = Handle()  # type: ignore[attr-defined]
    tensor = StateTensor(source, turns)
    assert (tensor.nrt, tensor.core) == (handle, 1)
    with turns.taken():
        tensor.read(3, memoryview(bytearray(5)))
        tensor.write(7, memoryview(b"ab"))
    assert handle.calls == [("read", 3, 5), ("write", 7, 2)]


@pytest.mark.parametrize(
    "error",
    [
        NrtWorkerError("nrt_tensor_read", NrtStatus.HBM_UE, "NRT_EXEC_HW_ERR_HBM_UE"),
        NrtRequestError("nrt_tensor_read", NrtStatus.UNINITIALIZED, "NRT_UNINITIALIZED"),
        RuntimeError("nrt_tensor_read status=1201"),
    ],
)
def test_a_device_that_fails_meanwhile_is_lost(error: Exception) -> None:
    source = DeviceTensor(numbered(3, 2, 8, 4))
    source.error = error
    with pytest.raises(BackendLost):
        StateTensor(source, Turns()).read(0, memoryview(bytearray(4)))
    source.error = RuntimeError("HTTP status 5")  # none of the runtime's, whose 5 is a time-out
    with pytest.raises(RuntimeError, match="HTTP status 5"):
        StateTensor(source, Turns()).write(0, memoryview(b"abcd"))


def test_copies_are_tried_on_every_rank() -> None:
    ranks = ranks_of(2)
    check_copies(kv_of(ranks))
    assert [len(rank[0].copied) > 0 for rank in ranks] == [True, True]
    assert all(not tensor.host.any() for rank in ranks for tensor in rank), "nothing is left"


def test_writes_that_are_lost_are_noticed() -> None:
    ranks = ranks_of(2)
    ranks[1][-1].loses_writes = True
    with pytest.raises(ConfigError, match="KV tensor 7 does not give back what was written"):
        check_copies(kv_of(ranks))


# Turns.


def test_turns_are_taken_in_the_order_of_asking() -> None:
    turns, order = Turns(), list[int]()
    waiting: list[threading.Thread] = []

    def take(number: int) -> None:
        with turns.taken():
            order.append(number)

    with turns.taken():
        for number in range(5):
            waiting.append(threading.Thread(target=take, args=(number,)))
            waiting[-1].start()
            while len(turns._waiting) <= number:
                pass
    for thread in waiting:
        thread.join()
    assert order == list(range(5))
    assert not turns._is_taken


def test_one_at_a_time_whatever_it_raises() -> None:
    turns, inside, most = Turns(), [0], [0]

    def work() -> None:
        for number in range(200):
            try:
                with turns.taken():
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    inside[0] -= 1
                    if number % 3 == 0:
                        raise ValueError
            except ValueError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert not turns._is_taken
    assert not turns._waiting
