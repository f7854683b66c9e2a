"""The closed transfer engine's stand-in moves state tensors from core to core."""

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_kit import random_prompt
from stand_in.closed_classes import ClosedNeuron, CompletionToken
from stand_in.cores import runtime
from stand_in.device_tensor import DeviceTensor
from stand_in_kit import encode, nxd_model, step

from neuron_di_bindings.nrt import SendReceive

FIRST_CORE = 4
HOST = "127.0.0.1"
POLL_S, POLLS_MAX = 0.002, 10_000


@pytest.fixture(params=["1", "eager"])
def neuron(
    device: Callable[..., None], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[ClosedNeuron]:
    """In torch, on four cores of which the first is the host's fifth."""
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    device(
        None,
        NEURON_RT_VISIBLE_CORES=f"{FIRST_CORE}-{FIRST_CORE + 3}",
        NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED="1",
        NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT=str(port),
        NEURON_RT_ROOT_COMM_ID=f"{HOST}:{port}",
        NRT_SIM_HOST=HOST,
    )
    made = ClosedNeuron(runtime, request.param)
    with made.installed():
        yield made
    made.close()


def wait_for(is_there: Callable[[], bool]) -> None:
    never = threading.Event()
    for _ in range(POLLS_MAX):
        if is_there():
            return
        never.wait(POLL_S)
    raise AssertionError("it did not come in time")


def connected(core_from: int, core_to: int) -> tuple[int, int]:
    """Communicators from one core of this process to another."""
    ops = torch.ops.neuron
    first, second = core_from + FIRST_CORE, core_to + FIRST_CORE
    pair = (
        ops._nrt_create_send_communicator(HOST, second, first),
        ops._nrt_create_recv_communicator(HOST, first, second),
    )
    wait_for(lambda: all(ops._nrt_test_communicator(each) for each in pair))
    return pair


def engines() -> tuple[Any, Any]:
    for core in range(torch.classes.neuron.Runtime().get_visible_nc_count()):
        torch.ops.neuron._nrt_async_init_neuron(core + FIRST_CORE)
    make = torch.classes.neuron.NeuronTransferEngine
    return make(4, HOST, True, FIRST_CORE), make(4, HOST, False, FIRST_CORE)


def flush(core: int) -> None:
    SendReceive(runtime()).flush(core + FIRST_CORE)


def queue(
    engine: Any, tensors: list[DeviceTensor], offset: int, length: int, peer: int, comm_id: int
) -> Any:
    token = torch.classes.neuron.CompletionToken()
    count = len(tensors)
    engine.queue_transfer_with_token(
        tensors,
        [offset] * count,
        [length] * count,
        [peer] * count,
        [tensor.device.index for tensor in tensors],
        [comm_id] * count,
        0,
        token,
        False,
        50,
    )
    return token


def test_a_slot_goes_from_core_to_core_and_comes_back(
    neuron: ClosedNeuron, tiny_folder: Path, make_model: Callable[..., Any]
) -> None:
    model = make_model(tiny_folder)
    encode(model, 1, random_prompt(20))
    expected = step(model, {1: (5, 20)})
    own = list(nxd_model(model).state[0].values())
    others = [torch.zeros(each.shape, dtype=each.dtype, device="privateuseone:2") for each in own]
    sender, receiver = engines()
    there, back = connected(0, 2), connected(2, 0)
    slot_bytes = own[0][1].nbytes
    at = slot_bytes  # of slot 1
    arrival = queue(receiver, others, at, slot_bytes, 0, there[1])
    assert not arrival.is_done()
    departure = queue(sender, own, at, slot_bytes, 2, there[0])
    wait_for(lambda: bool(arrival.is_done() and departure.is_done()))
    assert not others[0][1].cpu().any()  # what came is not visible yet
    flush(2)
    for source, target in zip(own, others, strict=True):
        assert torch.equal(target[1].cpu(), source[1].cpu())
        source[1].copy_(torch.zeros(source[1].shape))
    assert not torch.equal(step(model, {1: (5, 20)}), expected)
    arrival = queue(receiver, own, at, slot_bytes, 2, back[1])
    queue(sender, others, at, slot_bytes, 0, back[0])
    wait_for(lambda: bool(arrival.is_done()))
    flush(0)
    assert torch.equal(step(model, {1: (5, 20)}), expected)


def test_a_transfer_that_fails_says_so(
    neuron: ClosedNeuron, tiny_folder: Path, make_model: Callable[..., Any]
) -> None:
    tensor = nxd_model(make_model(tiny_folder)).state[0]["kv_mgr.past_key_values.0"]
    sender, send_to = engines()[0], connected(0, 1)[0]
    steering = ctypes.CDLL(os.environ["NEURON_DI_LIBNRT"])
    assert steering.nrt_sim_fault(b"nrt_async_sendrecv_send_tensor", 2, 1) == 0
    token = queue(sender, [tensor], 0, 64, 1, send_to)
    with pytest.raises(RuntimeError, match="NRT_INVALID"):
        wait_for(token.is_done)
    with pytest.raises(RuntimeError, match="a tensor of core 0, not 1"):
        sender.queue_transfer_with_token(
            [tensor], [0], [64], [0], [1], [send_to], 0, CompletionToken(), False, 50
        )
    with pytest.raises(NotImplementedError):
        sender.queue_transfer_with_token(
            [tensor], [0], [64], [0], [0], [send_to], 3, CompletionToken(), False, 50
        )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"peer": 7}, "device 7 of the peer is not core"),
        ({"peer": -1}, "device -1 of the peer"),
        ({"comm_id": 1}, "a communicator of core 5, not of 0"),
    ],
)
def test_numbers_that_do_not_fit_each_other_are_refused(
    neuron: ClosedNeuron, changed: dict[str, int], words: str
) -> None:
    (sender, receiver), pair = engines(), connected(0, 1)
    tensors: list[Any] = [torch.zeros(16, device=f"privateuseone:{core}") for core in (0, 1)]
    numbers = {"peer": 1, "comm_id": pair[0]}
    tokens = [
        queue(sender, tensors[:1], 0, 64, **numbers),
        queue(receiver, tensors[1:], 0, 64, 0, pair[1]),
    ]
    wait_for(lambda: all(token.is_done() for token in tokens))
    with pytest.raises(RuntimeError, match=words):
        queue(sender, tensors[:1], 0, 64, **(numbers | changed))


def test_memory_of_a_device_is_zeros(neuron: ClosedNeuron) -> None:
    assert not torch.zeros((2, 3), dtype=torch.int32, device="privateuseone:1").cpu().any()
    assert torch.zeros(2, 3).shape == torch.zeros((2, 3), device="cpu").shape == (2, 3)


def test_the_first_form_takes_other_arguments(device: Callable[..., None]) -> None:
    first, later = ClosedNeuron(runtime, "2.24"), ClosedNeuron(runtime)
    with first.installed():
        make = torch.classes.neuron.NeuronTransferEngine
        engine = make(4, HOST, True, True, 0)
        with pytest.raises(TypeError):
            engine.queue_transfer_with_token([], [], [], [], [], [], 0, None, False, 50)
        with pytest.raises(RuntimeError, match="takes"):
            make(4, HOST, True, 0)
    with later.installed(), pytest.raises(RuntimeError, match="takes"):
        torch.classes.neuron.NeuronTransferEngine(4, HOST, True, True, 0)
    first.close()


@pytest.mark.parametrize(
    ("value", "has_classes", "has_handle"),
    [("0", False, True), ("1", True, False), ("eager", True, False), ("none", False, False)],
)
def test_a_process_starts_with_what_its_environment_says(
    device: Callable[..., None], value: str, has_classes: bool, has_handle: bool
) -> None:
    """In a process of its own: it lasts until the end."""
    device(None, STAND_IN_CLOSED_CLASSES=value, PYTHONPATH=os.pathsep.join(sys.path))
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    assert ended.stdout.decode().split() == [str(has_classes), str(has_handle)]


SCRIPT = """
import torch
import torch_neuronx
from stand_in.cores import runtime
from stand_in.device_tensor import DeviceTensor

def has(get):
    try:
        return get() is not None
    except (AttributeError, RuntimeError):
        return False

print(has(lambda: torch.classes.neuron.NeuronTransferEngine))
tensor = DeviceTensor(runtime().allocate(4, 0, "tensor"), (1,), torch.float32)
print(has(lambda: tensor.nrt_tensor))
"""


def test_torch_is_afterwards_as_it_was(device: Callable[..., None]) -> None:
    with ClosedNeuron(runtime).installed():
        assert torch.classes.neuron.Runtime().get_visible_nc_count() == 4
    for name in ("Runtime", "NeuronTransferEngine"):
        with pytest.raises(RuntimeError):
            getattr(torch.classes.neuron, name)
    assert not hasattr(torch.ops.neuron, "_nrt_test_communicator")
    with pytest.raises(ModuleNotFoundError):
        torch.zeros(1, device="privateuseone:0")
