"""Tensor sets on the simulator of libnrt."""

from ctypes import byref, c_void_p

import pytest
from nrt_sim.plain import INVALID, INVALID_HANDLE, SUCCESS
from nrt_sim.plain_models import PlainModels


@pytest.fixture
def models(nrt):
    return PlainModels(nrt)


def test_a_set_finds_what_was_put_there_last(models):
    first, second, found = models.allocated(8), models.allocated(8), c_void_p()
    tensors = models.tensor_set({"a": first, "b": second})
    assert models.nrt_get_tensor_from_tensor_set(tensors, b"a", byref(found)) == SUCCESS
    assert found.value == first.value
    assert models.nrt_add_tensor_to_tensor_set(tensors, b"a", second) == SUCCESS
    assert models.nrt_get_tensor_from_tensor_set(tensors, b"a", byref(found)) == SUCCESS
    assert found.value == second.value
    assert models.nrt_get_tensor_from_tensor_set(tensors, b"c", byref(found)) == INVALID
    assert models.nrt_get_tensor_from_tensor_set(tensors, None, byref(found)) == INVALID
    assert models.nrt_get_tensor_from_tensor_set(first, b"a", byref(found)) == INVALID_HANDLE


def test_a_set_takes_tensors_that_live_under_names(models):
    tensors, freed = models.tensor_set({}), models.allocated(8)
    copy_of_handle = c_void_p(freed.value)
    models.nrt_tensor_free(byref(freed))
    add = models.nrt_add_tensor_to_tensor_set
    assert add(tensors, b"a", copy_of_handle) == INVALID_HANDLE
    assert add(tensors, b"a", tensors) == INVALID_HANDLE
    tensor = models.allocated(8)
    assert add(tensors, b"", tensor) == INVALID
    assert add(tensors, None, tensor) == INVALID
    assert add(tensors, b"n" * 256, tensor) == INVALID
    assert add(tensors, b"n" * 255, tensor) == SUCCESS
    assert add(tensor, b"a", tensor) == INVALID_HANDLE


def test_a_set_is_destroyed_once(models):
    tensors = models.tensor_set({})
    again = c_void_p(tensors.value)
    models.nrt_destroy_tensor_set(byref(tensors))
    assert tensors.value is None
    models.nrt_destroy_tensor_set(byref(tensors))  # as of free(): nothing is nothing
    assert models.nrt_sim_violations() == 0
    models.nrt_destroy_tensor_set(byref(again))
    assert models.nrt_sim_violations() == 1
