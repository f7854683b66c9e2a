"""A request's body while it comes: of a length that its head tells, or in HTTP/1.1's chunks.

Either holds no more than what came, is bounded, and joins it once.
"""

from neuron_di.errors import BadRequest
from neuron_di_proxy.body_refusal import body_too_large

# Smaller pieces are gathered, as each that is kept takes some memory beside its bytes.
_SMALL_BYTES_MAX = 4 << 10
_GATHERED_BYTES_MAX = 64 << 10

_LINE_BYTES_MAX = 256  # a chunk's size with its extensions, or a trailer
_TRAILERS_MAX = 16
_HEX = frozenset(b"0123456789abcdefABCDEF")


class BodyPieces:
    """What came of a body. Long pieces stay as they came: no byte is copied before `join`."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._pieces: list[bytes | bytearray] = []

    def add(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        if len(piece) > _SMALL_BYTES_MAX:
            self._pieces.append(piece)
            return
        last = self._pieces[-1] if self._pieces else b""
        if isinstance(last, bytearray) and len(last) < _GATHERED_BYTES_MAX:
            last += piece
        else:
            self._pieces.append(bytearray(piece))

    def join(self) -> bytes:
        """All of it. The pieces are given up."""
        body = b"".join(self._pieces)
        self._pieces.clear()
        return body


class SizedBody:
    """Takes a body out of what comes. Holds no more than what came, whatever the length says."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._pieces = BodyPieces()

    def add(self, data: bytes) -> bytes:
        """Take what is the body's. What follows it is returned: mostly nothing."""
        num_missing = self._num_bytes - self._pieces.num_bytes
        if len(data) <= num_missing:
            self._pieces.add(data)
            return b""
        self._pieces.add(data[:num_missing])
        return data[num_missing:]

    def whole(self) -> bytes | None:
        """The body once it is there, None before. To be had once."""
        return self._pieces.join() if self._pieces.num_bytes == self._num_bytes else None

    def take(self, received: bytearray) -> bytes | None:
        """As `ChunkedBody.take`."""
        rest = self.add(bytes(received))
        received[:] = rest
        return self.whole()


class ChunkedBody:
    """Takes chunks out of what a connection has received, and is strict about their form."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._pieces = BodyPieces()
        self._num_left = 0  # bytes of the running chunk, and of the line end behind it
        self._num_trailers: int | None = None  # None: before the last chunk
        self._num_lines = 0

    def take(self, received: bytearray) -> bytes | None:
        """The whole body once it is there, None before. What is used leaves `received`.

        Raises BadRequest for what is no chunk, TooLarge for a body over the limit: then nobody
        can say where the next request begins.
        """
        while True:
            if self._num_left > 2:
                with memoryview(received) as view:
                    piece = bytes(view[: self._num_left - 2])
                if not piece:
                    return None
                self._pieces.add(piece)
                self._num_left -= len(piece)
                del received[: len(piece)]
            elif self._num_left == 2:
                if len(received) < 2:
                    return None
                if received[:2] != b"\r\n":
                    raise BadRequest("a chunk of the body is longer than its size")
                del received[:2]
                self._num_left = 0
            else:
                line = self._line(received)
                if line is None:
                    return None
                if self._num_trailers is None:
                    self._begin_chunk(line)
                elif not line:
                    return self._pieces.join()
                else:
                    self._num_trailers += 1
                    if self._num_trailers > _TRAILERS_MAX:
                        raise BadRequest("the body has too many trailers")

    def _line(self, received: bytearray) -> bytes | None:
        end = received.find(b"\n", 0, _LINE_BYTES_MAX)
        if end < 0:
            if len(received) >= _LINE_BYTES_MAX:
                raise BadRequest("a line between two chunks of the body is too long")
            return None
        line = bytes(received[: end + 1])
        if not line.endswith(b"\r\n") or line.count(b"\r") != 1:
            raise BadRequest("a line between two chunks of the body does not end in CR LF")
        del received[: end + 1]
        return line[:-2]

    def _begin_chunk(self, line: bytes) -> None:
        size = line.partition(b";")[0]
        if not 0 < len(size) <= 16 or not _HEX.issuperset(size):
            raise BadRequest("the size of a chunk of the body is no hexadecimal number")
        num_bytes = int(size, 16)
        if self._pieces.num_bytes + num_bytes > self._bytes_max:
            raise body_too_large(self._bytes_max)
        # Many tiny chunks cost much for little: their lines count as bytes of a body.
        self._num_lines += 1
        if self._num_lines > 1024 + self._bytes_max // 64:
            raise body_too_large(self._bytes_max)
        if num_bytes == 0:
            self._num_trailers = 0
        else:
            self._num_left = num_bytes + 2
