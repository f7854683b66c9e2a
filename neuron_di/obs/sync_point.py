"""Named places where a test may hold a process, to break it exactly there. Off unless asked for.

The variable SYNC_POINT_NEURON_DI names a folder. A test arms a place by a fifo of its name in
there, opened for reading, with a second one beside it, `<name>.go`. Whoever reaches the place
writes its pid into the first and stops until it can read a byte, or the end, of the second:
a test that dies lets go. Which of several arrivals is held is up to the test.

    queued         a leg was accepted, the engine has not got it yet
    prefilling     a chunk of a prompt is about to be computed
    parked         prefill: the KV is complete, decode is about to be told
    transferring   decode: blocks are about to be copied
    decoding       decode: about to compute a step with three tokens or more generated
    finishing      decode: the answer is complete, the proxy has not heard
"""

import os

VARIABLE = "SYNC_POINT_NEURON_DI"

_folder = os.environ.get(VARIABLE)


def reach(name: str) -> None:
    """Block the calling thread if a test holds this place; otherwise return at once."""
    if _folder is not None:
        _stop(os.path.join(_folder, name))


def is_watched() -> bool:
    """True when a test may hold this process: for places that are costly to tell."""
    return _folder is not None


def _stop(fifo: str) -> None:
    try:
        # Without waiting: a fifo that nobody reads holds nobody.
        arrived = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return  # not armed
    try:
        go = os.open(fifo + ".go", os.O_RDONLY | os.O_NONBLOCK)  # a test may have died by now
        try:
            os.set_blocking(go, True)
            os.write(arrived, b"%d\n" % os.getpid())
            os.read(go, 1)
        finally:
            os.close(go)
    except OSError:
        pass  # disarmed in between
    finally:
        os.close(arrived)
