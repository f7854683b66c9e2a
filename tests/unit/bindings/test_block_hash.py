"""Many blocks hashed in one call: as xxhash does it one by one, and while other threads go on."""

import ctypes
import os
import select
import struct
import threading

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from neuron_di_bindings import block_hash

COMPILED = block_hash._IS_COMPILED
LAST_SEED = (1 << 64) - 1


@pytest.fixture(params=["compiled", "plain"])
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(block_hash, "_IS_COMPILED", False)
    elif not COMPILED:
        pytest.skip("the compiled part is not built")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("block_bytes", [1, 16, 17, 240, 241, 4096, 16384, 1 << 19])
@pytest.mark.parametrize("seed", [0, 7, LAST_SEED - 1, LAST_SEED, LAST_SEED + 5])
def test_each_block_is_hashed_with_its_own_seed(block_bytes, seed):
    blocks = np.random.default_rng(block_bytes).integers(0, 256, (6, block_bytes), np.uint8)
    ids = np.array([5, 0, 0, 3])
    assert block_hash.hash_blocks(blocks.ctypes.data, ids, block_bytes, seed) == [
        xxh3_64_intdigest(blocks[n].data, (seed + place) & LAST_SEED)
        for place, n in enumerate(ids.tolist())
    ]


@pytest.mark.usefixtures("way")
def test_ids_may_lie_apart_and_there_may_be_none():
    blocks = np.arange(64, dtype=np.uint8)
    apart = np.arange(8)[::2]
    found = block_hash.hash_blocks(blocks.ctypes.data, apart, 8, 1)
    assert found == block_hash.hash_blocks(blocks.ctypes.data, apart.copy(), 8, 1)
    assert block_hash.hash_blocks(blocks.ctypes.data, apart[:0], 8, 1) == []


def test_xxhash_shows_its_function_here():
    """Where it does not, digests are made by Python, and this says so."""
    assert not COMPILED or block_hash._HASH is not None


@pytest.mark.parametrize("name", ["XXH3_128bits_withSeed", "nothing"])
def test_another_function_is_not_taken_for_it(monkeypatch, name):
    class Library:
        def __init__(self, path):
            self._library = ctypes.PyDLL(path)

        def __getattr__(self, asked):
            return getattr(self._library, name)

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert block_hash._found_hash() is None


@pytest.mark.skipif(not COMPILED, reason="the compiled part is not built")
def test_other_threads_go_on_meanwhile(monkeypatch):
    """In the place of a hash, poll(2) of a pipe that this thread writes to: its arguments are
    alike, it keeps its caller waiting, and it says whether this thread came to write."""
    poll = ctypes.cast(ctypes.CDLL(None).poll, ctypes.c_void_p).value
    monkeypatch.setattr(block_hash, "_HASH", poll)
    monkeypatch.setattr(block_hash, "_SHORT_BYTES_MAX", 0)
    reader, writer = os.pipe()
    try:
        asked = np.frombuffer(bytearray(struct.pack("ihh", reader, select.POLLIN, 0)), np.uint8)
        found = []

        def hash_it():
            ids = np.zeros(1, np.int64)  # as many bytes as descriptors, the seed its milliseconds
            found.extend(block_hash.hash_blocks(asked.ctypes.data, ids, 1, 20_000))

        thread = threading.Thread(target=hash_it)
        thread.start()
        while not found and thread.is_alive():
            os.write(writer, b"!")
            thread.join(0.01)
        thread.join()
        assert found == [1]
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.skipif(not COMPILED, reason="the compiled part is not built")
@pytest.mark.parametrize(
    ("ids", "hashes"),
    [
        (np.zeros(2, np.int64), np.zeros(1, np.uint64)),
        (np.zeros(1, np.int32), np.zeros(1, np.uint64)),
        (np.zeros(2, np.int64), np.zeros(4, np.uint64)[::2]),
        ([0], np.zeros(1, np.uint64)),
    ],
)
def test_what_are_no_even_lists_is_refused(ids, hashes):
    with pytest.raises((TypeError, ValueError, BufferError)):
        block_hash._kv_copy.hash_blocks(block_hash._HASH, 0, 1, 0, ids, hashes, False)
