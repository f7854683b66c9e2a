"""The ZMQ sockets of the registry's link, with the options both ends need."""

import zmq
import zmq.asyncio

from neuron_di.dead_hosts import notice_dead_hosts
from neuron_di.wire import REGISTRY_BYTES_MAX

# Of one connection and direction: what a flood leaves here, of up to REGISTRY_BYTES_MAX each, is
# memory.
QUEUED_MESSAGES_MAX = 32
# Of one client under way. The registry drops an answer that finds its queue full, and ZMQ counts
# what left a queue by the half of it: so many answers always find room.
CALLS_MAX = QUEUED_MESSAGES_MAX // 2


def open_socket(context: zmq.asyncio.Context, kind: int, address: str) -> zmq.asyncio.Socket:
    """A ROUTER or DEALER for this address, neither bound nor connected yet.

    It never delays a shutdown, refuses large messages and notices a host that is gone.
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, REGISTRY_BYTES_MAX)
    socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES_MAX)
    notice_dead_hosts(socket)
    # Only where needed: it would make IPv4 addresses appear in their IPv6 form.
    socket.setsockopt(zmq.IPV6, "[" in address)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    else:
        # Fail rather than keep requests for a registry that may come back as another.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return socket
