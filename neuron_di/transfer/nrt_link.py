"""The control connection between the two ends of a pair of devices.

It is a data connection of the TCP engine as far as proof and TLS go: both ends show that they hold
the secrets which went over the signal link.

Next: neuron_di/transfer/nrt_frames.py
"""

import select
import ssl

from neuron_di.clock import Deadline
from neuron_di.errors import NeuronDiError, PeerGone, PeerTimeout
from neuron_di.transfer.nrt_frames import FRAME_BYTES, Frame, read_frame
from neuron_di.transfer.tcp_stream import Stream


class ControlLink:
    """Owns the stream. One thread reads and closes; any thread sends or shuts."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def send(self, frame: Frame) -> None:
        """Never waits. Where it cannot be sent the connection ends, and its reader finds out."""
        try:
            self._stream.send_frames(frame.pack())
        except (OSError, PeerGone):
            self.shut()

    def read(self, deadline: Deadline | None = None) -> Frame:
        """The next frame. PeerGone when the connection ends, PeerTimeout by the deadline,
        RemoteProtocolError for what is no frame."""
        raw = bytearray(FRAME_BYTES)
        try:
            if deadline is not None and not self._stream.has_read_ahead:
                poll = select.poll()
                poll.register(self._stream.fileno(), select.POLLIN)
                if not poll.poll(deadline.remaining_s() * 1000):
                    raise TimeoutError
            self._stream.receive_exactly(raw)
        except (OSError, ValueError) as error:
            raise why_not(error) from None
        return read_frame(raw)

    def has_ended(self) -> bool:
        """Whether the peer closed it, or it was shut here. What it said before may be unread."""
        poll = select.poll()
        try:
            poll.register(self._stream.fileno(), select.POLLRDHUP)
        except ValueError:
            return True
        return bool(poll.poll(0))

    def shut(self) -> None:
        """End it for both ends. Whoever reads it is woken."""
        self._stream.shut()

    def close(self) -> None:
        self._stream.close()


def why_not(error: BaseException) -> BaseException:
    """What an error of a socket says of the peer."""
    match error:
        case NeuronDiError():
            return error
        case TimeoutError():
            return PeerTimeout("its control connection does not answer")
        case ssl.SSLError():
            words = error.strerror or error
            return PeerGone(f"TLS with its control port failed ({words}); its log may say more")
        case OSError() | ValueError():  # ValueError: it was closed meanwhile
            return PeerGone("its control connection ended or cannot be made")
        case _:
            return error
