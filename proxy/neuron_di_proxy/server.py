"""Serves the proxy's application with hypercorn on a socket that is already bound."""

import asyncio
import logging
import socket

from hypercorn.asyncio import serve as serve_with_hypercorn
from hypercorn.config import Config as HypercornConfig

from neuron_di.errors import ConfigError
from neuron_di.obs import get_logger
from neuron_di_proxy.app import create_app
from neuron_di_proxy.config import ProxyConfig
from neuron_di_proxy.route import Directory

BACKLOG = 4096  # hypercorn's own 100 drops connections when a thousand clients arrive at once
KEEP_ALIVE_TIMEOUT_S = 75
LAST_WORDS_TIMEOUT_S = 1.0  # for connections that are still open after the drain

_log = get_logger(__name__)


def bind(config: ProxyConfig) -> socket.socket:
    """Take the proxy's address. With port 0 the system picks: see the socket's `getsockname`.

    Raises ConfigError when the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # For connections of clients that never read: what they do not take would stay for ever.
        unread_ms = int(2000 * config.limits.send_timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
    try:
        sock.bind((config.host, config.port))
        # Listening at once makes a second server fail here, and lets early clients wait.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}. "
            "Stop what uses the port, or choose another (0: any free one)."
        ) from None
    return sock


async def serve(
    config: ProxyConfig, directory: Directory, sock: socket.socket, shutdown: asyncio.Event
) -> None:
    """Serve until `shutdown` is set; then drain and return. Takes over `sock`, and closes it.

    While it drains, running requests end and new ones are answered with 503.
    """
    app = create_app(config, directory)

    async def drained() -> None:
        await shutdown.wait()
        app.drain()
        _log.info("drain", running=app.admission.num_running)
        try:
            async with asyncio.timeout(config.limits.drain_timeout_s):
                await app.admission.wait_idle()
        except TimeoutError:
            _log.warning("drain_timeout", running=app.admission.num_running)
            app.abandon_running()

    hypercorn = HypercornConfig()
    hypercorn.bind = [f"fd://{sock.detach()}"]  # hypercorn makes a socket of it and closes that
    hypercorn.backlog = BACKLOG
    hypercorn.keep_alive_timeout = KEEP_ALIVE_TIMEOUT_S
    hypercorn.graceful_timeout = LAST_WORDS_TIMEOUT_S
    hypercorn.errorlog = logging.getLogger("hypercorn.error")
    hypercorn.include_server_header = False
    await serve_with_hypercorn(app, hypercorn, shutdown_trigger=drained)
