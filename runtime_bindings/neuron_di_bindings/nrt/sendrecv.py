"""Tensors' bytes from core to core, between processes and hosts: nrt_async_sendrecv.h.

The library has no way to take back what was posted, none to end one communicator, and it matches
the sends and receives of a communicator in the order in which they were posted. Its rules that
can't be asked for are kept here, before the library is called. Cores are numbered as their hosts
number them ("lnc"), not as the processes see them.

So far this has run on a simulator of libnrt only; the header itself calls these functions
experimental.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from neuron_di_bindings.nrt.cores import Core, CoreState
from neuron_di_bindings.nrt.status import NrtError, NrtMisuse, NrtRetry
from neuron_di_bindings.nrt.tensor import NrtTensor

if TYPE_CHECKING:
    from neuron_di_bindings.nrt.runtime import NrtRuntime

ENABLED_VARIABLE = "NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED"
PORT_VARIABLE = "NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT"


def missing_variables(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What has to be set before the runtime starts, and is not: "VARIABLE=1"."""
    found = []
    if environment.get(ENABLED_VARIABLE) != "1":
        found.append(f"{ENABLED_VARIABLE}=1")
    if not environment.get(PORT_VARIABLE):
        found.append(f"{PORT_VARIABLE}=45645")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Limits:
    """Communicators of a core, and requests that can be pending on one communicator."""

    communicators_max: int
    pending_max: int


class SendReceive:
    """Send and receive of this process's cores. All of one runtime share what is open. Any thread
    may call, and waits for no other core's calls."""

    def __init__(self, runtime: "NrtRuntime") -> None:
        self.runtime = runtime

    def limits(self) -> Limits:
        """Of the loaded library (nrt_async_sendrecv.h:
        nrt_async_sendrecv_get_max_num_communicators_per_lnc,
        nrt_async_sendrecv_get_max_num_pending_request)."""
        names = ("max_num_communicators_per_lnc", "max_num_pending_request")
        numbers = []
        for name in names:
            found = ctypes.c_int()
            self.runtime.call(f"nrt_async_sendrecv_get_{name}", ctypes.byref(found))
            numbers.append(found.value)
        return Limits(*numbers)

    def open(self, lnc: int) -> None:
        """Open a core's send and receive (nrt_async_sendrecv.h: nrt_async_sendrecv_init).

        NrtMisuse if it is open, or was lost in a close. An error tells of what is missing in the
        environment.
        """
        core = self.runtime.cores.add(lnc)
        try:
            self.runtime.call("nrt_async_sendrecv_init", lnc)
        except Exception as error:  # an interrupt leaves it being opened: it may be open
            core.state = CoreState.CLOSED
            if missing := missing_variables():
                error.add_note(f"not set in the environment: {', '.join(missing)}")
            raise
        core.state = CoreState.OPEN

    def close(self, lnc: int) -> None:
        """Close a core's send and receive: its communicators and requests end
        (nrt_async_sendrecv.h: nrt_async_sendrecv_close). A core that isn't open stays so.

        NrtMisuse, and nothing has happened, while a communicator isn't connected, a request was not
        seen to be over, or another thread is in a call of it: the library would fail, and never
        open the core again. NrtWorkerError if it fails nevertheless, and ever after: then only the
        process's end is left.
        """
        core = self.runtime.cores.find(lnc)
        if core is None or not core.begin_close():
            return
        try:
            self.runtime.call("nrt_async_sendrecv_close", lnc)
        except NrtError as error:
            raise core.lose(error) from error
        core.end_close()

    def connect(self, peer_ip: str, peer_lnc: int, lnc: int) -> "Communicator":
        """Begin to connect, for sending. The peer accepts with our address and core
        (nrt_async_sendrecv.h: nrt_async_sendrecv_connect). Of the core's communicators, which end
        with `close` only, it takes one: NrtRequestError RESOURCE when there are none left."""
        return self._begin("send", "nrt_async_sendrecv_connect", peer_ip, peer_lnc, lnc)

    def accept(self, peer_ip: str, peer_lnc: int, lnc: int) -> "Communicator":
        """Begin to be connected to, for receiving; as `connect` (nrt_async_sendrecv.h:
        nrt_async_sendrecv_accept)."""
        return self._begin("receive", "nrt_async_sendrecv_accept", peer_ip, peer_lnc, lnc)

    def flush(self, lnc: int) -> None:
        """What was received, and tested to be, is in memory when this returns
        (nrt_async_sendrecv.h: nrt_async_sendrecv_flush)."""
        name = "nrt_async_sendrecv_flush"
        with self._core(lnc, name).call(name):
            self.runtime.call(name, lnc)

    def _begin(
        self,
        direction: Literal["send", "receive"],
        function: str,
        peer_ip: str,
        peer_lnc: int,
        lnc: int,
    ) -> "Communicator":
        core = self._core(lnc, function)
        found = ctypes.c_void_p()
        with core.call(function):
            self.runtime.call(function, peer_ip, peer_lnc, lnc, ctypes.byref(found))
            label = (direction, peer_ip, peer_lnc)
            communicator = Communicator(self.runtime, core, found.value or 0, *label)
            core.communicators.append(communicator)
        return communicator

    def _core(self, lnc: int, function: str) -> Core:
        core = self.runtime.cores.find(lnc)
        if core is None:
            raise NrtMisuse(f"{function}: the send and receive of core {lnc} is not open")
        return core


class Communicator:
    """A pair of cores, in one direction. Ends with its core's close only. Any thread may call."""

    def __init__(
        self,
        runtime: "NrtRuntime",
        core: Core,
        pointer: int,
        direction: Literal["send", "receive"],
        peer_ip: str,
        peer_lnc: int,
    ) -> None:
        self.direction: Literal["send", "receive"] = direction
        self.peer_ip = peer_ip
        self.peer_lnc = peer_lnc
        self.lnc = core.lnc
        self._runtime = runtime
        self._core = core
        self._pointer = pointer
        self._asking = threading.Lock()
        self._is_connected = False
        self._counting = threading.Lock()  # never during a call: tests of requests count, too
        self._num_posted = 0

    @property
    def was_connected(self) -> bool:
        """Whether `is_connected` ever said so. Asks nobody."""
        return self._is_connected

    @property
    def num_posted(self) -> int:
        """Requests that were not seen to be over."""
        return self._num_posted

    def is_connected(self) -> bool:
        """Whether the peer is there (nrt_async_sendrecv.h: nrt_async_sendrecv_test_comm). NrtRetry
        TIMEOUT when it has been waited for longer than the library does."""
        name = "nrt_async_sendrecv_test_comm"
        with self._core.call(name), self._asking:
            if not self._is_connected:
                found = ctypes.c_bool()
                self._runtime.call(name, self._pointer, ctypes.byref(found))
                self._is_connected = found.value
            return self._is_connected

    def send(self, tensor: NrtTensor, offset: int, num_bytes: int) -> "NrtRequest":
        """Post a send of these bytes; the tensor's memory stays until the core is closed
        (nrt_async_sendrecv.h: nrt_async_sendrecv_send_tensor). NrtRetry RESOURCE when too many are
        pending."""
        return self._post("send", "nrt_async_sendrecv_send_tensor", tensor, offset, num_bytes)

    def receive(self, tensor: NrtTensor, offset: int, num_bytes: int) -> "NrtRequest":
        """Post a receive of so many bytes to here, as `send`. They may be read after a flush
        (nrt_async_sendrecv.h: nrt_async_sendrecv_recv_tensor)."""
        return self._post("receive", "nrt_async_sendrecv_recv_tensor", tensor, offset, num_bytes)

    def _post(
        self, direction: str, function: str, tensor: NrtTensor, offset: int, num_bytes: int
    ) -> "NrtRequest":
        tensor.check(offset, num_bytes)
        with self._core.call(function):
            if self.direction != direction:
                raise NrtMisuse(f"{function} on a communicator that is there to {self.direction}")
            if not self._is_connected:
                raise NrtMisuse(f"{function} before the communicator was seen to be connected")
            self._core.register(tensor)
            found = ctypes.c_void_p()
            with tensor.handle.use() as pointer:
                arguments = (pointer, offset, num_bytes, self._pointer, ctypes.byref(found))
                self._count(1)
                try:
                    self._runtime.call(function, *arguments)
                except Exception:  # not for an interrupt: it may be posted
                    self._count(-1)
                    raise
        return NrtRequest(self._runtime, found.value or 0, lambda: self._count(-1), self._core)

    def _count(self, change: int) -> None:
        with self._counting:
            self._num_posted += change


class NrtRequest:
    """A posted send or receive. It can't be taken back, and has to be tested until it is over."""

    def __init__(
        self, runtime: "NrtRuntime", pointer: int, over: Callable[[], None], core: Core
    ) -> None:
        self._runtime = runtime
        self._pointer = pointer
        self._over = over
        self._core = core
        self._testing = threading.Lock()
        self._end: str | None = None

    def test(self) -> int | None:
        """The bytes that went, once it is over; None before (nrt_async_sendrecv.h:
        nrt_async_sendrecv_test_request).

        NrtMisuse while another thread tests it, and ever after it was over or failed. After
        NrtRetry, as of a TIMEOUT, it is still posted, and may be tested again.
        """
        name = "nrt_async_sendrecv_test_request"
        if not self._testing.acquire(blocking=False):
            raise NrtMisuse(f"{name}: another thread tests the same request")
        try:
            with self._core.call(name):
                return self._test(name)
        finally:
            self._testing.release()

    def _test(self, name: str) -> int | None:
        if self._end is not None:
            raise NrtMisuse(f"{name}: the request {self._end} before")
        done, size = ctypes.c_bool(), ctypes.c_size_t()
        try:
            self._runtime.call(name, self._pointer, ctypes.byref(done), ctypes.byref(size))
        except NrtRetry:
            raise
        except NrtError:
            self._ends("failed")
            raise
        if not done.value:
            return None
        self._ends("was over")
        return size.value

    def _ends(self, how: str) -> None:
        self._end = how
        self._over()
