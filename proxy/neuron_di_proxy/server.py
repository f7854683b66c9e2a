"""Serves the proxy on a socket that is already bound: the front, and hypercorn behind it."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack

from neuron_di.clock import Deadline
from neuron_di.config import ProxyOptions, cannot_listen, is_loopback, require_address
from neuron_di.errors import ConfigError
from neuron_di.obs import get_logger
from neuron_di_proxy.app import create_app
from neuron_di_proxy.certificate import LOOK_INTERVAL_S, certificate_of
from neuron_di_proxy.front import BACKLOG, Front
from neuron_di_proxy.hypercorn_side import HypercornSide
from neuron_di_proxy.route import Directory
from neuron_di_proxy.service import Service
from neuron_di_proxy.siblings import SiblingPlace, Siblings
from neuron_di_proxy.ticks import look_every

LAST_WORDS_TIMEOUT_S = 1.0  # for connections that are still open after the drain

_log = get_logger(__name__)


def bind(config: ProxyOptions, *, is_first: bool = True) -> socket.socket:
    """Take the proxy's address. With port 0 the system picks: see the socket's `getsockname`.

    Further processes of one proxy, which are not `is_first`, share the first one's port.

    Raises ConfigError when the address cannot be had, or must not be had: others could reach it
    and there are no keys.
    """
    require_address(config.host)
    _check_service_exposure(config)
    is_shared = config.front.processes > 1
    if is_shared and is_first:
        # Sharing asks nobody: a proxy that is there already would lose clients to this one.
        _bind(config, is_shared=False).close()
    return _bind(config, is_shared=is_shared)


def _bind(config: ProxyOptions, *, is_shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    if is_shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
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
        raise cannot_listen(config.host, config.port, error) from None
    return sock


async def serve(
    config: ProxyOptions,
    directory: Directory,
    sock: socket.socket,
    shutdown: asyncio.Event,
    *,
    takes_hot: bool = True,
    place: SiblingPlace | None = None,
    on_ready: Callable[[], None] = lambda: None,
    is_orphan: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until `shutdown` is set; then drain and return. Takes over `sock`, and closes it.

    `on_ready` is called once nothing can keep it from answering any more. ConfigError before that:
    keys, TLS or an extra cannot be had. While it drains, running requests end and new ones are
    answered with 503. Without `takes_hot`, Quart answers everything. `place` says which of several
    processes this is; where it has lost the first one, `is_orphan`, it leaves the port to others.
    """
    certificate = certificate_of(config.front)
    tls = None if certificate is None else certificate.context
    async with (
        Service(config, directory) as service,
        Siblings(service, place) as siblings,
        AsyncExitStack() as stack,
    ):
        hypercorn = HypercornSide(
            create_app(service, siblings), config.front, service.limits.send_timeout_s
        )
        front = Front(service, hypercorn, tls, takes_hot=takes_hot)
        await hypercorn.start()
        await front.start(sock)
        if certificate is not None:
            stack.callback(look_every(LOOK_INTERVAL_S, certificate.look))
        on_ready()
        try:
            await shutdown.wait()
            front.drain(leaves_port=is_orphan())
            deadline = Deadline.after(config.limits.drain_timeout_s)
            await _drain(service, deadline)
            await front.flush(deadline)
        finally:
            await front.stop(LAST_WORDS_TIMEOUT_S)


async def _drain(service: Service, deadline: Deadline) -> None:
    admission = service.admission
    admission.drain()
    _log.info("drain", running=admission.num_running)
    try:
        async with asyncio.timeout(deadline.remaining_s()):
            await admission.wait_idle()
    except TimeoutError:
        _log.warning("drain_timeout", running=admission.num_running)
        service.abandon_running()


def _check_service_exposure(config: ProxyOptions) -> None:
    """Refuse to serve whoever can connect where that may be anybody. Warn of keys in the clear."""
    front = config.front
    if front.api_keys is not None and front.tls_cert is None and not is_loopback(config.host):
        _log.warning(
            "keys_in_the_clear",
            host=config.host,
            reason="API keys cross the network readable: give --tls-cert, unless whatever is in "
            "front of this speaks TLS",
        )
    if front.api_keys is None and not front.insecure and not is_loopback(config.host):
        raise ConfigError(
            f"{config.host} can be reached from other machines, and no API keys are set: give "
            "--api-keys FILE (`neuron-di key` makes one), or --insecure to serve everybody"
        )
