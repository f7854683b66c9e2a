"""A proxy, two prefill and two decode workers as processes, with faults between all of them.

client -- [fault] -- proxy -- [fault] -- worker's HTTP
                     decode worker -- [fault] -- prefill worker's signal link
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal, Self

import aiohttp
from msgspec import structs

from neuron_di.kv import create_arena
from neuron_di.obs.sync_point import VARIABLE
from neuron_di.wire import WorkerRecord

from .fault_proxy import FaultProxy, free_ports
from .hold import Hold
from .process import TestedProcess
from .relay import Relay

MODEL_NAME = "m"
POLL_S = 0.01
STATUS_TIMEOUT_S = 0.5

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Flags of the processes, by what they are given to."""

    transfer: str = "auto"  # the engines that may move KV
    proxy: Mapping[str, float] = field(default_factory=dict)
    worker: Mapping[str, float] = field(default_factory=dict)

    def flags(self, of: Literal["proxy", "worker"]) -> list[str]:
        options = self.proxy if of == "proxy" else self.worker
        return [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]


class Place:
    """One worker: its ports stay when its process is replaced by the next."""

    def __init__(
        self, name: str, role: Role, process: TestedProcess, ports: tuple[int, int], folder: Path
    ) -> None:
        self.name = name
        self.role = role
        self.process = process
        self.port, self.signal_port = ports
        self.legs = FaultProxy(self.port)  # of the proxy to this worker
        self.signals = FaultProxy(self.signal_port)  # of decode workers to this one
        self.folder = folder
        self.is_hidden = False  # from the proxy: no request is given to it
        self.is_chosen = False  # for the next case

    def hold(self, sync_point: str) -> Hold:
        return Hold(self.folder, sync_point)


class Cluster:
    """Runs while entered; nothing of it is left then. `url` is the proxy's, for clients."""

    def __init__(
        self, model: Path, folder: Path, settings: Settings, *, prefill: int = 2, decode: int = 2
    ) -> None:
        self._model = model
        self._settings = settings
        self._stack = AsyncExitStack()
        self.relay = Relay(self._rewrite)
        self._proxy_port, self._registry_port, *ports = free_ports(2 + 2 * (prefill + decode))
        roles: list[Role] = ["prefill"] * prefill + ["decode"] * decode
        self.places: dict[str, Place] = {}
        for number, role in enumerate(roles):
            name = f"{role}-{number if role == 'prefill' else number - prefill}"
            pair = (ports[2 * number], ports[2 * number + 1])
            self.places[name] = self._place(name, role, pair, folder / name)
        self.proxy = TestedProcess(
            "proxy",
            f"--port={self._proxy_port}",
            f"--registry-bind=tcp://127.0.0.1:{self._registry_port}",
            *settings.flags("proxy"),
        )
        self.clients = FaultProxy(self._proxy_port)
        self._arena_fd: int | None = None  # in which the workers' pools lie, as those of `serve`
        self.url = ""

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in (self.proxy, *(place.process for place in self.places.values())):
            await process.kill()
        await self._stack.aclose()

    async def ready(self) -> None:
        """Wait for two workers of each role that are idle and, in all pairs, have been tested.

        A test that the proxy makes by itself must not be what a hold stops.
        """
        self.hide()
        await self.relay.flush()
        await until(self._choose)

    async def _choose(self) -> bool:
        report = await self.get("/status")
        up = {each["record"]["worker_id"] for each in report["workers"] if _is_up(each)}
        fit = {(p["prefill"], p["decode"]) for p in report["pairs"] if p["outcome"] == "ok"}
        names: dict[Role, list[str]] = {"prefill": [], "decode": []}
        for place in self.places.values():
            place.is_chosen = False
            if place.process.is_ready and place.name in up:
                names[place.role].append(place.name)
        for prefills in combinations(names["prefill"], 2):
            for decodes in combinations(names["decode"], 2):
                if fit.issuperset(product(prefills, decodes)):
                    for name in (*prefills, *decodes):
                        self.places[name].is_chosen = True
                    return True
        return False

    async def restart(self, name: str) -> None:
        """Start the worker again at the same ports. It is ready later."""
        await self.places[name].process.kill()
        self.places[name].process = self._process(name)
        await self.places[name].process.start()

    async def restart_proxy(self) -> None:
        """Start the proxy again at the same ports; it learns of the workers anew."""
        await self.proxy.kill()
        await self.proxy.start()
        await self.proxy.ready()
        await self.relay.show_to(f"tcp://127.0.0.1:{self._registry_port}")

    def hide(self, *names: str) -> None:
        """Show the proxy these workers, and no others, as draining: they get no new requests.

        It knows after the relay's `flush`.
        """
        for place in self.places.values():
            place.is_hidden = place.name in names

    def calm(self) -> None:
        """End every fault that can be ended, so that the next case finds what it expects."""
        for process in (self.proxy, *(place.process for place in self.places.values())):
            if process.is_stopped and process.is_alive:
                process.cont()
        for place in self.places.values():
            place.legs.heal()
            place.signals.heal()

    async def get(self, path: str) -> Any:
        async with self._session.get(self.url + path) as response:
            return await response.json()

    async def status_of(self, name: str) -> dict[str, Any] | None:
        """What a worker says of its load, past every fault; None when it does not answer."""
        url = f"http://127.0.0.1:{self.places[name].port}/status"
        timeout = aiohttp.ClientTimeout(total=STATUS_TIMEOUT_S)
        try:
            async with self._session.get(url, timeout=timeout) as response:
                status: dict[str, Any] = await response.json()
                return status
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def leaked(self, timeout_s: float) -> dict[str, int]:
        """What live workers still hold after so long, by worker and kind. Empty: nothing."""
        names = [
            place.name
            for place in self.places.values()
            if place.process.is_alive and not place.process.is_stopped
        ]
        held: dict[str, int] = {}

        async def all_home() -> bool:
            held.clear()
            for name in names:
                if status := await self.status_of(name):
                    held.update({f"{name} {key}": n for key, n in what_is_held(status).items()})
            return not held

        with contextlib.suppress(TimeoutError):
            await until(all_home, timeout_s)
        return held

    async def _start(self) -> None:
        stack = self._stack
        if {"auto", "handover"} & set(self._settings.transfer.split(",")):
            self._arena_fd = create_arena()
            stack.callback(os.close, self._arena_fd)
        await stack.enter_async_context(self.relay)
        for place in self.places.values():
            await stack.enter_async_context(place.legs)
            await stack.enter_async_context(place.signals)
            place.process = self._process(place.name)
        self.url = f"http://127.0.0.1:{(await stack.enter_async_context(self.clients)).port}"
        self._session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        )
        for place in self.places.values():
            await place.process.start()
        await self.restart_proxy()
        await self.ready()

    def _place(self, name: str, role: Role, ports: tuple[int, int], folder: Path) -> Place:
        folder.mkdir(parents=True)
        return Place(name, role, TestedProcess(), ports, folder)

    def _process(self, name: str) -> TestedProcess:
        place = self.places[name]
        fds = [] if self._arena_fd is None else [self._arena_fd]
        return TestedProcess(
            "worker",
            str(self._model),
            f"--role={place.role}",
            f"--worker-id={name}",
            f"--model-name={MODEL_NAME}",
            f"--port={place.port}",
            f"--signal-port={place.signal_port}",
            f"--registry={self.relay.address}",
            "--threads=1",
            f"--transfer={self._settings.transfer}",
            *self._settings.flags("worker"),
            *(f"--kv-arena-fd={fd}" for fd in fds),
            pass_fds=fds,
            environ={VARIABLE: str(place.folder), "OMP_NUM_THREADS": "1"},
        )

    def _rewrite(self, record: WorkerRecord) -> WorkerRecord:
        place = self.places[record.worker_id]
        return structs.replace(
            record,
            api_port=place.legs.port,
            signal_port=place.signals.port if record.signal_port else 0,
            state="draining" if place.is_hidden else record.state,
        )


async def until(check: Any, timeout_s: float = 60.0) -> None:
    """Ask again and again until the answer is True. TimeoutError at the end of the time."""
    async with asyncio.timeout(timeout_s):
        while not await check():  # noqa: ASYNC110 - processes do not tell
            await asyncio.sleep(POLL_S)


def _is_up(report: dict[str, Any]) -> bool:
    status = report["status"]
    return (
        status is not None
        and report.get("health", "up") in ("up", "new")
        and not what_is_held(status)
    )


def what_is_held(status: dict[str, Any]) -> dict[str, int]:
    """Blocks that are not free, and whatever still runs, by kind."""
    unheld = ("num_blocks_free", "num_blocks_cached")
    kinds = [key for key in status if key.startswith("num_blocks_") and key not in unheld]
    kinds += ["num_legs", "num_waiting", "num_running", "num_transferring"]
    held = {key: status[key] for key in kinds if status[key]}
    num_unaccounted = status["num_blocks"] - sum(status[key] for key in unheld)
    if not held and num_unaccounted:
        held["unaccounted"] = num_unaccounted
    return held
