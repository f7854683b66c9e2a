"""What torch-neuronx of some SDKs registers in torch, undocumented: a transfer engine over libnrt.

    torch.classes.neuron.Runtime, CompletionToken, NeuronTransferEngine
    torch.ops.neuron._nrt_async_init_neuron, _nrt_create_send_communicator,
                     _nrt_create_recv_communicator, _nrt_test_communicator
    torch.zeros(…, device="privateuseone:0"), which is documented

Their names and arguments are known from an open-source caller only, what they do inside is a guess.
Here it is what a caller can rely on least. Each engine has one thread, which posts what was queued
and waits for all of it before it looks at the next, or, if it is eager, posts whatever there is at
once. What is posted beyond the runtime's limit fails the transfer. Nothing is flushed. In plain
Python, so `isinstance` with torch's own finds nothing.

What STAND_IN_CLOSED_CLASSES is when a process starts:

    0, or not set   state tensors give a handle, and there are no such classes
    1               there are, once torch_neuronx was imported, and no handles, as on real SDKs
    2.24            the same, with the arguments that the first SDK to have them takes
    eager           as 1, and engines are eager
    none            neither
"""

import atexit
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from neuron_di_bindings.nrt import (
    Communicator,
    NrtError,
    NrtMisuse,
    NrtRequest,
    NrtRetry,
    NrtRuntime,
    NrtStatus,
    SendReceive,
)
from stand_in import cores
from stand_in.device_tensor import VARIABLE, DeviceTensor

_POLL_S = 0.0005
_FIRST_FORM, _EAGER = "2.24", "eager"
_kept = contextlib.ExitStack()  # what install() did lasts


def install() -> None:
    """Into torch, until the process ends, where the environment asks for it."""
    wanted = os.environ.get(VARIABLE, "0")
    if wanted not in ("1", _FIRST_FORM, _EAGER):
        return
    closed = ClosedNeuron(cores.runtime, wanted)
    _kept.enter_context(closed.installed())
    atexit.register(closed.close)  # before the runtime is closed, which was registered earlier


class CompletionToken:
    """Done when all bytes of one transfer have gone, or have come."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def is_done(self) -> bool:
        """RuntimeError when the transfer failed: what the closed one does then nobody says."""
        if self._error is not None:
            raise RuntimeError(f"the transfer failed: {self._error}") from self._error
        return self._done.is_set()

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()


class _Names:
    """A namespace of torch's. Compared by identity, as that is."""

    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)


class _Transfer:
    """The arguments of one queue_transfer_with_token that matter here."""

    def __init__(
        self, runs: list[tuple[DeviceTensor, int, int, Communicator]], token: CompletionToken
    ) -> None:
        self.runs = runs
        self.token = token


class ClosedNeuron:
    """All of it, on one runtime. `installed()` puts it into torch; `close()` ends its threads."""

    def __init__(self, runtime: Callable[[], NrtRuntime], kind: str = "1") -> None:
        """`kind` is what the environment's variable would say."""
        self._runtime = runtime
        self._is_first_form = kind == _FIRST_FORM
        self._is_eager = kind == _EAGER
        self._communicators: list[Communicator] = []
        self._lncs: list[int] = []
        self._engines: list[NeuronTransferEngine] = []
        self.classes = _Names(
            Runtime=lambda: _Names(get_visible_nc_count=runtime().visible_cores),
            CompletionToken=CompletionToken,
            NeuronTransferEngine=self._engine,
        )
        self.ops = _Names(
            _nrt_async_init_neuron=self._open,
            _nrt_create_send_communicator=self._connect,
            _nrt_create_recv_communicator=self._accept,
            _nrt_test_communicator=self._test,
        )

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """torch.classes.neuron, torch.ops.neuron and torch.zeros on a device, in the block."""
        classes = mock.patch.object(torch.classes, "neuron", self.classes, create=True)
        operators = mock.patch.object(torch.ops, "neuron", self.ops, create=True)
        with classes, operators, mock.patch.object(torch, "zeros", self._zeros_of(torch.zeros)):
            yield

    def close(self) -> None:
        """At the end of the process. A core on which something is posted for good stays open."""
        for engine in self._engines:
            engine.close()
        lncs, self._lncs = self._lncs, []
        for lnc in lncs:
            with contextlib.suppress(NrtError, NrtMisuse):
                self._send_receive.close(lnc)

    @property
    def _send_receive(self) -> SendReceive:
        return SendReceive(self._runtime())

    def _zeros_of(self, of_torch: Callable[..., Any]) -> Callable[..., Any]:
        def zeros(*size: Any, device: Any = None, **options: Any) -> Any:
            if device is None or torch.device(device).type != "privateuseone":
                return of_torch(*size, device=device, **options)
            shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
            dtype = options.get("dtype") or torch.get_default_dtype()
            core = torch.device(device).index or 0
            memory = self._runtime().allocate(shape.numel() * dtype.itemsize, core, "zeros")
            memory.fill(0)
            return DeviceTensor(memory, shape, dtype)  # given back with the runtime

        return zeros

    def _engine(self, batch_size: int, remote_ip: str, is_sender: bool, *rest: Any) -> Any:
        """What else it takes is (nc_offset), or in the first form (True, nc_offset)."""
        kinds = (bool, int) if self._is_first_form else (int,)
        if tuple(map(type, rest)) != kinds or type(is_sender) is not bool:
            raise RuntimeError(f"__init__() takes {kinds} behind is_sender, not {rest}")
        made = FirstEngine if self._is_first_form else NeuronTransferEngine
        engine = made(self._communicators, batch_size, is_sender, rest[-1], self._is_eager)
        self._engines.append(engine)
        return engine

    def _open(self, lnc: int) -> None:
        self._send_receive.open(lnc)
        self._lncs.append(lnc)

    def _connect(self, remote_ip: str, peer_lnc: int, lnc: int) -> int:
        return self._numbered(self._send_receive.connect(remote_ip, peer_lnc, lnc))

    def _accept(self, remote_ip: str, peer_lnc: int, lnc: int) -> int:
        return self._numbered(self._send_receive.accept(remote_ip, peer_lnc, lnc))

    def _numbered(self, communicator: Communicator) -> int:
        self._communicators.append(communicator)
        return len(self._communicators) - 1

    def _test(self, number: int) -> bool:
        try:
            return self._communicators[number].is_connected()
        except NrtRetry:
            return False


class NeuronTransferEngine:
    """Transfers of one direction, one after the other, on a thread of its own."""

    def __init__(
        self,
        communicators: Sequence[Communicator],
        batch_size: int,
        is_sender: bool,
        nc_offset: int,
        is_eager: bool,
    ) -> None:
        self._communicators = communicators
        self._batch_size = batch_size
        self._is_sender = is_sender
        self._nc_offset = nc_offset
        self._peer_offset: int | None = None
        self._transfers: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        run = self._run_eagerly if is_eager else self._run
        self._thread = threading.Thread(target=run, name="closed transfer engine", daemon=True)
        self._thread.start()

    def queue_transfer_with_token(
        self,
        tensors: list[DeviceTensor],
        offsets: list[int],
        lengths: list[int],
        peer_devices: list[int],
        local_devices: list[int],
        comm_ids: list[int],
        completion_count: int,
        completion_token: CompletionToken,
        use_queue: bool,
        completion_time_out: int,
    ) -> None:
        """Queue these bytes of whole state tensors; returns at once. Offsets, lengths: bytes.

        RuntimeError where numbers of devices and communicators do not fit each other.
        """
        if completion_count:
            raise NotImplementedError("the stand-in sends no layers while they are computed")
        lists = (tensors, offsets, lengths, peer_devices, local_devices, comm_ids)
        if any(type(each) is not list or len(each) != len(tensors) for each in lists):
            raise RuntimeError("six lists of one length are wanted")
        communicators = [self._communicators[number] for number in comm_ids]
        rows = zip(tensors, local_devices, peer_devices, communicators, strict=True)
        for tensor, local, peer, communicator in rows:
            if tensor.device.index != local:
                raise RuntimeError(f"a tensor of core {tensor.device.index}, not {local}")
            if communicator.lnc != local + self._nc_offset:
                raise RuntimeError(f"a communicator of core {communicator.lnc}, not of {local}")
            peer_offset = communicator.peer_lnc - peer
            if peer < 0 or self._peer_offset not in (None, peer_offset):
                raise RuntimeError(f"device {peer} of the peer is not core {communicator.peer_lnc}")
            self._peer_offset = peer_offset
        runs = list(zip(tensors, offsets, lengths, communicators, strict=True))
        self._transfers.put(_Transfer(runs, completion_token))

    def close(self) -> None:
        """End the thread. A transfer that is not through fails."""
        self._closing.set()
        self._transfers.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (transfer := self._transfers.get()) is not None:
            try:
                self._move(transfer)
            except (NrtError, NrtMisuse, ValueError, TimeoutError) as error:
                transfer.token.end(error)
            else:
                transfer.token.end()

    def _run_eagerly(self) -> None:
        moving: list[tuple[_Transfer, list[NrtRequest]]] = []
        while not self._closing.is_set():
            for transfer, requests in moving:
                self._guarded(transfer, requests, [])
            moving = [each for each in moving if each[1]]
            with contextlib.suppress(queue.Empty):
                new = self._transfers.get(timeout=_POLL_S if moving else None)
                if new is not None:
                    moving.append((new, []))
                    self._guarded(*moving[-1], new.runs)
                    moving = [each for each in moving if each[1]]

    def _guarded(
        self,
        transfer: _Transfer,
        requests: list[NrtRequest],
        runs: list[tuple[DeviceTensor, int, int, Communicator]],
    ) -> None:
        """Post these, and look which requests are over. Its token's end is the end of the last."""
        try:
            requests += [self._post(*run) for run in runs]
            requests[:] = [request for request in requests if not _is_over(request)]
        except (NrtError, NrtMisuse, ValueError) as error:
            requests.clear()
            transfer.token.end(error)
        else:
            if not requests:
                transfer.token.end()

    def _move(self, transfer: _Transfer) -> None:
        runs = transfer.runs
        for first in range(0, len(runs), self._batch_size):
            batch = runs[first : first + self._batch_size]
            pending = [self._post(*run) for run in batch]
            while pending := self._still_pending(pending):
                pass

    def _post(
        self, tensor: DeviceTensor, offset: int, length: int, communicator: Communicator
    ) -> NrtRequest:
        post = communicator.send if self._is_sender else communicator.receive
        return post(tensor.allocation, offset, length)

    def _still_pending(self, posted: list[NrtRequest]) -> list[NrtRequest]:
        left = [request for request in posted if not _is_over(request)]
        if self._closing.is_set():
            raise TimeoutError("the engine ends")
        if len(left) == len(posted):
            self._closing.wait(_POLL_S)
        return left


class FirstEngine(NeuronTransferEngine):
    """With the arguments of the first SDK that had it."""

    def queue_transfer_with_token(  # type: ignore[override]
        self,
        tensors: list[DeviceTensor],
        offsets: list[int],
        lengths: list[int],
        peer_devices: list[int],
        local_devices: list[int],
        comm_ids: list[int],
        token: CompletionToken,
    ) -> None:
        super().queue_transfer_with_token(
            tensors, offsets, lengths, peer_devices, local_devices, comm_ids, 0, token, False, 1
        )


def _is_over(request: NrtRequest) -> bool:
    try:
        return request.test() is not None
    except NrtError as error:
        if error.status == NrtStatus.TIMEOUT:
            return False
        raise
