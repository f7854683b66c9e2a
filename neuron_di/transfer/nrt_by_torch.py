"""Send and receive by the classes that torch-neuronx registers in torch on some SDKs.

They take PyTorch's tensors, and public NxD Inference gives nothing else of its KV. AWS documents
none of them; names, arguments and the order of calls are those of an open-source caller, AWS's own
KV connector for vLLM (aws-neuron/upstreaming-to-vllm, neuron_transfer_engine.py):

    torch.ops.neuron._nrt_async_init_neuron(lnc)                  once per core
                    ._nrt_create_send_communicator(ip, peer lnc, lnc) -> id
                    ._nrt_create_recv_communicator(ip, peer lnc, lnc) -> id
                    ._nrt_test_communicator(id) -> bool
    torch.classes.neuron.NeuronTransferEngine(batch, ip, is_send, nc_offset)
                        .queue_transfer_with_token(lists of what moves, …, token, …)
                        .CompletionToken().is_done() -> bool

What they leave open is taken for the worst. An exception, whichever, leaves behind what may still
move: the transfer counts as stuck. Whether they flush what came nobody says, and bytes that are not
visible yet must not be believed, or overwritten: so libnrt's own flush is called behind each
transfer, by our bindings, and a libnrt without it is refused. There is no call to close anything:
cores, engines and the memory that was sent from stay until the process ends. How an engine orders
what is queued is unknown, too. So one engine has all communicators to a process in one direction,
as in that connector, and is given a transfer in few calls, in one order over all communicators. And
if one call fails the engine may go on with the next: so it is given no second transfer before all
calls of the first are done.

So far this has run on a stand-in for these classes over a simulator of libnrt only.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

from neuron_di.errors import ConfigError, PeerRefused
from neuron_di.kv import DeviceKv
from neuron_di.transfer.nrt_channel import Channel, Message, Posted, PostFailed
from neuron_di.transfer.nrt_driver import (
    Communicator,
    CoreNotOpened,
    NotHere,
    Probe,
    tensor_of_rank,
)
from neuron_di_bindings.nrt import (
    Limits,
    NrtError,
    NrtLibrary,
    NrtMissing,
    NrtMisuse,
    NrtRequestError,
    NrtRuntime,
    NrtStatus,
    NrtUnsupported,
    SendReceive,
    load_nrt,
)

_FLUSH = "nrt_async_sendrecv_flush"
_CLASSES = ("NeuronTransferEngine", "CompletionToken")
_OPERATORS = (
    "_nrt_async_init_neuron",
    "_nrt_create_send_communicator",
    "_nrt_create_recv_communicator",
    "_nrt_test_communicator",
)
# The connector's defaults. Of the time-out nobody says what it counts, and of what.
_NO_LAYERS, _USE_QUEUE, _TIME_OUT = 0, False, 50
_POSTS_MAX = 2  # of a whole batch: the second is there when the first is done
_WORDS_MAX = 200


class TorchFailure(NrtRequestError):
    """Raised when torch-neuronx's classes fail. What they left behind is unknown."""

    def __init__(self, call: str, error: Exception) -> None:
        words = str(error).strip().partition("\n")[0][:_WORDS_MAX]
        super().__init__(call, NrtStatus.FAILURE, type(error).__name__)
        self.args = (f"{call}: {type(error).__name__}: {words}",)


class TorchDriver:
    """See Driver. Borrows the tensors."""

    how = "by torch-neuronx's classes"

    def __init__(self, device: DeviceKv, probe_bytes: int) -> None:
        """`probe_bytes` for each communicator, a multiple of 4. NotHere, CoreNotOpened, or
        ConfigError where there is no memory for them."""
        self.tensors: Sequence[object] = [tensor.torch_tensor for tensor in device.tensors]
        if bare := sum(tensor is None for tensor in self.tensors):
            raise NotHere(f"{bare} of {len(self.tensors)} KV tensors are not PyTorch's")
        firsts = [device.tensors[number] for number in tensor_of_rank(device)]
        cores = [tensor.core for tensor in firsts]
        offsets = {lnc - core for lnc, core in zip(device.lncs, cores, strict=True)}
        if len(offsets) > 1:
            raise NotHere("torch-neuronx counts cores from one on, and the ranks' have gaps")
        (self._nc_offset,) = offsets
        self._closed = _Closed()
        self._library = _library_with_flush()
        self.limits = _limits_of(self._library)
        self._closed.try_engine(self._nc_offset)
        try:
            self.probes: Sequence[Probe] = [
                self._closed.probe(tensor.torch_tensor, self.limits.communicators_max, probe_bytes)
                for tensor in firsts
            ]
        except Exception as error:
            failure = TorchFailure("torch.zeros", error)
            raise ConfigError(f"no memory for the device's connections: {failure}") from None
        self.num_made = self._closed.num_made
        for lnc in device.lncs:
            self._closed.open(lnc)

    def connect(self, host: str, peer_lnc: int, lnc: int) -> "TorchCommunicator":
        return TorchCommunicator(self._closed, "send", host, peer_lnc, lnc)

    def accept(self, host: str, peer_lnc: int, lnc: int) -> "TorchCommunicator":
        return TorchCommunicator(self._closed, "receive", host, peer_lnc, lnc)

    def channels(self, communicators: Sequence[Communicator]) -> list[Channel]:
        """One for all of them."""
        known = [cast("TorchCommunicator", each) for each in communicators]
        pending_max = self.limits.pending_max
        port = _Port(self._closed, known, pending_max, self._nc_offset)
        batch_max = max(1, pending_max // _POSTS_MAX)
        channel = Channel(port.post, pending_max, batch_max, is_one_movement=True)
        return [channel] * len(known)

    def flush(self, lnc: int) -> None:
        self._library.call(_FLUSH, lnc)

    def close(self) -> None:
        """There is no call for it."""


_Pair = tuple[Literal["send", "receive"], str, int, int]  # host, its core, the core here


@dataclass(slots=True)
class _Kept:
    """What stays until the process ends, whoever has a driver by then."""

    lncs: set[int] = field(default_factory=set)
    is_newer: bool | None = None  # which form of the arguments; None: nobody tried
    engines: list[object] = field(default_factory=list)
    probes: dict[tuple[str, int, int], "_TorchProbe"] = field(default_factory=dict)
    num_made: Counter[int] = field(default_factory=Counter)  # communicators, by core
    pairs: set[_Pair] = field(default_factory=set)  # that were connected, or begun


_lock = threading.Lock()
_all_kept: "WeakKeyDictionary[Any, _Kept]" = WeakKeyDictionary()  # by namespace of operators


class _Closed:
    """The classes and operators. NotHere where one is missing."""

    def __init__(self) -> None:
        import torch

        namespaces: tuple[Any, Any] = (torch.classes.neuron, torch.ops.neuron)
        found: list[Any] = []
        for namespace, names in zip(namespaces, (_CLASSES, _OPERATORS), strict=True):
            for name in names:
                try:
                    found.append(getattr(namespace, name))
                except (AttributeError, RuntimeError):
                    raise NotHere(f"torch-neuronx registers no {name}") from None
        self._engine_class, self._make_token, self._init, *rest = found
        self._connect, self._accept, self.test = rest
        with _lock:
            self._kept = _all_kept.setdefault(namespaces[1], _Kept())
            self._pairs_before = frozenset(self._kept.pairs)
        self.num_made = self._kept.num_made
        self._is_newer = self._kept.is_newer is not False

    def try_engine(self, nc_offset: int) -> None:
        """Make one, to see which arguments it takes: once, as it stays. NotHere where it takes
        neither."""
        if self._kept.is_newer is not None:
            return
        try:
            self.engine(1, "127.0.0.1", True, nc_offset)
        except Exception as first:  # SDK 2.24's take one argument more, and later ones less
            self._is_newer = False
            try:
                self.engine(1, "127.0.0.1", True, nc_offset)
            except Exception:
                raise NotHere(f"{TorchFailure('NeuronTransferEngine', first)}") from None
        self._kept.is_newer = self._is_newer

    def probe(self, near: Any, num_rows: int, row_bytes: int) -> "_TorchProbe":
        """One of each size where a tensor is: an earlier driver's, where there was one."""
        key = str(near.device), num_rows, row_bytes
        with _lock:
            if key not in self._kept.probes:
                self._kept.probes[key] = _TorchProbe(near, num_rows, row_bytes)
            return self._kept.probes[key]

    def open(self, lnc: int) -> None:
        """Unless it is. CoreNotOpened."""
        with _lock:
            if lnc in self._kept.lncs:
                return
            try:
                self._init(lnc)
            except Exception as error:
                raise CoreNotOpened(lnc, TorchFailure("_nrt_async_init_neuron", error)) from None
            self._kept.lncs.add(lnc)

    def communicator(
        self, direction: Literal["send", "receive"], host: str, peer_lnc: int, lnc: int
    ) -> Any:
        """PeerRefused where an earlier driver had this pair of cores: what it made is still there,
        connected or not, and nobody says what a second one beside it would do."""
        pair = direction, host, peer_lnc, lnc
        if pair in self._pairs_before:
            raise PeerRefused(
                f"core {lnc} has a connection to core {peer_lnc} of {host} from before this worker "
                "changed its role, and torch-neuronx cannot close it: restart this worker"
            )
        self._kept.pairs.add(pair)
        create = self._connect if direction == "send" else self._accept
        try:
            return create(host, peer_lnc, lnc)
        except Exception as error:
            raise TorchFailure(f"create a communicator to {direction}", error) from None

    def engine(self, batch: int, host: str, is_send: bool, nc_offset: int) -> Any:
        flag = () if self._is_newer else (True,)
        made = self._engine_class(batch, host, is_send, *flag, nc_offset)
        self._kept.engines.append(made)  # nobody says what its end would do to what it has
        return made

    def queue(self, engine: Any, lists: Sequence[list[Any]]) -> Any:
        """Returns the token. What an error leaves queued is unknown."""
        token = self._make_token()
        if self._is_newer:
            more = (_NO_LAYERS, token, _USE_QUEUE, _TIME_OUT)
            engine.queue_transfer_with_token(*lists, *more)
        else:
            engine.queue_transfer_with_token(*lists, token)
        return token


class TorchCommunicator:
    """A Communicator. Cores by the host's numbers."""

    def __init__(
        self,
        closed: _Closed,
        direction: Literal["send", "receive"],
        host: str,
        peer_lnc: int,
        lnc: int,
    ) -> None:
        self.direction = direction
        self.host = host
        self.peer_lnc = peer_lnc
        self.lnc = lnc
        self.was_connected = False
        self.number = closed.communicator(direction, host, peer_lnc, lnc)
        self._closed = closed

    def is_connected(self) -> bool:
        if not self.was_connected:
            try:
                self.was_connected = bool(self._closed.test(self.number))
            except Exception as error:
                raise TorchFailure("_nrt_test_communicator", error) from None
        return self.was_connected


class _Port:
    """An engine of torch-neuronx's, for all communicators to one process."""

    def __init__(
        self,
        closed: _Closed,
        communicators: Sequence[TorchCommunicator],
        pending_max: int,
        nc_offset: int,
    ) -> None:
        one = communicators[0]
        batch = len(communicators) * pending_max
        self._closed = closed
        self._nc_offset = nc_offset
        self._peer_offset = min(each.peer_lnc for each in communicators)
        try:
            self._engine = closed.engine(batch, one.host, one.direction == "send", nc_offset)
        except Exception as error:
            raise TorchFailure("NeuronTransferEngine", error) from None

    def post(self, messages: Sequence[Message]) -> Posted:
        communicators = [cast("TorchCommunicator", each.communicator) for each in messages]
        lists: list[list[Any]] = [
            [each.tensor for each in messages],
            [each.offset for each in messages],
            [each.num_bytes for each in messages],
            [each.peer_lnc - self._peer_offset for each in communicators],
            [each.lnc - self._nc_offset for each in communicators],
            [each.number for each in communicators],
        ]
        try:
            return _Queued(self._closed.queue(self._engine, lists))
        except Exception as error:
            raise PostFailed(TorchFailure("queue_transfer_with_token", error)) from None


class _Queued:
    def __init__(self, token: Any) -> None:
        self._token = token

    def is_done(self) -> bool:
        try:
            return bool(self._token.is_done())
        except Exception as error:
            raise TorchFailure("is_done", error) from None


class _TorchProbe:
    """A row for each proof, where the tensor `near` is. It is allocated as a model's state is
    (neuronx_distributed, StateInitializer), in numbers that models take as input, and copied beside
    the model's steps, which know nothing of it."""

    def __init__(self, near: Any, num_rows: int, row_bytes: int) -> None:
        import torch

        shape = (num_rows, row_bytes // torch.int32.itemsize)
        self.tensor: Any = torch.zeros(shape, dtype=torch.int32, device=near.device)
        self._row_bytes = row_bytes

    def write(self, offset: int, content: bytes) -> None:
        import torch

        try:
            row = torch.frombuffer(bytearray(content), dtype=torch.int32)
            self.tensor[offset // self._row_bytes].copy_(row)
        except Exception as error:
            raise TorchFailure("copy_", error) from None

    def read(self, offset: int, num_bytes: int) -> bytes:
        try:
            row = self.tensor[offset // self._row_bytes].to("cpu")
            return bytes(row.numpy().tobytes()[:num_bytes])
        except Exception as error:
            raise TorchFailure("to", error) from None


def _library_with_flush() -> NrtLibrary:
    try:
        library = load_nrt()
    except NrtMissing as error:
        raise NotHere(f"torch-neuronx's classes need libnrt's flush: {error}") from None
    if not library.has(_FLUSH):
        raise NotHere(f"torch-neuronx's classes need {_FLUSH}, and {library.path} lacks it")
    return library


def _limits_of(library: NrtLibrary) -> Limits:
    try:
        with NrtRuntime(library) as runtime:  # which torch-neuronx has started
            return SendReceive(runtime).limits()
    except (NrtError, NrtMisuse, NrtUnsupported) as error:
        raise NotHere(f"the limits of send and receive are unknown: {error}") from None
