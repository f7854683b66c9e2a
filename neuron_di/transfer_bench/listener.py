"""Waits for the one measuring end that has the key, and serves it."""

import socket
from collections.abc import Callable

from neuron_di.clock import Deadline
from neuron_di.config import TransferOptions, is_loopback
from neuron_di.errors import ConfigError, PeerError, PeerTimeout
from neuron_di.transfer_bench.control_link import ControlLink
from neuron_di.transfer_bench.flags import READY_WORDS
from neuron_di.transfer_bench.serving_end import ServingEnd

WAIT_S = 3600.0  # for somebody with the key
_BACKLOG = 4  # whoever has no key is asked for it one after the other, 5 s each at most


def serve_once(
    host: str,
    port: int,
    key: str,
    tell: Callable[[str], None],
    parent_pid: int | None = None,
    options: TransferOptions = TransferOptions(),  # noqa: B008 - nothing changes it
) -> None:
    """Listen, serve whoever proves to have the key, and return when it is gone. Blocks.

    ConfigError where it cannot listen, PeerTimeout where nobody comes. Refuses everybody else.
    """
    with _listen(host, port) as listener:
        bound_host, bound_port = listener.getsockname()[:2]
        shown = f"[{bound_host}]" if ":" in bound_host else bound_host
        tell(f"{READY_WORDS} {shown}:{bound_port}")
        if not is_loopback(bound_host):
            tell("other machines reach it: what is said is authenticated, but not encrypted")
        link = _link_with_key(listener, key, tell)
    ServingEnd(link, parent_pid, options).serve()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    return listener


def _link_with_key(listener: socket.socket, key: str, tell: Callable[[str], None]) -> ControlLink:
    deadline = Deadline.after(WAIT_S)
    while not deadline.has_passed():
        listener.settimeout(max(0.001, deadline.remaining_s()))
        try:
            sock, address = listener.accept()
        except TimeoutError:
            break
        try:
            return ControlLink.answer(sock, key)
        except PeerError as error:
            tell(f"refused {address[0]}: {error.message}")
    raise PeerTimeout(f"nobody with the key came within {WAIT_S:.0f} s")
