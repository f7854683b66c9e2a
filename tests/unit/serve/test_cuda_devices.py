"""Which GPU each worker gets."""

import pytest
from contract.fake_cuda import WHY_NOT, Steering, library_path

from neuron_di.cuda_devices import count_devices, share_devices
from neuron_di.errors import ConfigError
from neuron_di_bindings.cuda_runtime import PATH_VARIABLE

WORKERS = ("prefill-0", "decode-0", "decode-1")


def test_workers_take_the_gpus_in_turn():
    assert share_devices((), 2, WORKERS) == {"prefill-0": 0, "decode-0": 1, "decode-1": 0}


def test_one_gpu_serves_them_all():
    assert set(share_devices((), 1, WORKERS).values()) == {0}


def test_named_gpus_are_taken_in_the_order_given():
    assert share_devices(("3", "1"), 4, WORKERS) == {"prefill-0": 3, "decode-0": 1, "decode-1": 3}


@pytest.mark.parametrize("wanted", [("4",), ("-1",), ("0", "x"), ("",), ("²",), ("1", "1")])
def test_what_is_no_gpu_of_this_machine_is_refused(wanted):
    with pytest.raises(ConfigError) as refused:
        share_devices(wanted, 4, WORKERS)
    assert refused.value.param == "cuda_devices"


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_the_runtime_is_asked_how_many_there_are(monkeypatch):
    monkeypatch.setenv(PATH_VARIABLE, str(library_path()))
    steering = Steering.of()
    assert count_devices() == 1
    steering.devices(3)
    try:
        assert count_devices() == 3
        steering.devices(0)
        with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
            count_devices()
    finally:
        steering.devices(1)
    steering.fail("cudaGetDeviceCount", 35)
    with pytest.raises(ConfigError, match="nvidia-smi"):
        count_devices()


def test_without_a_runtime_library_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv(PATH_VARIABLE, "/nowhere/libcudart.so")
    with pytest.raises(ConfigError, match=r"'\.\[cuda\]'"):
        count_devices()
