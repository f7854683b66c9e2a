"""A transfer in the form of AWS's document, for device engines: four parallel lists (N-55).

One end's sequence names that end's tensors and, for each entry, the device of the peer. The n-th
entry of one end meets the n-th of the other: both ends make theirs from the same runs.
"""

from dataclasses import dataclass

import numpy as np

from neuron_di.errors import LocalProtocolError
from neuron_di.kv.geometry import KvGeometry
from neuron_di.kv.runs import Ints, Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSequences:
    """One end's half of a transfer. Offsets and lengths are bytes within the tensor."""

    tensors: list[int]  # numbers, by the geometry
    offsets: list[int]
    lengths: list[int]
    peer_devices: list[int]  # the peer's ranks

    @property
    def num_bytes(self) -> int:
        return sum(self.lengths)


def transfer_sequences(
    runs: Runs, source: KvGeometry, destination: KvGeometry
) -> tuple[TransferSequences, TransferSequences]:
    """What the sender and the receiver post, each in this order."""
    source_tensors, destination_tensors = (
        np.zeros(len(runs), np.int64) if tensors is None else tensors
        for tensors in (runs.source_tensors, runs.destination_tensors)
    )
    lengths: list[int] = runs.lengths.tolist()
    return (
        TransferSequences(
            tensors=source_tensors.tolist(),
            offsets=runs.source_offsets.tolist(),
            lengths=lengths,
            peer_devices=_devices(destination, destination_tensors),
        ),
        TransferSequences(
            tensors=destination_tensors.tolist(),
            offsets=runs.destination_offsets.tolist(),
            lengths=lengths,
            peer_devices=_devices(source, source_tensors),
        ),
    )


def runs_of(send: TransferSequences, receive: TransferSequences) -> Runs:
    """The runs of two ends' sequences. LocalProtocolError where they do not fit each other."""
    if send.lengths != receive.lengths:
        raise LocalProtocolError("the two ends of a transfer name different lengths")
    lists = (send.tensors, send.offsets, receive.tensors, receive.offsets)
    if any(len(entries) != len(send.lengths) for entries in lists):
        raise LocalProtocolError("the lists of a transfer sequence differ in length")
    source_tensors, source_offsets, destination_tensors, destination_offsets = (
        np.array(entries, np.int64) for entries in lists
    )
    return Runs(
        source_offsets=source_offsets,
        destination_offsets=destination_offsets,
        lengths=np.array(send.lengths, np.int64),
        source_tensors=source_tensors,
        destination_tensors=destination_tensors,
    )


def _devices(geometry: KvGeometry, tensors: Ints) -> list[int]:
    ranks = geometry.rank_of_tensor()
    return [ranks[number] for number in tensors.tolist()]
