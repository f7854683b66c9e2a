"""The owners' words and their maps under the address and undefined-behaviour sanitizers."""

from pathlib import Path

import sanitized

import neuron_di_bindings

SOURCE = Path(neuron_di_bindings.__file__).parent / "_owner_words.c"

# Words of exactly the size that may be touched, in the heap; then those of a map.
SCRIPT = """
import gc, os, sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
import numpy as np
from neuron_di_bindings import owner_words

loader = ExtensionFileLoader("_owner_words", sys.argv[1])
library = owner_words._owner_words = module_from_spec(spec_from_loader("_owner_words", loader))
rng = np.random.default_rng(5)

def refused(kinds, function, *arguments):
    try:
        function(*arguments)
    except kinds:
        return
    sys.exit(f"not refused: {function} {arguments}")

def same(found, expected):
    if np.asarray(found).tolist() != np.asarray(expected).tolist():
        sys.exit(f"{found} is not {expected}")

def exercise(table):
    count = len(table)
    words = owner_words.OwnerWords(table)
    for size in [0, 1, count, *rng.integers(0, count + 1, 20).tolist()]:
        ids = rng.permutation(count)[:size]
        before = words.load(ids)
        same(before, table[ids])
        after = owner_words.passed_to(before, 7)
        is_right = rng.random(size) < 0.5
        same(words.swap(ids, before + ~is_right, after), is_right)
        same(table[ids], np.where(is_right, after, before))
    kept = table.tolist()
    for bad in (count, count + 1, -1, -count, 2**63 - 1, -(2**63), 2**60, -(2**60)):
        for ids in ([bad], [0, bad], [bad, 0]):
            ids = np.array(ids, np.int64)
            some = np.zeros(len(ids), np.uint64)
            refused(IndexError, words.load, ids)
            refused(IndexError, words.swap, ids, some, some)
    ids, one, two = np.zeros(1, np.int64), np.zeros(1, np.uint64), np.zeros(2, np.uint64)
    done = np.zeros(1, np.bool_)
    for lists in ((two, one, done), (one, two, done), (one, one, done[:0])):
        refused(ValueError, library.swap, table, ids, *lists)
    refused(ValueError, library.load, table, ids, two)
    refused((TypeError, BufferError), library.load, table, None, one)
    refused((TypeError, BufferError), library.swap, table.tobytes(), ids, one, one, done)
    same(table, kept)

for count in (1, 2, 3, 64, 513):
    exercise(rng.integers(0, 1 << 63, count).astype(np.uint64))
library.load(bytes(15), np.zeros(1, np.int64), np.zeros(1, np.uint64))  # one word and seven bytes
refused(IndexError, library.load, bytes(15), np.ones(1, np.int64), np.zeros(1, np.uint64))

size = 1 << 16
for is_writable in (True, False):
    fd = os.memfd_create("words")
    os.truncate(fd, size)
    view = owner_words.open_map(fd, 4 * size, is_writable=is_writable)  # as long as it may become
    for offset, length in ((0, size), (1, size - 1), (4095, 2), (size - 1, 1), (0, 0), (5, 0)):
        owner_words.populate(view, offset, length)
    for offset, length in ((-1, 1), (0, -1), (4 * size, 1), (1, 4 * size), (2**63 - 1, 2**63 - 1)):
        refused(ValueError, owner_words.populate, view, offset, length)
    try:
        owner_words.populate(view, size, 4096)  # behind the end of the file
    except OSError:  # a kernel before 5.14 does nothing
        pass
    table = np.frombuffer(view, np.uint64, size // 8)
    if is_writable:
        table[:] = rng.integers(0, 1 << 63, len(table))
        exercise(table)
        table[:] = 3
        owner_words.release(fd, 4096, 4096)
        same(table.reshape(-1, 512).any(axis=1), np.arange(16) != 1)
    else:
        owner_words.OwnerWords(table).load(np.arange(len(table)))
        refused((TypeError, BufferError), library.swap, table, *[np.zeros(0, np.int64)] * 4)
    refused(OSError, owner_words.release, fd, -1, 5)
    refused(OSError, owner_words.release, fd, 0, 0)
    os.close(fd)
    del view
    gc.collect()
    table.sum()  # the map is there as long as anybody shows it
    del table
for fd, length in ((-1, 4096), (0, 0), (0, -4096), (os.memfd_create("m"), 2**63 - 1)):
    refused((OSError, ValueError), library.Map, fd, length)
refused(TypeError, library.Map)
refused(OSError, owner_words.release, -1, 0, 4096)
print("whole")
"""


def run(tmp_path, source):
    code = tmp_path / "owner_words.c"
    code.write_text(source)
    return sanitized.run(SCRIPT, sanitized.build(code, tmp_path))


def test_no_word_is_touched_that_there_is_not(tmp_path):
    done = run(tmp_path, SOURCE.read_text())
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-2000:]


def test_one_word_too_many_is_found(tmp_path):
    right, wrong = "id[i] >= num_words", "id[i] > num_words"
    source = SOURCE.read_text()
    assert source.count(right) == 1
    done = run(tmp_path, source.replace(right, wrong))
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "owner_words.c" in done.stderr
