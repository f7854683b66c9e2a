"""Send and receive by our bindings of libnrt, for KV whose tensors have the runtime's handle.

So far this has run on a simulator of libnrt only.
"""

from collections import Counter
from collections.abc import Sequence
from typing import cast

from neuron_di.errors import ConfigError, RemoteProtocolError
from neuron_di.kv import DeviceKv
from neuron_di.obs import get_logger
from neuron_di.transfer.nrt_channel import Channel, Message, Post, Posted
from neuron_di.transfer.nrt_driver import (
    Communicator,
    CoreNotOpened,
    NotHere,
    Probe,
    tensor_of_rank,
)
from neuron_di_bindings.nrt import Communicator as LibraryCommunicator
from neuron_di_bindings.nrt import (
    NrtError,
    NrtMisuse,
    NrtRequest,
    NrtTensor,
    NrtUnsupported,
    SendReceive,
)

_log = get_logger(__name__)


class LibraryDriver:
    """See Driver. Owns the cores' send and receive, and the probes' memory; borrows the tensors."""

    how = "by libnrt's send and receive"

    def __init__(self, device: DeviceKv, probe_bytes: int) -> None:
        """`probe_bytes` for each communicator. NotHere, CoreNotOpened, or ConfigError where there
        is no memory for them; then nothing stays open."""
        handles = [tensor.nrt for tensor in device.tensors]
        known = [handle for handle in handles if handle is not None]
        if len(known) < len(handles):
            bare = len(handles) - len(known)
            raise NotHere(f"{bare} of {len(handles)} KV tensors have no handle of the runtime")
        self.tensors: Sequence[object] = known
        self._memory: list[NrtTensor] = []
        self._lncs: list[int] = []
        self._sendreceive = SendReceive(known[0].runtime)
        try:
            self._open(device.lncs)
            self.limits = self._sendreceive.limits()
            self.num_made = Counter[int]()  # what closed cores leave, the runtime knows
            num_bytes = self.limits.communicators_max * probe_bytes
            for rank, number in enumerate(tensor_of_rank(device)):
                near = known[number]
                probe = near.runtime.allocate(num_bytes, near.core, f"kv-probe-{rank}")
                self._memory.append(probe)
        except (NrtError, NrtMisuse) as error:
            self.close()
            raise ConfigError(f"no memory for the device's connections: {error}") from None
        except BaseException:
            self.close()
            raise
        self.probes: Sequence[Probe] = [_LibraryProbe(tensor) for tensor in self._memory]

    def _open(self, lncs: Sequence[int]) -> None:
        for lnc in lncs:
            try:
                self._sendreceive.open(lnc)
            except NrtUnsupported as error:
                raise NotHere(
                    f"the runtime has no send and receive: {error}; update aws-neuronx-runtime-lib"
                ) from None
            except (NrtError, NrtMisuse) as error:
                raise CoreNotOpened(lnc, error) from None
            self._lncs.append(lnc)

    def connect(self, host: str, peer_lnc: int, lnc: int) -> LibraryCommunicator:
        return self._sendreceive.connect(host, peer_lnc, lnc)

    def accept(self, host: str, peer_lnc: int, lnc: int) -> LibraryCommunicator:
        return self._sendreceive.accept(host, peer_lnc, lnc)

    def channels(self, communicators: Sequence[Communicator]) -> list[Channel]:
        """One for each."""
        return [Channel(_post_of(each), self.limits.pending_max) for each in communicators]

    def flush(self, lnc: int) -> None:
        self._sendreceive.flush(lnc)

    def close(self) -> None:
        """Those on which something is posted for good stay open, and the probes with them."""
        is_closed = True
        for lnc in self._lncs:
            try:
                self._sendreceive.close(lnc)
            except (NrtError, NrtMisuse) as error:
                is_closed = False
                _log.warning("nrt_core_not_closed", lnc=lnc, reason=str(error))
        if is_closed:
            for probe in self._memory:
                probe.free()


class _LibraryProbe:
    def __init__(self, tensor: NrtTensor) -> None:
        self.tensor: object = tensor
        self._tensor = tensor

    def write(self, offset: int, content: bytes) -> None:
        self._tensor.write(offset, content)

    def read(self, offset: int, num_bytes: int) -> bytes:
        found = bytearray(num_bytes)
        self._tensor.read(offset, found)
        return bytes(found)


class _Request:
    """One message."""

    def __init__(self, request: NrtRequest, num_bytes: int) -> None:
        self._request = request
        self._num_bytes = num_bytes

    def is_done(self) -> bool:
        num_bytes = self._request.test()
        if num_bytes is None:
            return False
        if num_bytes != self._num_bytes:
            raise RemoteProtocolError("a message between devices came with another length")
        return True


def _post_of(communicator: Communicator) -> Post:
    known = cast("LibraryCommunicator", communicator)
    give = known.send if known.direction == "send" else known.receive

    def post(messages: Sequence[Message]) -> Posted:
        (message,) = messages
        tensor = cast("NrtTensor", message.tensor)
        return _Request(give(tensor, message.offset, message.num_bytes), message.num_bytes)

    return post
