"""Which cores are open for send and receive, and who is in a call of each.

Cores are numbered as their hosts number them ("lnc"). The library never opens a core again whose
close failed, so what would make it fail is found here first. No lock is held during a call of the
library.

So far this has run on a simulator of libnrt only.
"""

import contextlib
import threading
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING

from neuron_di_bindings.nrt.handle import Handle
from neuron_di_bindings.nrt.status import NrtError, NrtMisuse, NrtWorkerError

if TYPE_CHECKING:
    from neuron_di_bindings.nrt.sendrecv import Communicator
    from neuron_di_bindings.nrt.tensor import NrtTensor


class CoreState(Enum):
    """Of one core's send and receive."""

    OPENING = "being opened"
    OPEN = "open"
    CLOSING = "being closed"
    CLOSED = "closed"
    LOST = "lost since its close failed"


class Core:
    """What is known of one core's send and receive, and who is in a call of it."""

    def __init__(self, lnc: int) -> None:
        self.lnc = lnc
        self.state = CoreState.OPENING
        self.communicators: list[Communicator] = []
        self._loss: NrtWorkerError | None = None
        self._registered: dict[int, Handle] = {}
        self._num_calls = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def call(self, function: str) -> Iterator[None]:
        """It isn't closed within the block. NrtMisuse if it isn't open."""
        with self._lock:
            if self.state is not CoreState.OPEN:
                raise NrtMisuse(f"{function}: the send and receive of core {self.lnc} is not open")
            self._num_calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_calls -= 1

    def register(self, tensor: "NrtTensor") -> None:
        """Keep a tensor's memory until the core is closed: the library registers memory with the
        network adapter at its first request, and takes it back at the end only."""
        with self._lock:
            if id(tensor.handle) not in self._registered:
                tensor.handle.hold()
                self._registered[id(tensor.handle)] = tensor.handle

    def begin_close(self) -> bool:
        """Whether the library is to close it now; nothing else begins then. False if it is closed.

        NrtMisuse where closing it would lose it, or somebody else opens or closes it;
        NrtWorkerError if it is lost.
        """
        function = "nrt_async_sendrecv_close"
        with self._lock:
            if self._loss is not None:
                raise self._loss
            if self.state is CoreState.CLOSED:
                return False
            if self.state is not CoreState.OPEN:
                raise NrtMisuse(f"{function}: core {self.lnc} is {self.state.value}")
            waiting = sum(not each.was_connected for each in self.communicators)
            posted = sum(each.num_posted for each in self.communicators)
            if waiting or posted or self._num_calls:
                raise NrtMisuse(
                    f"{function}: core {self.lnc} has {waiting} communicators unconnected, "
                    f"{posted} requests posted, {self._num_calls} calls running"
                )
            self.state = CoreState.CLOSING
            return True

    def end_close(self) -> None:
        """The library has closed it."""
        self.state = CoreState.CLOSED
        while self._registered:
            self._registered.popitem()[1].release()

    def lose(self, error: NrtError) -> NrtWorkerError:
        """The library did not close it: what to raise, now and whenever it is closed again."""
        self._loss = NrtWorkerError(error.function, error.status, error.name)
        self.state = CoreState.LOST
        return self._loss


class Cores:
    """All of one runtime, whoever opened them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_lnc: dict[int, Core] = {}

    def add(self, lnc: int) -> Core:
        """One that is being opened. NrtMisuse if it is known, and not closed."""
        with self._lock:
            known = self._of_lnc.get(lnc)
            if known is not None and known.state is not CoreState.CLOSED:
                raise NrtMisuse(f"the send and receive of core {lnc} is {known.state.value}")
            self._of_lnc[lnc] = Core(lnc)
            return self._of_lnc[lnc]

    def find(self, lnc: int) -> Core | None:
        """None: nobody has tried to open it."""
        return self._of_lnc.get(lnc)

    def objection(self) -> str | None:
        """Why the runtime can't be closed now. A lost core counts, too: its peers may still write
        to memory that the runtime's end frees."""
        states = [
            f"the send and receive of core {each.lnc} is {each.state.value}"
            for each in list(self._of_lnc.values())
            if each.state is not CoreState.CLOSED
        ]
        return ", ".join(states) or None
