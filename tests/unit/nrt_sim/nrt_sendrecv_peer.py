"""A process that calls the simulator of libnrt by plain ctypes, and the test's end of it.

Run as a program this file is the process: it reads one JSON list `[method, *arguments]` per line
and answers with one JSON value per line. `Peer` starts it and calls its methods: `peer.flush(0)`.
Things made by a call keep the name the test gives them: tensors "t", communicators "c", requests
"r". Each method that makes one libnrt call returns its status, or a list that begins with it.
"""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUCCESS, FAILURE, INVALID, INVALID_HANDLE, RESOURCE, TIMEOUT = range(6)
UNINITIALIZED, CLOSED, DMA_ABORT, NETWORK_PROXY_FAILURE = 13, 14, 1203, 1206
WAIT_S = 60.0
TENSOR, COMMUNICATOR, REQUEST = 1, 4, 5  # what nrt_sim_num_live counts
PREFIX = "nrt_async_sendrecv_"


def must(*statuses: int) -> None:
    """All are SUCCESS; no assert, which `python -O` drops in a file that is no test."""
    if any(statuses):
        raise AssertionError(f"a call failed: {statuses}")


class Process:
    """The calls, inside the process. Sizes are bytes; contents are hexadecimal text."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        for name in ("nrt_sim_violations", "nrt_sim_calls", "nrt_sim_bytes_sent"):
            getattr(self.library, name).restype = ctypes.c_uint64
        self.library.nrt_sim_num_live.restype = ctypes.c_uint64
        self.library.nrt_sim_last_violation.restype = ctypes.c_char_p
        self.handles: dict[str, ctypes.c_void_p] = {}

    def _make(self, function: str, name: str, *arguments: Any) -> int:
        handle = ctypes.c_void_p()
        status: int = getattr(self.library, function)(*arguments, ctypes.byref(handle))
        if status == SUCCESS:
            self.handles[name] = handle
        return status

    def open(self) -> int:
        return self.library.nrt_init(1, b"", b"")

    def close(self) -> None:
        self.library.nrt_close()

    def allocate(self, name: str, size: int, vnc: int = 0, placement: int = 0) -> int:
        text = name.encode()
        size_t = ctypes.c_size_t(size)
        status = self._make("nrt_tensor_allocate", name, placement, vnc, size_t, text)
        return status or self.write(name, 0, bytes(size).hex())

    def slice(self, parent: str, offset: int, size: int, name: str) -> int:
        function, range_ = "nrt_tensor_allocate_slice", (ctypes.c_size_t(offset), size)
        return self._make(function, name, self.handles[parent], *range_, name.encode())

    def free(self, name: str) -> None:
        self.library.nrt_tensor_free(ctypes.byref(self.handles[name]))

    def write(self, name: str, offset: int, contents: str) -> int:
        buffer = bytes.fromhex(contents)
        sizes = ctypes.c_size_t(offset), ctypes.c_size_t(len(buffer))
        return self.library.nrt_tensor_write(self.handles[name], buffer, *sizes)

    def read(self, name: str, offset: int, size: int) -> str:
        buffer = ctypes.create_string_buffer(size)
        sizes = ctypes.c_size_t(offset), ctypes.c_size_t(size)
        status = self.library.nrt_tensor_read(self.handles[name], buffer, *sizes)
        must(status)
        return buffer.raw.hex()

    def limits(self) -> list[int]:
        communicators, pending = ctypes.c_int(), ctypes.c_int()
        statuses = [
            getattr(self.library, PREFIX + name)(ctypes.byref(place))
            for name, place in (
                ("get_max_num_communicators_per_lnc", communicators),
                ("get_max_num_pending_request", pending),
            )
        ]
        return [*statuses, communicators.value, pending.value]

    def open_lnc(self, lnc: int) -> int:
        return self.library.nrt_async_sendrecv_init(lnc)

    def close_lnc(self, lnc: int) -> int:
        return self.library.nrt_async_sendrecv_close(lnc)

    def flush(self, lnc: int) -> int:
        return self.library.nrt_async_sendrecv_flush(lnc)

    def connect(self, name: str, peer_ip: str, peer_lnc: int, lnc: int) -> int:
        return self._make(PREFIX + "connect", name, peer_ip.encode(), peer_lnc, lnc)

    def accept(self, name: str, peer_ip: str, peer_lnc: int, lnc: int) -> int:
        return self._make(PREFIX + "accept", name, peer_ip.encode(), peer_lnc, lnc)

    def _post(self, function: str, name: str, range_: tuple[Any, ...], communicator: str) -> int:
        tensor, offset, size = range_
        sizes = ctypes.c_size_t(offset), ctypes.c_size_t(size)
        handles = self.handles[tensor], self.handles[communicator]
        return self._make(PREFIX + function, name, handles[0], *sizes, handles[1])

    def send(self, name: str, tensor: str, offset: int, size: int, communicator: str) -> int:
        return self._post("send_tensor", name, (tensor, offset, size), communicator)

    def receive(self, name: str, tensor: str, offset: int, size: int, communicator: str) -> int:
        return self._post("recv_tensor", name, (tensor, offset, size), communicator)

    def test_communicator(self, name: str) -> list[int]:
        done = ctypes.c_bool()
        function = self.library.nrt_async_sendrecv_test_comm
        return [function(self.handles[name], ctypes.byref(done)), int(done.value)]

    def test(self, name: str) -> list[int]:
        done, size = ctypes.c_bool(), ctypes.c_size_t()
        function = self.library.nrt_async_sendrecv_test_request
        status = function(self.handles[name], ctypes.byref(done), ctypes.byref(size))
        return [status, int(done.value), size.value]

    def wait_connected(self, *names: str) -> int:
        """The first status that is no SUCCESS, or SUCCESS when all of them are connected."""
        for name in names:
            status, done = self.test_communicator(name)
            deadline = time.monotonic() + WAIT_S
            while not done and status == SUCCESS and time.monotonic() < deadline:
                time.sleep(0.001)
                status, done = self.test_communicator(name)
            if not done:
                return status or TIMEOUT
        return SUCCESS

    def wait(self, *names: str) -> list[list[int]]:
        """Results of `test` for all of them, each done."""
        results: dict[str, list[int]] = {}
        deadline = time.monotonic() + WAIT_S
        while len(results) < len(names) and time.monotonic() < deadline:
            for name in names:
                if name not in results:
                    found = self.test(name)
                    if found[0] != SUCCESS or found[1]:
                        results[name] = found
            time.sleep(0.0002)
        return [results.get(name, [TIMEOUT, 0, 0]) for name in names]

    def move_by_threads(self, method: str, num_threads: int, count: int, size: int) -> int:
        """Each thread moves `count` messages of tensor "t" over "c"; the number that got done."""
        num_done = []

        def move(first: int) -> None:
            for i in range(first, first + count):
                name = f"{method} {i}"
                while getattr(self, method)(name, "t", i * size, size, "c") == RESOURCE:
                    time.sleep(0.001)
                num_done.append(self.wait(name) == [[SUCCESS, 1, size]])

        threads = [threading.Thread(target=move, args=(i * count,)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(num_done)

    def test_twice_at_once(self, name: str) -> list[list[int]]:
        """Two threads test one request: the one that began first is inside of the call."""
        point = b"sendrecv.test_request"
        before = self.library.nrt_sim_calls(point)
        self.library.nrt_sim_delay(point, ctypes.c_uint64(1_000_000), 1)
        results: list[list[int]] = []
        first = threading.Thread(target=lambda: results.append(self.test(name)))
        first.start()
        while self.library.nrt_sim_calls(point) == before:
            time.sleep(0.001)
        second = self.test(name)
        first.join()
        return [results[0], second]

    def calls_with_null(self) -> list[int]:
        """Statuses of calls without a place for the result, then of those without a handle."""
        get = self.library.nrt_async_sendrecv_get_max_num_communicators_per_lnc
        get_pending = self.library.nrt_async_sendrecv_get_max_num_pending_request
        connect = self.library.nrt_async_sendrecv_connect
        test, done = self.library.nrt_async_sendrecv_test_request, ctypes.byref(ctypes.c_bool())
        send, size = self.library.nrt_async_sendrecv_send_tensor, ctypes.c_size_t(1)
        made = ctypes.byref(ctypes.c_void_p())
        return [
            get(None),
            get_pending(None),
            connect(b"127.0.0.1", 1, 0, None),
            connect(None, 1, 0, made),
            test(None, None, ctypes.byref(size)),
            test(None, done, None),
            send(self.handles["t"], size, size, self.handles["c"], None),
            test(None, done, ctypes.byref(size)),
            self.library.nrt_async_sendrecv_test_comm(None, done),
            send(None, size, size, self.handles["c"], made),
            send(self.handles["t"], size, size, None, made),
        ]

    def fault(self, function: str, status: int, times: int = 1) -> int:
        return self.library.nrt_sim_fault(function.encode(), status, times)

    def schedule(self, text: str) -> int:
        return self.library.nrt_sim_schedule(text.encode())

    def num_calls(self, function: str) -> int:
        return self.library.nrt_sim_calls(function.encode())

    def violations(self) -> list[Any]:
        return [self.library.nrt_sim_violations(), self.library.nrt_sim_last_violation().decode()]

    def num_live(self, kind: int) -> int:
        return self.library.nrt_sim_num_live(kind)

    def bytes_sent(self, lnc: int) -> int:
        return self.library.nrt_sim_bytes_sent(lnc)


class Peer:
    """A running process. Its methods are those of `Process`, each within a deadline."""

    def __init__(self, library: Path, root: Path, cores: str, **environment: str) -> None:
        variables = {
            "NRT_SIM_ROOT": str(root),
            "NEURON_RT_VISIBLE_CORES": cores,
            "NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED": "1",
            "NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT": "45645",
            "NRT_SIM_CONNECT_DELAY_MS": "0",
            "PYTHONMALLOC": "malloc",
        }
        plain = {name: value for name, value in os.environ.items() if not name.startswith("N")}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(library)],
            env={**plain, **variables, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if environment.get("KEEP_STDERR") else None,
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.process.stdout, selectors.EVENT_READ)

    def ask(self, method: str, *arguments: Any) -> None:
        """Starts a call; `answer()` gives what it returns."""
        self.process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        if not self._selector.select(WAIT_S):
            raise TimeoutError("the process does not answer")
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the process ended with {self.process.wait(WAIT_S)}")
        return json.loads(line)

    def __getattr__(self, method: str) -> Any:
        if not hasattr(Process, method):
            raise AttributeError(method)

        def call(*arguments: Any) -> Any:
            self.ask(method, *arguments)
            return self.answer()

        return call

    def write_bytes(self, tensor: str, offset: int, contents: bytes) -> None:
        must(self.write(tensor, offset, contents.hex()))

    def read_bytes(self, tensor: str, offset: int, size: int) -> bytes:
        return bytes.fromhex(self.read(tensor, offset, size))

    def kill(self) -> None:
        """Ends it as by a crash, and waits until it is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)

    def end(self) -> int:
        """Ends it in good order; its exit code."""
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self._selector.close()
        return self.process.returncode


class Peers:
    """Starts processes of one shared root; `all` are ended by the fixture that made this."""

    def __init__(self, library: Path, root: Path, **environment: str) -> None:
        self.library, self.root, self.environment = library, root, environment
        self.all: list[Peer] = []

    def start(self, cores: str = "0", *, lncs: tuple[int, ...] = (), **environment: str) -> Peer:
        """A process; with `lncs` the runtime is open, and send/receive of each of them."""
        peer = Peer(self.library, self.root, cores, **self.environment, **environment)
        self.all.append(peer)
        if lncs:
            must(peer.open(), *(peer.open_lnc(lnc) for lnc in lncs))
        return peer

    def pair(self, **environment: str) -> tuple[Peer, Peer]:
        """A sender on lnc 0, a receiver on lnc 1, connected by "c", with 64 KiB in "t" each."""
        sender = self.start("0", lncs=(0,), **environment)
        receiver = self.start("1", lncs=(1,), **environment)
        for peer in (sender, receiver):
            must(peer.allocate("t", 1 << 16))
        join(sender, 0, receiver, 1)
        return sender, receiver


def join(sender: Peer, lnc: int, receiver: Peer, peer_lnc: int, name: str = "c") -> None:
    """Connects the two, both on the default host."""
    must(sender.connect(name, "127.0.0.1", peer_lnc, lnc))
    must(receiver.accept(name, "127.0.0.1", lnc, peer_lnc))
    must(sender.wait_connected(name), receiver.wait_connected(name))


def stop_thread(sender: Peer, receiver: Peer) -> None:
    """The sender's service thread sleeps for a while, a message "stopped" of 1 byte is begun."""
    must(sender.schedule("function=sendrecv.send delay_us=1000000"))
    before = sender.num_calls("sendrecv.send")
    must(receiver.receive("stopped", "t", 0, 1, "c"), sender.send("stopped", "t", 0, 1, "c"))
    while sender.num_calls("sendrecv.send") == before:
        time.sleep(0.001)


def wait_for_guests(peer: Peer, count: int) -> None:
    """Until so many senders have said hello to a core of this process, since it began."""
    deadline = time.monotonic() + WAIT_S
    while peer.num_calls("sendrecv.guest") < count:
        if time.monotonic() > deadline:
            raise TimeoutError("nobody said hello")
        time.sleep(0.002)


def stop_thread_by_guest(peer: Peer, lnc: int, guest: Peer) -> None:
    """The service thread sleeps for a while: it greets a sender on lnc 9, a new process's."""
    before = peer.num_calls("sendrecv.guest")
    must(peer.schedule("function=sendrecv.guest delay_us=1000000"))
    must(guest.connect("unwanted", "127.0.0.1", lnc, 9))
    wait_for_guests(peer, before + 1)


def exchange(sender: Peer, receiver: Peer, size: int, communicator: str = "c") -> None:
    """One message from tensor "t" to tensor "t", to its end and flush on lnc 1."""
    must(sender.send("exchanged", "t", 0, size, communicator))
    must(receiver.receive("exchanged", "t", 0, size, communicator))
    for peer in (receiver, sender):
        result = peer.wait("exchanged")
        if result != [[SUCCESS, 1, size]]:
            raise AssertionError(f"{size} bytes did not arrive: {result}")


@contextmanager
def all_ended(peers: Peers) -> Iterator[Peers]:
    try:
        yield peers
    finally:
        for peer in peers.all:
            peer.end()


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in most programs: a broken pipe ends it
    process = Process(sys.argv[1])
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(process, method)(*arguments)) + "\n")
        sys.stdout.flush()
    os._exit(0)  # no nrt_close: a test says what it wants


if __name__ == "__main__":
    main()
