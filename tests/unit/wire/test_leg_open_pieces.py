"""An OpenLeg whose document comes in pieces is the plain one."""

import pytest

from neuron_di.wire.leg_link import OpenLeg, encode_frame, encode_open

LONG = b"word" * 20_000


@pytest.mark.parametrize("number", [0, 127, 128, 70_000, (1 << 62) - 1])
@pytest.mark.parametrize("kind", ["prefill", "decode", "whole"])
def test_the_frame_in_pieces_is_the_plain_one(number, kind):
    pieces = (b'{"prompt":"', memoryview(LONG), b'"}')
    plain = encode_frame(OpenLeg(number, kind, b"".join(pieces)))
    sent = encode_open(number, kind, pieces)
    assert b"".join(sent) == plain
    assert sent[2] is pieces[1]
    assert encode_open(number, kind, (b"{}",)) == [encode_frame(OpenLeg(number, kind, b"{}"))]
