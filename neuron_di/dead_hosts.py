"""How a ZMQ socket learns that a peer's host is gone, or the way to it: from TCP, in 3 to 4 s.

Not by ZMTP's heartbeats, with which one process can end another: libzmq (4.3.5, its issues 3937,
4364 and 4767) aborts where a heartbeat is due on a connection that has ended, or was made anew,
while its messages wait to be read.
"""

from typing import Any

import zmq

_SILENCE_S = 3


def notice_dead_hosts(socket: "zmq.Socket[Any]") -> None:
    """Have its connections end when the other host says nothing any more. Before bind or connect.

    A process that stands still is not noticed: its host goes on to acknowledge.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _SILENCE_S)
    socket.setsockopt(zmq.TCP_MAXRT, _SILENCE_S * 1000)  # of what was sent and is not acknowledged
