"""The four lists of AWS's document: both ends' halves of the same runs."""

from dataclasses import replace

import numpy as np
import pytest
from kv_kit import SLOT, rank_tensors

from neuron_di.errors import LocalProtocolError
from neuron_di.kv import Planner, runs_of, transfer_sequences


def test_transfer_sequences_are_the_runs_seen_from_either_end():
    source, destination = rank_tensors(2, **SLOT), rank_tensors(1)
    plan = Planner(source, destination).plan([1], [5, 6, 9], 11)
    send, receive = transfer_sequences(plan.runs, source, destination)
    assert send.num_bytes == receive.num_bytes == 11 * source.token_bytes
    assert set(send.peer_devices) == {0}
    assert receive.peer_devices == [tensor % 2 for tensor in send.tensors]
    again = runs_of(send, receive)
    for name in (
        "source_tensors",
        "source_offsets",
        "destination_tensors",
        "destination_offsets",
        "lengths",
    ):
        assert np.array_equal(getattr(again, name), getattr(plan.runs, name))


def test_two_ends_that_do_not_agree_are_refused():
    geometry = rank_tensors(2)
    sequences = [
        transfer_sequences(Planner(geometry, geometry).plan([0], [1], n).runs, geometry, geometry)
        for n in (3, 4)
    ]
    with pytest.raises(LocalProtocolError, match="different lengths"):
        runs_of(sequences[0][0], sequences[1][1])
    send, receive = sequences[0]
    with pytest.raises(LocalProtocolError, match="differ in length"):
        runs_of(replace(send, offsets=send.offsets[1:]), receive)
