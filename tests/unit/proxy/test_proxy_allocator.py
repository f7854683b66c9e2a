"""What the proxy has its libc do with freed memory: in a process of its own, as it is for good."""

import subprocess
import sys
import textwrap

import pytest

from neuron_di_proxy import allocator
from neuron_di_proxy.allocator import KEPT_BYTES_MAX, Allocator

needs_glibc = pytest.mark.skipif(allocator._glibc() is None, reason="this libc is not glibc")


def seen_by(script):
    """What a fresh process prints, in MiB."""
    source = textwrap.dedent(
        """
        import resource
        from neuron_di_proxy.allocator import KEPT_BYTES_MAX, Allocator, _num_resident_bytes
        LONG = 400_000
        allocator = Allocator()
        def resident(): return _num_resident_bytes() >> 20
        def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        """
    ) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, check=True, timeout=60
    )
    return [int(each) for each in done.stdout.split()]


@needs_glibc
def test_bodies_take_the_memory_of_those_before():
    (num_faults,) = seen_by(
        """
        allocator.keep_freed()
        def crowd(): [b"a" * LONG for _ in range(16)]
        crowd()
        before = faults()
        for _ in range(20): crowd()
        print(faults() - before)
        """
    )
    assert num_faults < 1000  # of 31250 pages


@needs_glibc
def test_what_a_crowd_left_is_given_back_once():
    before, during, after, *was_given = seen_by(
        """
        allocator.keep_freed()
        print(resident())
        bodies = [b"a" * LONG for _ in range(600)]
        in_use = allocator.give_back()
        tail = [b"b" * 700 for _ in range(600)]  # so that the heap's end is not free
        bodies.clear()
        print(resident())
        was_given = allocator.give_back()
        print(resident(), int(in_use), int(was_given), int(allocator.give_back()))
        """
    )
    kept = KEPT_BYTES_MAX >> 20
    assert during - before > 2 * kept
    assert after - before < kept / 2
    assert was_given == [0, 1, 0]  # in use, free, given back


def test_another_libc_is_left_alone(monkeypatch):
    monkeypatch.setattr(allocator, "_glibc", lambda: None)
    other = Allocator()
    assert not other.keep_freed()
    assert not other.give_back()


@needs_glibc
def test_without_a_free_descriptor_nothing_is_given_back(monkeypatch):
    def fail():
        raise OSError(24, "too many open files")

    made = Allocator()
    monkeypatch.setattr(allocator, "_num_resident_bytes", fail)
    assert not made.give_back()
