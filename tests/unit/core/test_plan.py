"""A step's plan, and what it leaves behind when it was computed."""

import pytest
from core_kit import make_received, make_request

from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.errors import LocalProtocolError


def test_chunks_cover_a_prompt_without_gap_or_overlap():
    request = make_request("a", num_prompt=7)
    spans = []
    while request.num_computed < request.num_prompt:
        chunk = PrefillChunk.next_of(request, tokens_max=3)
        spans.append((chunk.start, chunk.end, chunk.is_last))
        chunk.mark_computed()
    assert spans == [(0, 3, False), (3, 6, False), (6, 7, True)]
    with pytest.raises(LocalProtocolError):
        PrefillChunk.next_of(request, tokens_max=3)


def test_chunks_never_cross_the_end_of_the_prompt():
    """So the prompt is cut as it was cut when nothing followed it."""
    request = make_request("a", num_prompt=7, max_tokens=9, num_given=4)
    spans = []
    while request.num_computed < request.num_prefilled:
        chunk = PrefillChunk.next_of(request, tokens_max=3)
        spans.append((chunk.start, chunk.end, chunk.is_replay, chunk.is_last))
        chunk.mark_computed()
    assert spans == [
        (0, 3, False, False),
        (3, 6, False, False),
        (6, 7, False, False),
        (7, 10, True, False),
        (10, 11, True, True),
    ]


def test_a_chunk_is_computed_once():
    chunk = PrefillChunk.next_of(make_request("a", num_prompt=7), tokens_max=3)
    chunk.mark_computed()
    with pytest.raises(LocalProtocolError):
        chunk.mark_computed()


def test_a_batch_adds_one_position_to_each_request():
    requests = (make_received("a", num_prompt=2), make_received("b", num_prompt=5))
    for request in requests:
        request.num_computed = request.num_prompt
    DecodeBatch(requests).mark_computed()
    assert [request.num_computed for request in requests] == [3, 6]
