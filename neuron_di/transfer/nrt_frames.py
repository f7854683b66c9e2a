"""What the two ends of a pair of devices say to each other beside the device's own connections.

    decode                                    prefill
    SETUP    which connections are there  ->
                                          <-  SETUP      which ones to use, or to make
                                          <-  CONNECTED  its ends of them are
    CONNECTED  and decode's wait for proof  ->
    READY    each of them is the peer's   ->
                                          <-  READY
                                          <-  OFFER      a send is posted here
    ACCEPT   its receives are posted      ->             from here on nothing can be taken back
    REFUSE   nobody receives it           ->
                                          <-  WITHDRAW   nobody took the offer in time
    ACCEPT, or REFUSE                     ->

Send and receive of the device match by order alone. Prefill posts its sends in the order of the
ACCEPTs, decode its receives in the same order, and so the two agree, whatever else is said.
"""

import struct
from typing import NamedTuple

from neuron_di.errors import RemoteProtocolError

SETUP, CONNECTED, READY, OFFER, ACCEPT, REFUSE, WITHDRAW = 1, 2, 3, 4, 5, 6, 7

# Why an offer is refused.
GIVEN_UP, UNFIT, CROWDED, WITHDRAWN = 1, 2, 3, 4
REFUSALS = {
    GIVEN_UP: "it gave the transfer up",
    UNFIT: "it reckons other bytes",
    CROWDED: "it has too many offers",
    WITHDRAWN: "it had not asked for it in time",
}

_MAGIC = b"NDN1"
_FRAME = struct.Struct("<4sIQQQQ")  # magic, kind, and the fields of Frame
FRAME_BYTES = _FRAME.size


class Frame(NamedTuple):
    """`number` is an offer's: prefill counts them, and they only rise. `tag`, `num_bytes` and
    `digest` are those of its transfer. In SETUP `number` is the connections' epoch, 0 for none, and
    `tag` and `digest` are a nonce. In REFUSE `tag` is the reason."""

    kind: int
    number: int = 0
    tag: int = 0
    num_bytes: int = 0
    digest: int = 0

    def pack(self) -> bytes:
        return _FRAME.pack(_MAGIC, *self)


def read_frame(raw: bytes | bytearray) -> Frame:
    """RemoteProtocolError where it is none."""
    magic, *fields = _FRAME.unpack(raw)
    if magic != _MAGIC or not SETUP <= fields[0] <= WITHDRAW:
        raise RemoteProtocolError("on a device's control connection came what is no frame")
    return Frame(*fields)
