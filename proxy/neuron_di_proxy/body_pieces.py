"""A request's body while it comes: its pieces, which are joined once."""

# Smaller pieces are gathered, as each that is kept takes some memory beside its bytes.
_SMALL_BYTES_MAX = 4 << 10
_GATHERED_BYTES_MAX = 64 << 10


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
