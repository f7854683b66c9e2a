import mmap
import os
import platform
from pathlib import Path

import pytest

from neuron_di_bindings import shared_memory

NUM_BYTES = 3 * mmap.PAGESIZE


def num_segments() -> int:
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return sum(target.startswith("/memfd:") for target in targets)


def mapped_bytes(label: str) -> int:
    """Of this process' read-only maps of a segment: what is there without a further fault."""
    total, is_of_it = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):  # the head of a map
            is_of_it = f"/memfd:{label}" in line and "r--s" in rest
        elif is_of_it and name == "Rss:":
            total += int(rest[0]) * 1024
    return total


@pytest.fixture
def segment():
    fd, view = shared_memory.create_segment("test-segment", NUM_BYTES)
    yield fd, view
    view.close()
    os.close(fd)


def test_a_segment_is_zeroed_and_all_of_it_is_present(segment):
    fd, view = segment
    assert bytes(view) == bytes(NUM_BYTES)
    assert os.fstat(fd).st_blocks * 512 == NUM_BYTES
    assert not os.get_inheritable(fd)


def test_a_segment_may_come_without_its_pages():
    fd, view = shared_memory.create_segment("test-segment", NUM_BYTES, is_touched=False)
    assert os.fstat(fd).st_blocks == 0
    view[5] = 77
    other = shared_memory.open_peer_segment(os.getpid(), fd, NUM_BYTES)  # sealed like any other
    assert other[5] == 77
    assert mapped_bytes("test-segment") <= mmap.PAGESIZE
    assert os.fstat(fd).st_blocks * 512 == mmap.PAGESIZE  # a peer makes none of those left out
    other.close()
    view.close()
    os.close(fd)


def test_both_maps_are_the_same_memory(segment):
    fd, view = segment
    other = shared_memory.open_peer_segment(os.getpid(), fd, NUM_BYTES)
    view[5] = 77
    assert other[5] == 77
    other.close()


@pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="needs Linux 5.14"
)
def test_a_peer_maps_all_pages_at_once(segment):
    other = shared_memory.open_peer_segment(os.getpid(), segment[0], NUM_BYTES)
    assert mapped_bytes("test-segment") == NUM_BYTES
    other.close()


def test_opening_keeps_no_descriptor(segment):
    before = num_segments()
    view = shared_memory.open_peer_segment(os.getpid(), segment[0], NUM_BYTES)
    for size_bytes in (NUM_BYTES - 1, NUM_BYTES + 1):
        with pytest.raises(OSError, match="bytes"):
            shared_memory.open_peer_segment(os.getpid(), segment[0], size_bytes)
    assert view[0] == 0
    view.close()
    assert num_segments() == before


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_a_size_that_cannot_be_is_refused_and_keeps_no_descriptor(size_bytes):
    before = num_segments()
    with pytest.raises((OSError, ValueError)):
        shared_memory.create_segment("test-segment", size_bytes)
    assert num_segments() == before


@pytest.mark.parametrize("size_bytes", [1 << 50, 1 << 63])
def test_memory_that_is_not_there_is_refused_and_keeps_no_descriptor(size_bytes):
    before = num_segments()
    with pytest.raises((OSError, OverflowError)):
        shared_memory.create_segment("test-segment", size_bytes)
    assert num_segments() == before


def test_a_kernel_without_populate_gets_its_pages_touched(monkeypatch):
    """An advice that this kernel does not know answers as an old kernel does."""
    monkeypatch.setattr(shared_memory, "_MADV_POPULATE_WRITE", 9999)
    fd, view = shared_memory.create_segment("test-segment", NUM_BYTES)
    assert os.fstat(fd).st_blocks * 512 == NUM_BYTES
    view.close()
    os.close(fd)
