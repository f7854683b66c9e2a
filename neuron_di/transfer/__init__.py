"""The hand-over of KV between a prefill and a decode worker: signalling and moving blocks."""

from neuron_di.transfer.admission import Admission, KeyOwner
from neuron_di.transfer.connector import ConnectorOptions, NeuronConnector
from neuron_di.transfer.counters import HandOverCounters
from neuron_di.transfer.domain import transfer_domain
from neuron_di.transfer.door import Guard
from neuron_di.transfer.engines import make_engines
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.lanes import Lane, LaneSet
from neuron_di.transfer.recv_buffer import RecvBuffer
from neuron_di.transfer.recv_entry import Arrival
from neuron_di.transfer.send_buffer import SendBuffer
from neuron_di.transfer.shm_engine import ShmEngine
from neuron_di.transfer.signal_keys import SignalKeys, is_signal_key, make_signal_keys
from neuron_di.transfer.signal_link import Link, Seal, SignalTransport, ZmqTransport
from neuron_di.transfer.signal_socket import OnFrames
from neuron_di.transfer.transfer_engine import (
    BlockSource,
    Receive,
    Send,
    TransferEngine,
    TransferToken,
)

__all__ = [
    "Admission",
    "Arrival",
    "BlockSource",
    "ConnectorOptions",
    "Guard",
    "HandOverCounters",
    "KeyOwner",
    "Lane",
    "LaneSet",
    "Link",
    "LocalWorker",
    "NeuronConnector",
    "OnFrames",
    "Receive",
    "RecvBuffer",
    "Seal",
    "Send",
    "SendBuffer",
    "ShmEngine",
    "SignalKeys",
    "SignalTransport",
    "TransferEngine",
    "TransferToken",
    "ZmqTransport",
    "is_signal_key",
    "make_engines",
    "make_signal_keys",
    "transfer_domain",
]
