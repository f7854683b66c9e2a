"""What the kernel knows of a connection: whether its client has all, and since when it is quiet.

The transport cannot say. Of TLS it sees neither a record of which a part has come, nor what waits
in the transport below its own.
"""

import asyncio
import fcntl
import socket
import struct
import termios

QUIET_S = 1.0

# Of struct tcp_info (linux/tcp.h): milliseconds since data was sent, and since it came; and how
# many bytes the client has acknowledged, modulo 2^64.
_TIMES = struct.Struct("=44xI4xI")
_TAKEN = struct.Struct("=120xQ")
_UNSENT_MAX = 1 << 62
_OVER = (OSError, ValueError)  # of a socket that is closed: uvloop's has no number then


def is_quiet(transport: asyncio.WriteTransport) -> bool:
    """Whether nothing came or went for `QUIET_S`, and the client has all that went."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return True
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TIMES.size)
        return min(_TIMES.unpack(info)) >= QUIET_S * 1000 and _num_queued(sock) == 0
    except _OVER:
        return True


def unsent_of(transport: asyncio.WriteTransport) -> int:
    """0 when the client has all that was written, or will have without us. Otherwise a number that
    falls with each byte that it takes, whatever else is written."""
    num_unsent = transport.get_write_buffer_size()
    is_tls = transport.get_extra_info("ssl_object") is not None
    sock = transport.get_extra_info("socket")
    if sock is None or (num_unsent == 0 and not is_tls):
        return num_unsent
    try:
        if num_unsent == 0 and _num_queued(sock) == 0:
            return 0
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TAKEN.size)
    except _OVER:
        return num_unsent
    (num_taken,) = _TAKEN.unpack(info)
    return _UNSENT_MAX - int(num_taken)


def _num_queued(sock: socket.socket) -> int:
    """Bytes that the client has not acknowledged."""
    queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(queued, "little")
