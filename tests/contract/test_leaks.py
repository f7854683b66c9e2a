"""What is left of transfer engines that are closed: nothing."""

import os
import threading
from pathlib import Path

from neuron_di.clock import Deadline

from .transfer_pair import DECODE, PREFILL, WAIT_S, connected_pair


def has_come_down(before, wait_s):
    """A thread that was joined may be there for a moment yet: then `before` counts it."""
    deadline = Deadline.after(wait_s)
    pause = threading.Event()
    while not all(count <= allowed for count, allowed in zip(held(), before, strict=True)):
        if deadline.has_passed():
            return False
        pause.wait(0.01)
    return True


def held():
    """Descriptors, threads, maps of peers' pools of this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        maps.count("neuron-di-kv"),
    )


def test_engines_that_are_closed_leave_no_threads_descriptors_or_maps(kind):
    def live():
        with connected_pair(kind.name) as pair:
            for n in range(4):
                assert pair.move([n], [n]).error() is None
            assert pair.move([0], [0]).error() is None

    live()  # what a library keeps for the process's life
    before = held()
    for _ in range(3):
        live()
    assert has_come_down(before, WAIT_S)


def test_peers_that_come_and_go_leave_nothing(kind):
    with connected_pair(kind.name) as pair:

        def come_and_go():
            pair.decode.disconnect(PREFILL)
            pair.prefill.disconnect(DECODE)
            pair.connect()
            assert pair.move([0], [0]).error() is None

        for _ in range(3):
            come_and_go()
        # A copier that comes back after the next peer has asked for one is kept beside that one's:
        # once, and a leak would show each time.
        for wait_s in (2.0, 2.0, WAIT_S):
            before = held()
            for _ in range(5):
                come_and_go()
            if has_come_down(before, wait_s):
                return
        raise AssertionError(f"{held()} is more than {before}")
