"""What passes over a data connection once both ends have proved who they are.

    decode                        prefill
    WANT  tag, total, piece   ->                       this piece of the transfer, on this stream
    CANCEL  tag               ->                       nobody waits for it any more
                              <-   DATA  as wanted     and the piece's bytes behind it
                              <-   GONE  as wanted     there is nothing, and never will be
                              <-   UNFIT as wanted     the two ends speak of different bytes

Every WANT has exactly one answer, on the stream that it came on, with the same numbers. So a
receiver compares each answer with what it asked for itself, before it writes a byte.
"""

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuron_di.errors import (
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    PeerTimeout,
    RemoteProtocolError,
)

WANT, CANCEL, DATA, GONE, UNFIT = 1, 2, 3, 4, 5

_MAGIC = b"NDK1"
_FRAME = struct.Struct("<4sIQQQQ")  # magic, kind, tag, total, offset, length
FRAME_BYTES = _FRAME.size
_BYTES_MAX = 1 << 62

# A piece of a transfer that is spread over several streams.
PIECE_BYTES_MIN = 2 << 20
_PIECE_ALIGNMENT = 4096


class Frame(NamedTuple):
    """`total` bytes are the transfer; [offset, offset + length) of them are this piece."""

    kind: int
    tag: int
    total: int
    offset: int
    length: int

    def pack(self) -> bytes:
        return _FRAME.pack(_MAGIC, *self)

    def answered(self, kind: int) -> "Frame":
        return Frame(kind, *self[1:])


def read_frame(raw: bytes | bytearray | memoryview, kinds: tuple[int, ...]) -> Frame:
    """RemoteProtocolError unless it is of one of these kinds, and adds up."""
    magic, kind, tag, total, offset, length = _FRAME.unpack(raw)
    if magic != _MAGIC or kind not in kinds:
        raise RemoteProtocolError("a data connection carried what is no frame")
    if not 0 <= offset + length <= total <= _BYTES_MAX:
        raise RemoteProtocolError("a frame's piece lies outside of its transfer")
    return Frame(kind, tag, total, offset, length)


def pieces_of(total: int, num_streams: int) -> list[tuple[int, int]]:
    """(offset, length) of each piece: one per stream, fewer where they would be small."""
    count = min(num_streams, total // PIECE_BYTES_MIN)
    if count <= 1:
        return [(0, total)]
    size = -(-total // count // _PIECE_ALIGNMENT) * _PIECE_ALIGNMENT
    return [(start, min(size, total - start)) for start in range(0, total, size)]


def part_of(
    offsets: NDArray[np.int64], lengths: NDArray[np.int64], start: int, num_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The runs that are bytes [start, start + num_bytes) of these runs, in order. A copy."""
    if not num_bytes:  # at the end of a run it would be of none
        return offsets[:0], lengths[:0]
    ends = np.cumsum(lengths)
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, start + num_bytes, side="left"))
    part_offsets, part_lengths = offsets[first : last + 1].copy(), lengths[first : last + 1].copy()
    skipped = start - int(ends[first] - lengths[first])
    part_offsets[0] += skipped
    part_lengths[0] -= skipped
    part_lengths[-1] -= int(ends[last]) - start - num_bytes
    return part_offsets, part_lengths


def as_peer_error(error: Exception) -> NeuronDiError:
    """What a data connection that failed so says about the peer."""
    match error:
        case NeuronDiError():
            return error
        case TimeoutError():
            return PeerTimeout("the peer's data connection stalls")
        case OSError():
            return PeerGone(f"the peer's data connection ended: {error.strerror or error}")
        case _:
            return LocalProtocolError(f"a data connection failed: {error!r}")
