"""The proxy as an ASGI application, for a server of your choice: `neuron_di_proxy.asgi:app`.

    NEURON_DI_PREFILL_URLS=… NEURON_DI_DECODE_URLS=… uvicorn neuron_di_proxy.asgi:app

Options come from the environment and the file that NEURON_DI_CONFIG names, as they do for
`neuron-di proxy`. The server listens and speaks TLS, so it minds its own address, limits of
connections and number of processes. With several processes the workers must be given by URL or
found in an etcd that runs already: a registry is the process' own.
"""

import argparse
import os
from contextlib import AsyncExitStack
from typing import Any

from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart import Quart

from neuron_di.config import ProxyOptions, load_options
from neuron_di.obs import get_logger, setup_logging
from neuron_di_proxy.app import create_app
from neuron_di_proxy.process import open_directory
from neuron_di_proxy.processes import part_of
from neuron_di_proxy.service import Service

_log = get_logger(__name__)


class AsgiProxy:
    """Starts the proxy with the server's lifespan, and passes every request on to it."""

    def __init__(self) -> None:
        self._app: Quart | None = None

    async def __call__(
        self, scope: Any, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if self._app is None:
            raise RuntimeError("the ASGI server must run the application's lifespan")
        await self._app(scope, receive, send)

    async def _live(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        await receive()  # lifespan.startup
        async with AsyncExitStack() as stack:
            try:
                service = await _start(stack)
            except Exception as error:
                _log.exception("start_failed")
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            self._app = create_app(service)
            await send({"type": "lifespan.startup.complete"})
            await receive()  # lifespan.shutdown: the server has ended its connections
            service.admission.drain()
            service.abandon_running()
            self._app = None
        await send({"type": "lifespan.shutdown.complete"})


async def _start(stack: AsyncExitStack) -> Service:
    """Raises ConfigError for options that cannot work."""
    options = load_options(ProxyOptions, argparse.Namespace(), os.environ)
    setup_logging("proxy", options.log.log_level, options.log.log_format)
    directory, meeting = await stack.enter_async_context(open_directory(options))
    service = await stack.enter_async_context(Service(part_of(options), directory))
    _log.info("ready", pid=os.getpid(), **meeting.words())
    front = service.config.front
    if front.api_keys is None and not front.insecure:  # where it listens is the server's affair
        _log.warning("no_keys", reason="whoever reaches the server may use it: --api-keys")
    return service


app = AsgiProxy()
