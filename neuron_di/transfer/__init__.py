"""The hand-over of KV between a prefill and a decode worker: signalling and moving blocks."""

from neuron_di.transfer.connector import ConnectorOptions, NeuronConnector
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.recv_buffer import RecvBuffer
from neuron_di.transfer.send_buffer import SendBuffer
from neuron_di.transfer.shm_engine import ShmEngine
from neuron_di.transfer.transfer_engine import BlockSource, TransferEngine, TransferToken

__all__ = [
    "BlockSource",
    "ConnectorOptions",
    "LocalWorker",
    "NeuronConnector",
    "RecvBuffer",
    "SendBuffer",
    "ShmEngine",
    "TransferEngine",
    "TransferToken",
]
