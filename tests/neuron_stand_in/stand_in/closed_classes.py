"""What torch-neuronx of some SDKs registers in torch, undocumented: a transfer engine over libnrt.

    torch.classes.neuron.Runtime, CompletionToken, NeuronTransferEngine
    torch.ops.neuron._nrt_async_init_neuron, _nrt_create_send_communicator,
                     _nrt_create_recv_communicator, _nrt_test_communicator

Their names and arguments are known from an open-source caller only, what they do inside is a guess:
here each engine has a thread that posts the tensors in order and tests them, and flushes what was
received before its token is done. In plain Python, so `isinstance` with torch's own finds nothing.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from unittest import mock

import torch

from neuron_di_bindings.nrt import (
    Communicator,
    NrtError,
    NrtRequest,
    NrtRetry,
    NrtRuntime,
    SendReceive,
)
from stand_in.device_tensor import DeviceTensor

_POLL_S = 0.0005


class CompletionToken:
    """Done when all bytes of one transfer have gone, or are in memory and visible."""

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


class _Transfer:
    """The arguments of one queue_transfer_with_token that matter here."""

    def __init__(
        self,
        runs: list[tuple[DeviceTensor, int, int, Communicator]],
        lncs: set[int],
        token: CompletionToken,
    ) -> None:
        self.runs = runs
        self.lncs = lncs
        self.token = token


class ClosedNeuron:
    """All of it, on one runtime. `installed()` puts it into torch, and ends its threads."""

    def __init__(self, runtime: NrtRuntime) -> None:
        self._runtime = runtime
        self._send_receive = SendReceive(runtime)
        self._communicators: list[Communicator] = []
        self._lncs: list[int] = []
        self._engines: list[NeuronTransferEngine] = []
        self.classes = SimpleNamespace(
            Runtime=lambda: SimpleNamespace(get_visible_nc_count=runtime.visible_cores),
            CompletionToken=CompletionToken,
            NeuronTransferEngine=self._engine,
        )
        self.ops = SimpleNamespace(
            _nrt_async_init_neuron=self._open,
            _nrt_create_send_communicator=self._connect,
            _nrt_create_recv_communicator=self._accept,
            _nrt_test_communicator=self._test,
        )

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """torch.classes.neuron and torch.ops.neuron, within the block."""
        classes = mock.patch.object(torch.classes, "neuron", self.classes, create=True)
        operators = mock.patch.object(torch.ops, "neuron", self.ops, create=True)
        try:
            with classes, operators:
                yield
        finally:
            for engine in self._engines:
                engine.close()
            for lnc in self._lncs:
                self._send_receive.close(lnc)

    def _engine(
        self, batch_size: int, remote_ip: str, is_sender: bool, nc_offset: int
    ) -> "NeuronTransferEngine":
        engine = NeuronTransferEngine(
            self._send_receive, self._communicators, batch_size, is_sender, nc_offset
        )
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
        return self._communicators[number].is_connected()


class NeuronTransferEngine:
    """Transfers of one direction, one after the other, on a thread of its own."""

    def __init__(
        self,
        send_receive: SendReceive,
        communicators: Sequence[Communicator],
        batch_size: int,
        is_sender: bool,
        nc_offset: int,
    ) -> None:
        self._send_receive = send_receive
        self._communicators = communicators
        self._batch_size = batch_size
        self._is_sender = is_sender
        self._nc_offset = nc_offset
        self._transfers: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="closed transfer engine")
        self._thread.start()

    def queue_transfer_with_token(
        self,
        tensors: Sequence[DeviceTensor],
        offsets: Sequence[int],
        lengths: Sequence[int],
        peer_devices: Sequence[int],
        local_devices: Sequence[int],
        comm_ids: Sequence[int],
        completion_count: int,
        completion_token: CompletionToken,
        use_queue: bool,
        completion_time_out: int,
    ) -> None:
        """Queue these bytes of whole state tensors; returns at once. Offsets, lengths: bytes."""
        if completion_count:
            raise NotImplementedError("the stand-in sends no layers while they are computed")
        communicators = [self._communicators[number] for number in comm_ids]
        runs = list(zip(tensors, offsets, lengths, communicators, strict=True))
        for tensor, local in zip(tensors, local_devices, strict=True):
            if tensor.device.index != local:
                raise RuntimeError(f"a tensor of core {tensor.device.index}, not {local}")
        lncs = {local + self._nc_offset for local in local_devices}
        self._transfers.put(_Transfer(runs, lncs, completion_token))

    def close(self) -> None:
        """End the thread. A transfer that is not through fails."""
        self._closing.set()
        self._transfers.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (transfer := self._transfers.get()) is not None:
            try:
                self._move(transfer)
            except (NrtError, TimeoutError) as error:
                transfer.token.end(error)
            else:
                transfer.token.end()

    def _move(self, transfer: _Transfer) -> None:
        posted: list[NrtRequest] = []
        for tensor, offset, length, communicator in transfer.runs:
            while (request := self._post(communicator, tensor, offset, length)) is None:
                posted = self._still_pending(posted)
            posted.append(request)
            while len(posted) >= self._batch_size:
                posted = self._still_pending(posted)
        while posted:
            posted = self._still_pending(posted)
        if not self._is_sender:
            for lnc in sorted(transfer.lncs):
                self._send_receive.flush(lnc)

    def _post(
        self, communicator: Communicator, tensor: DeviceTensor, offset: int, length: int
    ) -> NrtRequest | None:
        post = communicator.send if self._is_sender else communicator.receive
        try:
            return post(tensor.nrt_tensor, offset, length)
        except NrtRetry:  # too many are pending
            return None

    def _still_pending(self, posted: list[NrtRequest]) -> list[NrtRequest]:
        left = [request for request in posted if request.test() is None]
        if self._closing.is_set():
            raise TimeoutError("the engine ends")
        if len(left) == len(posted):
            self._closing.wait(_POLL_S)
        return left
