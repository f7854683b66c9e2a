"""The proxy process: registry, directory and HTTP front put together.

Next: proxy/neuron_di_proxy/front.py, proxy/neuron_di_proxy/app.py
"""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import uvloop

from neuron_di.config import (
    FrontOptions,
    ProxyOptions,
    connections_within,
    is_loopback,
    raise_descriptor_limit,
    require_threads,
)
from neuron_di.errors import ConfigError
from neuron_di.etcd import open_registry
from neuron_di.obs import get_logger, say
from neuron_di.obs.hang_watch import watching_for_hangs
from neuron_di.registry import Directory as RegistryDirectory
from neuron_di.registry import EmbeddedRegistry, RegistryClient, RegistryServer, keep_s_for
from neuron_di.stop_signals import stop_on_signals
from neuron_di_proxy.allocator import LOOK_INTERVAL_S, Allocator
from neuron_di_proxy.processes import FurtherProcesses, Meeting, part_of
from neuron_di_proxy.route import Directory
from neuron_di_proxy.server import bind, serve
from neuron_di_proxy.siblings import SiblingPlace, workers_known_to_others
from neuron_di_proxy.static_directory import StaticDirectory
from neuron_di_proxy.ticks import look_every

_log = get_logger(__name__)

HANG_INTERVAL_S = 10.0  # who is idle is to sleep


def run_proxy(options: ProxyOptions) -> None:
    """Run the proxy until SIGTERM or SIGINT; it drains first. ConfigError if it cannot start."""
    limit = raise_descriptor_limit()
    require_threads()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(options, limit))


def settle_garbage() -> None:
    """What is there now, code mostly, stays: look for garbage less often, and not in that.

    Hardly any of a request's objects refer to each other in circles. At the default of 700 new
    objects the collector would run at every other request, and now and then look at everything.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _within(front: FrontOptions, descriptors: int) -> FrontOptions:
    """No more connections than there may be descriptors for: a client that is refused knows where
    it stands, one that cannot be accepted waits in vain."""
    num = connections_within(descriptors, front.connections_max)
    if num < front.connections_max:
        _log.warning("connections_bounded", connections_max=num, descriptors=descriptors)
    return replace(front, connections_max=num)


@asynccontextmanager
async def open_directory(options: ProxyOptions) -> AsyncIterator[tuple[Directory, Meeting]]:
    """Who the workers are, and where they announce themselves."""
    keep_s = keep_s_for(options.etcd.etcd_ttl_s)
    of_registry = partial(RegistryDirectory, addresses=options.addresses, keep_s=keep_s)
    async with AsyncExitStack() as stack:
        if options.prefill_urls or options.decode_urls:
            urls = options.prefill_urls + options.decode_urls
            if options.etcd.etcd:
                raise ConfigError("workers are given by URL or found in etcd, not both")
            yield await stack.enter_async_context(StaticDirectory(urls)), Meeting()
        elif options.etcd.etcd:
            etcd = options.etcd
            if etcd.is_auto:
                etcd = replace(etcd, etcd=(await _child_etcd(stack),))
            found = await stack.enter_async_context(open_registry(None, etcd))
            assert found is not None
            directory = await stack.enter_async_context(of_registry(found))
            yield directory, Meeting(etcd=etcd.etcd)
        elif options.sibling_registry is not None:
            client = await stack.enter_async_context(RegistryClient(options.sibling_registry))
            yield await stack.enter_async_context(of_registry(client)), Meeting()
        else:
            _check_registry_exposure(options)
            registry = EmbeddedRegistry()
            server = await stack.enter_async_context(
                RegistryServer(registry, options.registry_bind)
            )
            directory = await stack.enter_async_context(of_registry(registry))
            yield directory, Meeting(registry=server.address)


def _check_registry_exposure(options: ProxyOptions) -> None:
    """Refuse a registry that others can reach: it believes whoever announces a worker."""
    try:
        parts = urlsplit(options.registry_bind)
        is_ours = parts.scheme != "tcp" or is_loopback(parts.hostname or "")
    except ValueError:  # it says itself what is wrong with it
        is_ours = True
    if not is_ours and not options.front.insecure:
        raise ConfigError(
            f"--registry-bind {options.registry_bind} can be reached from other machines, and this "
            "registry asks for no key: whoever announces a worker there gets prompts. Mend: give a "
            "loopback address, use etcd, or say --insecure",
            param="registry_bind",
        )


async def _child_etcd(stack: AsyncExitStack) -> str:
    """Start an etcd of our own, as long as the stack lasts. Returns its address."""
    from neuron_di.etcd.child import ChildEtcd  # needs packages that others do without

    return (await stack.enter_async_context(ChildEtcd())).address


async def _run(options: ProxyOptions, descriptors: int) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    config = part_of(options)
    config = replace(config, front=_within(config.front, descriptors))
    sock = bind(config, is_first=options.sibling_index == 0)
    host, port = sock.getsockname()[:2]
    scheme = "http" if config.front.tls_cert is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    async with AsyncExitStack() as stack:
        directory, meeting = await stack.enter_async_context(open_directory(options))
        place = None
        if options.sibling_folder is not None:
            place = SiblingPlace(
                folder=options.sibling_folder,
                index=options.sibling_index,
                num_processes=options.front.processes,
            )
            if isinstance(directory, RegistryDirectory):
                directory.remember(await workers_known_to_others(place))
        elif options.front.processes > 1:
            others = await stack.enter_async_context(FurtherProcesses(options, port, meeting))
            place = others.place
            draining = asyncio.create_task(_drain_with(stop, others))
            stack.callback(draining.cancel)

        def on_ready() -> None:
            if options.sibling_folder is None:  # the others are part of the first
                _log.info("ready", url=url, **meeting.words())
            if options.parent_pid is not None:
                say(meeting.report(url))
            settle_garbage()

        def is_orphan() -> bool:
            return options.sibling_folder is not None and os.getppid() != options.parent_pid

        allocator = Allocator()
        if allocator.keep_freed():
            stack.callback(look_every(LOOK_INTERVAL_S, allocator.give_back))
        async with watching_for_hangs(lambda: None, options.hang_timeout_s, HANG_INTERVAL_S):
            await serve(
                config, directory, sock, stop, place=place, on_ready=on_ready, is_orphan=is_orphan
            )


async def _drain_with(stop: asyncio.Event, others: FurtherProcesses) -> None:
    await stop.wait()
    others.drain()
