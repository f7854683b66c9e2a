"""What posts messages to a Neuron device: one interface under the engine, and two that fit it.

    nrt_by_torch.py     torch-neuronx's classes, which some SDKs have: they take PyTorch's tensors
    nrt_by_library.py   libnrt by our bindings: it takes the runtime's handles of tensors

Beneath both should be the same calls of libnrt, so one end may use the one and its peer the other;
what goes through the device at the handshake shows whether that is so. Which of them a worker has
is found out at its start (nrt_cores.py).

Both fail with the bindings' errors: NrtRetry (nothing happened, ask again), NrtRequestError,
NrtWorkerError (the device is lost) and NrtMisuse.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from neuron_di.kv import DeviceKv
from neuron_di.transfer.nrt_channel import Channel
from neuron_di_bindings.nrt import Limits


class NotHere(Exception):
    """Raised when a driver has nothing to work with on this machine; says what is missing. Nothing
    was opened: another one may be tried."""


class CoreNotOpened(Exception):
    """Raised when the runtime does not open the send and receive of core `lnc`; says what it
    answered."""

    def __init__(self, lnc: int, answer: object) -> None:
        super().__init__(str(answer))
        self.lnc = lnc


class Communicator(Protocol):
    """A pair of cores, in one direction. Never ends by itself. Any thread may call."""

    @property
    def was_connected(self) -> bool:
        """Whether `is_connected` ever said so. Asks nobody."""
        ...

    def is_connected(self) -> bool:
        """Whether the peer is there."""
        ...


class Probe(Protocol):
    """Device memory of one core that is nobody's KV, for proofs. Any thread may call."""

    @property
    def tensor(self) -> object:
        """As the driver's channels take it."""
        ...

    def write(self, offset: int, content: bytes) -> None: ...

    def read(self, offset: int, num_bytes: int) -> bytes: ...


class Driver(Protocol):
    """Send and receive of this process's cores, which are open. Any thread may call.

    `how` is for operators: "by …". `tensors` are the device's, numbered as DeviceKv numbers them,
    as channels take them; `probes` one for each rank, with room for a proof of each communicator.
    `num_made` is how many communicators of each core are taken, also by who had the cores before;
    whoever connects counts on.
    """

    how: str
    limits: Limits
    tensors: Sequence[object]
    probes: Sequence[Probe]
    num_made: Counter[int]

    def connect(self, host: str, peer_lnc: int, lnc: int) -> Communicator:
        """Begin to connect, for sending. Takes one of the core's communicators, for good.
        PeerRefused where only a new process can connect this pair of cores."""
        ...

    def accept(self, host: str, peer_lnc: int, lnc: int) -> Communicator:
        """Begin to be connected to, for receiving."""
        ...

    def channels(self, communicators: Sequence[Communicator]) -> list[Channel]:
        """The channel that each of these sends or receives by; several may share one.

        They are all that one pair of processes has in one direction, and are connected.
        """
        ...

    def flush(self, lnc: int) -> None:
        """What was received on a core is in memory when this returns."""
        ...

    def close(self) -> None:
        """Close what can be closed. Once nothing is called any more."""
        ...


def tensor_of_rank(device: DeviceKv) -> list[int]:
    """The number of one tensor of each rank."""
    return [int(tensors.flat[0]) for tensors in device.geometry.tensors]
