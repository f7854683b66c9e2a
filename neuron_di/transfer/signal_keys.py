"""The key pair of a worker's signal link: CURVE, as libzmq has it built in.

A pair is made when a worker starts and lives in its memory alone. The public half stands in the
worker's record, so whoever may write records says who is who; the secret half is never shown.
"""

import struct
from dataclasses import dataclass, field
from typing import Literal

import zmq
from zmq.utils import z85

KEY_CHARS = 40  # 32 bytes in Z85

SignalCurve = Literal["auto", "off"]


@dataclass(frozen=True, slots=True)
class SignalKeys:
    """Both halves in Z85, 40 characters each."""

    public: str
    secret: bytes = field(repr=False)


def make_signal_keys(curve: SignalCurve) -> SignalKeys | None:
    """A fresh pair. None: the link is not encrypted, by request or because libzmq cannot."""
    if curve == "off" or not zmq.has("curve"):
        return None
    public, secret = zmq.curve_keypair()
    return SignalKeys(public.decode("ascii"), secret)


def is_signal_key(text: str) -> bool:
    """Whether it can be a public key."""
    try:
        return len(text) == KEY_CHARS and bool(z85.decode(text))
    except (KeyError, ValueError, struct.error):
        return False
