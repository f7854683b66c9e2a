"""The proxy process: registry, directory and HTTP front put together.

Next: proxy/neuron_di_proxy/app.py
"""

import asyncio
import signal
from contextlib import AsyncExitStack

import uvloop

from neuron_di.config import ProxyOptions
from neuron_di.obs import LaunchReport, get_logger, say
from neuron_di.registry import Directory as RegistryDirectory
from neuron_di.registry import EmbeddedRegistry, RegistryServer
from neuron_di_proxy.config import ProxyConfig
from neuron_di_proxy.route import Directory
from neuron_di_proxy.server import bind, serve
from neuron_di_proxy.static_directory import StaticDirectory

_log = get_logger(__name__)


def run_proxy(options: ProxyOptions) -> None:
    """Run the proxy until SIGTERM or SIGINT; it drains first. ConfigError if it cannot start."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(options))


async def _run(options: ProxyOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    config = ProxyConfig(host=options.host, port=options.port, limits=options.limits)
    sock = bind(config)
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    async with AsyncExitStack() as stack:
        directory: Directory
        registry_address = ""
        if options.prefill_urls or options.decode_urls:
            urls = options.prefill_urls + options.decode_urls
            directory = await stack.enter_async_context(StaticDirectory(urls))
        else:
            registry = EmbeddedRegistry()
            server = await stack.enter_async_context(
                RegistryServer(registry, options.registry_bind)
            )
            registry_address = server.address
            directory = await stack.enter_async_context(RegistryDirectory(registry))
        _log.info("ready", url=url, registry=registry_address)
        if options.parent_pid is not None:
            say(LaunchReport(event="ready", url=url, registry=registry_address))
        await serve(config, directory, sock, stop)
