"""What the simulator of libnrt lets a test do to a library in the same process."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

from neuron_di_bindings.nrt import NrtLibrary

_TENSOR, _MODEL, _SET, _TRACKER = 1, 2, 3, 6
_LOOKS_MAX, _LOOK_S = 20_000, 0.001


def until(is_true: Callable[[], object]) -> None:
    """Looks again and again. AssertionError if it never is."""
    pause = threading.Event()
    for _ in range(_LOOKS_MAX):
        if is_true():
            return
        pause.wait(_LOOK_S)
    raise AssertionError("it never came")


@contextlib.contextmanager
def held_up(library: NrtLibrary, function: str) -> Iterator[threading.Event]:
    """The first call of this function waits, before it reaches the library, until the block ends.
    Yields what is set once it has come."""
    plain = library.call
    has_come, may_go = threading.Event(), threading.Event()

    def waiting(name: str, *arguments: Any) -> Any:
        if name == function and not has_come.is_set():
            has_come.set()
            if not may_go.wait(20):  # not an assert: python -O leaves those of this file out
                raise AssertionError("it was held up for too long")
        return plain(name, *arguments)

    with patched_call(library, waiting):
        try:
            yield has_come
        finally:
            may_go.set()


@contextlib.contextmanager
def patched_call(library: NrtLibrary, call: Callable[..., Any]) -> Iterator[None]:
    """Calls go through this within the block."""
    plain = library.call
    library.call = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        library.call = plain  # type: ignore[method-assign]


class Steering:
    """What the simulator lets a test do to the library in the same process."""

    def __init__(self, library: NrtLibrary) -> None:
        self._functions = ctypes.CDLL(library.path)
        for name in ("nrt_sim_calls", "nrt_sim_violations", "nrt_sim_num_live"):
            getattr(self._functions, name).restype = ctypes.c_uint64
        self._functions.nrt_sim_last_violation.restype = ctypes.c_char_p
        self._functions.nrt_sim_calls.argtypes = [ctypes.c_char_p]

    def fault(self, function: str, status: int, times: int = 1) -> None:
        if self._functions.nrt_sim_fault(function.encode(), status, times) != 0:
            raise ValueError(f"no fault of {function}")

    def calls(self, function: str) -> int:
        return int(self._functions.nrt_sim_calls(function.encode()))

    def hold_queues(self, held: bool) -> None:
        self._functions.nrt_sim_hold_queues(held)

    def num_tensors(self) -> int:
        return int(self._functions.nrt_sim_num_live(_TENSOR))

    def num_live(self) -> int:
        """Tensors, models, sets and error trackers."""
        kinds = (_TENSOR, _MODEL, _SET, _TRACKER)
        return sum(int(self._functions.nrt_sim_num_live(kind)) for kind in kinds)

    def forget_violations(self) -> None:
        self._functions.nrt_sim_forget_violations()

    def violation(self) -> str:
        """The last breach of the library's rules, or nothing."""
        if not self._functions.nrt_sim_violations():
            return ""
        return str(self._functions.nrt_sim_last_violation().decode())
