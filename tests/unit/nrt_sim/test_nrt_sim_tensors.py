"""The simulator of libnrt: tensors, their ranges and handles, and memory that no host may read."""

import ctypes
import mmap
import os
import subprocess
import sys
from ctypes import byref, c_int, c_void_p, create_string_buffer
from pathlib import Path

import pytest
from nrt_sim import plain
from nrt_sim.plain import (
    DEVICE,
    HOST,
    INVALID,
    INVALID_HANDLE,
    SUCCESS,
    TENSOR_KIND,
    TIMEOUT,
    AllocationInfo,
    Batch,
    BatchOp,
)

MOST = 2**64 - 1


@pytest.mark.parametrize("placement", [DEVICE, HOST])
def test_bytes_written_are_read(nrt, placement):
    tensor = nrt.allocated(10000, placement=placement)
    content = bytes(i % 251 for i in range(10000))
    nrt.write(tensor, 0, content)
    nrt.write(tensor, 9990, b"0123456789")
    assert nrt.read(tensor, 0, 10000) == content[:9990] + b"0123456789"
    assert nrt.nrt_tensor_get_size(tensor) == 10000
    assert nrt.nrt_tensor_memset(tensor, 1, 0x1FF, 2) == SUCCESS
    assert nrt.read(tensor, 0, 4) == b"\x00\xff\xff\x03"
    assert nrt.read(tensor, 10000, 0) == b""


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 65), (64, 1), (65, 0), (1, 64), (MOST, 1), (1, MOST), (MOST, MOST), (2**63, 2**63)],
)
def test_a_range_that_is_not_all_inside_is_invalid(nrt, offset, size):
    tensor, other = nrt.allocated(64), nrt.allocated(64)
    nrt.write(tensor, 0, bytes(64))
    nrt.write(other, 0, bytes(64))
    buffer, handle = create_string_buffer(128), c_void_p()
    assert nrt.nrt_tensor_read(tensor, buffer, offset, size) == INVALID
    assert nrt.nrt_tensor_write(tensor, b"x" * 128, offset, size) == INVALID
    assert nrt.nrt_tensor_memset(tensor, offset, 7, size) == INVALID
    assert nrt.nrt_tensor_copy(tensor, offset, other, 0, size) == INVALID
    assert nrt.nrt_tensor_copy(tensor, 0, other, offset, size) == INVALID
    assert nrt.nrt_tensor_allocate_slice(tensor, offset, size, b"", byref(handle)) == INVALID
    assert nrt.read(tensor, 0, 64) == nrt.read(other, 0, 64) == bytes(64)


def test_null_buffers_and_places_are_invalid(nrt):
    tensor = nrt.allocated(64)
    assert nrt.nrt_tensor_read(tensor, None, 0, 1) == INVALID
    assert nrt.nrt_tensor_write(tensor, None, 0, 1) == INVALID
    assert nrt.nrt_tensor_allocate(DEVICE, 0, 64, b"", None) == INVALID
    assert nrt.nrt_tensor_allocate_empty(b"", None) == INVALID
    assert nrt.nrt_tensor_allocate_slice(tensor, 0, 1, b"", None) == INVALID
    assert nrt.nrt_tensor_get_device_allocation_info(tensor, None) == INVALID
    assert nrt.nrt_get_dmabuf_fd(0, 4096, None) == INVALID
    nrt.nrt_tensor_free(None)
    nrt.nrt_tensor_free(byref(c_void_p()))
    assert nrt.nrt_sim_violations() == 0


def test_sizes_and_placements_that_there_are_not(nrt):
    handle = c_void_p()
    for placement, size in ((DEVICE, 0), (HOST, 0), (2, 64), (3, 64), (-1, 64), (DEVICE, MOST)):
        assert nrt.nrt_tensor_allocate(placement, 0, size, b"", byref(handle)) == INVALID
    assert nrt.nrt_sim_num_live(TENSOR_KIND) == 0


def test_a_dead_or_foreign_handle_is_known(nrt):
    tensor = nrt.allocated(64)
    kept = c_void_p(tensor.value)
    nrt.nrt_tensor_free(byref(tensor))
    assert tensor.value is None
    nrt.allocated(64)  # takes the same memory, and another handle
    buffer = create_string_buffer(64)
    for dead in (kept, c_void_p(), c_void_p(4096), c_void_p(ctypes.addressof(buffer))):
        assert nrt.nrt_tensor_read(dead, buffer, 0, 1) == INVALID_HANDLE
        assert nrt.nrt_tensor_write(dead, b"x", 0, 1) == INVALID_HANDLE
        assert nrt.nrt_tensor_memset(dead, 0, 0, 1) == INVALID_HANDLE
        assert nrt.nrt_tensor_attach_buffer(dead, buffer, 64) == INVALID_HANDLE
        assert nrt.nrt_tensor_reset_output_completion(dead) == INVALID_HANDLE
        assert nrt.nrt_tensor_check_output_completion(dead, 0, 0) == INVALID_HANDLE
        assert nrt.nrt_tensor_get_size(dead) == 0
        assert nrt.nrt_tensor_get_va(dead) is None
    assert nrt.nrt_sim_violations() == 0
    nrt.nrt_tensor_free(byref(kept))
    assert nrt.nrt_sim_violations() == 1
    assert nrt.nrt_sim_num_live(TENSOR_KIND) == 1


def test_copies_stay_on_one_core(nrt):
    first, second = nrt.allocated(64), nrt.allocated(64)
    other_core, host = nrt.allocated(64, vnc=1), nrt.allocated(64, placement=HOST)
    nrt.write(first, 0, bytes(range(64)))
    assert nrt.nrt_tensor_copy(first, 0, second, 32, 32) == SUCCESS
    assert nrt.read(second, 32, 32) == bytes(range(32))
    assert nrt.nrt_tensor_copy(first, 0, first, 1, 63) == SUCCESS  # as memmove
    assert nrt.read(first, 0, 64) == bytes([0, *range(63)])
    assert nrt.nrt_tensor_copy(first, 0, other_core, 0, 64) == INVALID
    assert nrt.nrt_tensor_copy(first, 0, host, 0, 64) == SUCCESS
    assert nrt.read(host, 0, 64) == nrt.read(first, 0, 64)


def test_slices_show_their_part_and_keep_it(nrt):
    tensor = nrt.allocated(8192)
    nrt.write(tensor, 0, bytes(8192))
    outer = nrt.sliced(tensor, 4000, 200)
    inner = nrt.sliced(outer, 100, 10)
    nrt.write(inner, 0, b"0123456789")
    assert nrt.read(tensor, 4100, 10) == b"0123456789"
    base = nrt.nrt_tensor_get_va(tensor)
    assert nrt.nrt_tensor_get_va(outer) == base + 4000
    assert nrt.nrt_tensor_get_va(inner) == base + 4100
    assert nrt.nrt_tensor_get_size(inner) == 10
    nrt.nrt_tensor_free(byref(tensor))
    nrt.nrt_tensor_free(byref(outer))
    assert nrt.nrt_sim_num_live(TENSOR_KIND) == 1
    assert nrt.read(inner, 0, 10) == b"0123456789"
    assert nrt.nrt_tensor_read(inner, create_string_buffer(1), 10, 1) == INVALID
    nrt.nrt_tensor_free(byref(inner))
    assert nrt.nrt_sim_num_live(TENSOR_KIND) == 0


def test_a_callers_buffer_becomes_a_tensor(nrt):
    tensor = c_void_p()
    assert nrt.nrt_tensor_allocate_empty(b"mine", byref(tensor)) == SUCCESS
    assert nrt.nrt_tensor_read(tensor, create_string_buffer(1), 0, 0) == INVALID  # nothing there
    first, second = create_string_buffer(b"first", 5), create_string_buffer(b"second", 6)
    assert nrt.nrt_tensor_attach_buffer(tensor, None, 5) == INVALID
    assert nrt.nrt_tensor_attach_buffer(tensor, first, 0) == INVALID
    for buffer in (first, second):
        assert nrt.nrt_tensor_attach_buffer(tensor, buffer, len(buffer)) == SUCCESS
        assert nrt.read(tensor, 0, len(buffer)) == buffer.raw
        assert nrt.nrt_tensor_get_va(tensor) == ctypes.addressof(buffer)
    nrt.write(tensor, 0, b"S")
    assert (first.raw, second.raw) == (b"first", b"Second")
    for placement in (DEVICE, HOST):
        own = nrt.allocated(64, placement=placement)
        assert nrt.nrt_tensor_attach_buffer(own, first, 5) == INVALID


def batch(tensor, *operations):
    ops = (BatchOp * len(operations))(
        *(BatchOp(offset, len(buffer), ctypes.addressof(buffer)) for offset, buffer in operations)
    )
    return Batch(tensor, ops, len(operations))


def test_batches_move_many_ranges_or_none(nrt):
    tensors = [nrt.allocated(64), nrt.allocated(64, vnc=1)]
    for tensor in tensors:
        nrt.write(tensor, 0, bytes(64))
    written = [create_string_buffer(bytes([i + 1] * 8), 8) for i in range(3)]
    batches = (Batch * 2)(
        batch(tensors[0], (0, written[0]), (56, written[1])), batch(tensors[1], (8, written[2]))
    )
    assert nrt.nrt_tensor_write_batch(batches, 2, False) == SUCCESS
    assert nrt.read(tensors[0], 0, 64) == b"\x01" * 8 + bytes(48) + b"\x02" * 8
    assert nrt.read(tensors[1], 0, 24) == bytes(8) + b"\x03" * 8 + bytes(8)
    got = [create_string_buffer(4) for _ in range(2)]
    batches = (Batch * 1)(batch(tensors[0], (54, got[0]), (60, got[1])))
    assert nrt.nrt_tensor_read_batch(batches, 1, True) == SUCCESS
    assert [each.raw for each in got] == [b"\0\0\2\2", b"\2\2\2\2"]
    whole = batch(tensors[0], (0, written[2]))
    for bad, status in (
        (batch(tensors[1], (57, written[0])), INVALID),
        (Batch(tensors[1], None, 1), INVALID),
        (batch(None, (0, written[0])), INVALID_HANDLE),
    ):
        assert nrt.nrt_tensor_write_batch((Batch * 2)(whole, bad), 2, False) == status
        assert nrt.read(tensors[0], 0, 8) == b"\x01" * 8  # the good one was not begun
    assert nrt.nrt_tensor_read_batch(None, 1, False) == INVALID
    assert nrt.nrt_tensor_read_batch(None, 0, False) == SUCCESS


READER = """
import ctypes, sys
from nrt_sim.plain import *
nrt = PlainNrt(sys.argv[1])
nrt.open()
tensor = nrt.allocated(64)
nrt.write(tensor, 0, b"seen")
places = {
    "handle": tensor.value,
    "device": nrt.nrt_tensor_get_va(tensor),
    "host": nrt.nrt_tensor_get_va(nrt.allocated(64, placement=HOST)),
}
print("alive", flush=True)
ctypes.string_at(places[sys.argv[2]], 4)
print("read", flush=True)
"""


@pytest.mark.parametrize(("place", "ends"), [("device", -11), ("handle", -11), ("host", 0)])
def test_who_looks_behind_a_device_address_or_a_handle_faults(load, tmp_path, place, ends):
    load()
    done = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "libnrt_0.so"), place],
        env={**os.environ, "PYTHONPATH": str(Path(plain.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    lines = "alive\n" if ends else "alive\nread\n"
    assert (done.returncode, done.stdout) == (ends, lines), done.stderr


def test_the_device_takes_bytes_at_its_addresses(nrt):
    tensor = nrt.allocated(8192)
    address = nrt.nrt_tensor_get_va(tensor)
    assert nrt.nrt_memcpy_to_device(address + 100, b"content", 7) == SUCCESS
    assert nrt.read(tensor, 100, 7) == b"content"
    assert nrt.nrt_memcpy_to_device(address + 8190, b"content", 7) == INVALID
    assert nrt.nrt_memcpy_to_device(address - 1, b"content", 7) == INVALID
    assert nrt.nrt_memcpy_to_device(address, None, 7) == INVALID
    assert nrt.nrt_memcpy_to_device(address, b"", 0) == INVALID
    buffer = create_string_buffer(8)
    assert nrt.nrt_memcpy_to_device(ctypes.addressof(buffer), b"content", 7) == INVALID
    nrt.nrt_tensor_free(byref(tensor))
    assert nrt.nrt_memcpy_to_device(address, b"content", 7) == INVALID


def test_a_descriptor_shows_whole_pages_of_one_tensor(nrt):
    nrt.allocated(4096)
    tensor = nrt.allocated(3 * 4096)
    address, fd = nrt.nrt_tensor_get_va(tensor), c_int()
    nrt.write(tensor, 4096, b"second page")
    assert nrt.nrt_get_dmabuf_fd(address + 4096, 8192, byref(fd)) == SUCCESS
    start = os.lseek(fd.value, 0, os.SEEK_CUR)
    with mmap.mmap(fd.value, 8192, offset=start) as view:
        assert view[:11] == b"second page"
        view[4096:4101] = b"third"
    os.close(fd.value)
    assert nrt.read(tensor, 8192, 5) == b"third"
    for va, size in (
        (address + 1, 4096),
        (address, 4095),
        (address, 0),
        (address + 4096, 3 * 4096),
        (address - 4096, 2 * 4096),  # the neighbour's
        (4096, 4096),
    ):
        assert nrt.nrt_get_dmabuf_fd(va, size, byref(fd)) == INVALID
        assert fd.value == -1


def test_a_tensor_knows_where_it_lies(load, monkeypatch):
    monkeypatch.setenv("NRT_SIM_INSTANCE", "trn2.48xlarge")
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "5")
    nrt = load()
    nrt.open()
    found = []
    for vnc in range(5):
        info = AllocationInfo()
        tensor = nrt.allocated(4096, vnc)
        assert nrt.nrt_tensor_get_device_allocation_info(tensor, byref(info)) == SUCCESS
        found.append((info.size, info.hbm_index))
    assert found == [(4096, index) for index in (0, 1, 2, 3, 0)]  # two physical cores each
    host = nrt.allocated(64, placement=HOST)
    assert nrt.nrt_tensor_get_device_allocation_info(host, byref(AllocationInfo())) == INVALID


def test_completions_are_waited_for_with_a_bound(nrt):
    tensor = nrt.allocated(64)
    assert nrt.nrt_tensor_check_output_completion(tensor, 0, 0) == SUCCESS
    assert nrt.nrt_tensor_check_output_completion(tensor, 0, 1) == TIMEOUT
    assert nrt.nrt_tensor_check_output_completion(tensor, 1000, 1) == TIMEOUT
    assert nrt.nrt_tensor_reset_output_completion(tensor) == SUCCESS


def test_memory_is_taken_again_after_many_frees(load, monkeypatch):
    monkeypatch.setenv("NRT_SIM_HBM_BYTES", str(64 * 4096))
    nrt = load()
    nrt.open()
    for order in (slice(None), slice(None, None, -1), slice(None, None, 7)):
        tensors = [nrt.allocated(4096) for _ in range(64)]
        for index, tensor in enumerate(tensors):
            nrt.write(tensor, 0, index.to_bytes(2, "little"))
        assert [nrt.read(tensor, 0, 2)[0] for tensor in tensors] == list(range(64))
        for tensor in [*tensors[order], *tensors]:
            if tensor.value is not None:
                nrt.nrt_tensor_free(byref(tensor))
        whole = nrt.allocated(64 * 4096)  # all are one range again
        nrt.nrt_tensor_free(byref(whole))
    assert nrt.nrt_sim_violations() == 0
