"""The hand-over of KV between a prefill and a decode worker: signalling and moving blocks."""

from neuron_di.transfer.connector import ConnectorOptions, NeuronConnector
from neuron_di.transfer.counters import HandOverCounters
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.recv_buffer import RecvBuffer
from neuron_di.transfer.send_buffer import SendBuffer
from neuron_di.transfer.shm_engine import ShmEngine
from neuron_di.transfer.signal_link import Link, OnFrames, SignalTransport, ZmqTransport
from neuron_di.transfer.transfer_engine import BlockSource, TransferEngine, TransferToken

__all__ = [
    "BlockSource",
    "ConnectorOptions",
    "HandOverCounters",
    "Link",
    "LocalWorker",
    "NeuronConnector",
    "OnFrames",
    "RecvBuffer",
    "SendBuffer",
    "ShmEngine",
    "SignalTransport",
    "TransferEngine",
    "TransferToken",
    "ZmqTransport",
]
