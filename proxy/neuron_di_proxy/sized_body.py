"""A request's body whose length its head tells."""

from neuron_di_proxy.body_pieces import BodyPieces


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
