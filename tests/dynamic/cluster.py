"""Proxies and workers as processes that find each other through a real etcd, and come and go.

proxy-0 --------------- etcd
proxy-1 --- [fault] ---'
workers ---------------'
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import psutil
from chaos.cluster import Settings, until, what_is_held
from chaos.fault_proxy import FaultProxy
from chaos.process import TestedProcess
from etcd.etcd_kit import PASSWORD, Etcd

from neuron_di.config.etcd import DEFAULT_PREFIX as PREFIX
from neuron_di.types import Role

ORDER_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0
STATUS_TIMEOUT_S = 5.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(slots=True)
class Worker:
    """One process that was started as a worker. `role` is what it was last told to be."""

    name: str
    role: Role
    process: TestedProcess
    url: str = ""
    ready_s: float = 0.0  # Unix time of its own word

    @property
    def is_here(self) -> bool:
        return self.process.is_alive and not self.process.is_stopped


class Cluster:
    """Runs while entered; nothing of it is left then. `etcd` outlives it.

    `urls` are the proxies', for clients. The last of several reaches etcd through `between`.
    """

    def __init__(
        self, etcd: Etcd, model: Path, settings: Settings, folder: Path, *, num_proxies: int = 1
    ) -> None:
        self.etcd = etcd
        self._model = model
        self._settings = settings
        self._folder = folder
        self._num_proxies = num_proxies
        self._stack = AsyncExitStack()
        self._pids: set[int] = set()  # of every process that there ever was
        self.between = FaultProxy(etcd.members[0].port)
        self.workers: dict[str, Worker] = {}  # every one that there ever was, by its name
        self.proxies: list[TestedProcess] = []
        self.urls: list[str] = []

    async def __aenter__(self) -> Self:
        try:
            await self._stack.enter_async_context(self.between)
            self._session = await self._stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0, force_close=True),
                    timeout=aiohttp.ClientTimeout(total=STATUS_TIMEOUT_S),
                )
            )
            await asyncio.gather(*(self._start_proxy(i) for i in range(self._num_proxies)))
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes():
            await process.kill()
        await self._stack.aclose()

    async def join(self, name: str, role: Role) -> Worker:
        """Start a worker. Returns when it said that it is ready."""
        process = TestedProcess(
            "worker",
            str(self._model),
            f"--role={role}",
            f"--worker-id={name}",
            "--threads=1",
            *self._etcd_flags(self.etcd.addresses),
            *self._settings.flags("worker"),
            environ=ONE_THREAD,
        )
        worker = self.workers[name] = Worker(name, role, process)
        await process.start()
        self._note(process)
        worker.url = _field(await process.ready(), "url")
        worker.ready_s = next(e.unix_s for e in reversed(process.events) if e.event == "ready")
        return worker

    async def order(self, *arguments: str) -> str:
        """Run an operator's command to its end. Its last line. RuntimeError when it fails."""
        if arguments[0] == "drain":
            self.workers[arguments[1]].process.expect_end()
        command = ("-m", "neuron_di", *arguments, f"--url={self.urls[0]}")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **ONE_THREAD},
        )
        try:
            async with asyncio.timeout(ORDER_TIMEOUT_S):
                out, err = await process.communicate()
        except TimeoutError:
            process.kill()
            out, err = await process.communicate()
            raise RuntimeError(f"{' '.join(arguments)}: no end: {out.decode()}") from None
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(arguments)}: {out.decode()}{err.decode()}")
        return out.decode().strip().rpartition("\n")[2]

    async def get(self, url: str) -> Any:
        async with self._session.get(url) as response:
            return await response.json() if response.status == 200 else None

    async def settled(self, timeout_s: float = 60.0) -> None:
        """Wait until etcd and every proxy know who is here, as they are. RuntimeError: if not."""
        found: list[str] = []

        async def is_settled() -> bool:
            found[:] = await self._differences()
            return not found

        try:
            await until(is_settled, timeout_s)
        except TimeoutError:
            raise RuntimeError(f"after {timeout_s:g} s: {'; '.join(found)}") from None

    async def leaks(self, timeout_s: float) -> list[str]:
        """What is held after so long, by whom, although nobody asks for anything."""
        found: list[str] = []

        async def all_home() -> bool:
            found.clear()
            for worker in self.here():
                status = await self.get(f"{worker.url}/status")
                found.extend(f"{worker.name}: {n} {key}" for key, n in what_is_held(status).items())
            for url in self.urls:
                report = await self.get(f"{url}/status")
                if num := report["proxy"]["num_running"]:
                    found.append(f"a proxy: {num} requests")
                found.extend(
                    f"a proxy: {each['num_open']} legs at {each['record']['worker_id']}"
                    for each in report["workers"]
                    if each["num_open"]
                )
            return not found

        try:
            await until(all_home, timeout_s)
        except TimeoutError:
            return found
        return []

    async def end(self, key_timeout_s: float) -> list[str]:
        """Ask all to end. What is left, and who did not end well.

        The key of a worker that was killed may stay for its lease's time, and no longer.
        """
        found: list[str] = []
        workers = [worker.process for worker in self.workers.values()]
        for group in (workers, self.proxies):
            running = [process for process in group if process.is_alive]
            for process in running:
                self._note(process)
                process.terminate()
            for process in running:
                try:
                    code = await asyncio.wait_for(process.gone(), END_TIMEOUT_S)
                except TimeoutError:
                    found.append(f"process {process.pid} does not end")
                else:
                    found += [f"process {process.pid} ended with {code}"] if code else []
        found += [f"process {pid} is left" for pid in self._pids if psutil.pid_exists(pid)]
        left: list[str] = []

        async def nothing_left() -> bool:
            leases = self.etcd.ctl("lease", "list").splitlines()[1:]
            left[:] = [f"{key} is left" for key in self._keys()]
            left.extend(f"lease {each} is left" for each in leases)
            return not left

        try:
            await until(nothing_left, key_timeout_s)
        except TimeoutError:
            found += left
        return found

    def complaints(self) -> list[str]:
        """What every process has told of a bug since the last call."""
        return [words for process in self._processes() for words in process.new_complaints()]

    def has_logged(self, event: str, since_s: float) -> bool:
        """Whether any process has since then, a Unix time; the log's clock has milliseconds."""
        return any(
            line.event == event and line.unix_s >= since_s - 0.001
            for process in self._processes()
            for line in process.events
        )

    def here(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.is_here]

    def calm(self) -> None:
        """End every fault of ours that can be ended."""
        for worker in self.workers.values():
            if worker.process.is_stopped and worker.process.is_alive:
                worker.process.cont()
        self.between.heal()

    async def _differences(self) -> list[str]:
        found: list[str] = []
        due: dict[str, Mapping[str, Any]] = {}
        for worker in self.here():
            due[worker.name] = (await self.get(f"{worker.url}/status"))["record"]
        announced = {
            f"{PREFIX}/workers/{r['role']}/{r['host']}/{r['api_port']}" for r in due.values()
        }
        keys = set(await asyncio.to_thread(self._keys))
        found += [f"etcd has {key}" for key in keys - announced]
        found += [f"etcd misses {key}" for key in announced - keys]
        for number, url in enumerate(self.urls):
            report = await self.get(f"{url}/status")
            known = {each["record"]["worker_id"]: each for each in report["workers"]}
            found += [f"proxy {number} misses {name}" for name in due.keys() - known.keys()]
            found += [f"proxy {number} knows {name}" for name in known.keys() - due.keys()]
            for name in due.keys() & known.keys():
                said, is_known = due[name], known[name]
                same = ("incarnation", "role", "state", "signal_key")
                wrong = [key for key in same if is_known["record"][key] != said[key]]
                if wrong or said["state"] != "ready" or said["role"] != self.workers[name].role:
                    found.append(f"proxy {number} knows another {name}: {wrong}")
                if is_known["health"] != "up" or is_known["vanished_s"] is not None:
                    found.append(f"for proxy {number} {name} is {is_known['health']}")
            found += [f"proxy {number}: {remark}" for remark in report["remarks"]]
        return found

    async def _start_proxy(self, number: int) -> None:
        is_last_of_many = 0 < number == self._num_proxies - 1
        addresses = [f"127.0.0.1:{self.between.port}"] if is_last_of_many else self.etcd.addresses
        proxy = TestedProcess(
            "proxy", "--port=0", *self._etcd_flags(addresses), *self._settings.flags("proxy")
        )
        self.proxies.append(proxy)
        await proxy.start()
        self.urls.append(_field(await proxy.ready(), "url"))
        self._note(proxy)

    def _keys(self) -> list[str]:
        said = self.etcd.ctl("get", "--prefix", "--keys-only", f"{PREFIX}/", check=False)
        return [line for line in said.split() if line.startswith(f"{PREFIX}/")]

    def _etcd_flags(self, addresses: Sequence[str]) -> list[str]:
        flags = [f"--etcd={','.join(addresses)}"]
        if self.etcd.root:  # users are asked for
            password = self._folder / "password"
            password.write_text(PASSWORD, encoding="utf-8")
            password.chmod(0o600)
            flags += ["--etcd-user=worker", f"--etcd-password-file={password}"]
        return flags

    def _note(self, process: TestedProcess) -> None:
        below = psutil.Process(process.pid).children(recursive=True)
        self._pids |= {process.pid, *(each.pid for each in below)}

    def _processes(self) -> list[TestedProcess]:
        return [*(worker.process for worker in self.workers.values()), *self.proxies]


def _field(fields: str, name: str) -> str:
    return dict(each.split("=", 1) for each in fields.split() if "=" in each)[name]


def _key_of(record: Mapping[str, Any]) -> str:
    return f"{PREFIX}/workers/{record['role']}/{record['host']}/{record['api_port']}"
