"""Starts what users start: a fleet, a command, a part alone. Nothing of it outlives its block."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from openai_kit import DEADLINE_S, Client, eventually

from neuron_di.config import EngineOptions, LogOptions, ServeOptions
from neuron_di.serve import Fleet


@asynccontextmanager
async def running_fleet(
    folder: Path, *, prefill: int = 1, decode: int = 1, combined: bool = False, **engine: Any
) -> AsyncIterator[Client]:
    """A proxy and its workers, ready; at the end they are asked to stop, and gone."""
    options = ServeOptions(
        model=str(folder),
        prefill=prefill,
        decode=decode,
        combined=combined,
        port=0,
        engine=EngineOptions(**({"threads": 1} | engine)),
        log=LogOptions(log_level="warning"),
    )
    async with session_of_many() as session, Fleet(options) as fleet:
        client = Client(session, fleet.url, fleet.model_name)
        await client.until_tested(0 if combined else prefill * decode)
        yield client


def session_of_many() -> aiohttp.ClientSession:
    """A client's connections, as many at once as it likes."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    stdout: str
    stderr: str


async def run(*arguments: str, environ: dict[str, str] | None = None) -> Ended:
    """Run `neuron-di` with these arguments to its end."""
    async with command(*arguments, environ=environ) as process:
        async with asyncio.timeout(DEADLINE_S):
            stdout, stderr = await process.communicate()
        assert process.returncode is not None
        assert children_of(process.pid) == []
        return Ended(process.returncode, stdout.decode(), stderr.decode())


@asynccontextmanager
async def command(
    *arguments: str, environ: dict[str, str] | None = None, within: Sequence[str] = ()
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`neuron-di` with these arguments, running. It is killed at the end, if it still runs.

    `within` is a command that runs it, and ends it when killed.
    """
    process = await asyncio.create_subprocess_exec(
        *within,
        sys.executable,
        "-m",
        "neuron_di",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=None if environ is None else psutil.Process().environ() | environ,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()  # to the end of the pipes
        await eventually(lambda: _none_if(children_of(process.pid)))


@dataclass(frozen=True, slots=True)
class Part:
    """A proxy or a worker on its own: where it serves, and a proxy's registry."""

    process: asyncio.subprocess.Process
    url: str
    registry: str | None = None


@asynccontextmanager
async def part(*arguments: str, within: Sequence[str] = ()) -> AsyncIterator[Part]:
    """`neuron-di proxy …` or `neuron-di worker …`, ready."""
    async with command(*arguments, within=within) as process:
        ready = await said(process, r"event=ready .*url=(\S+)(?: registry=(tcp:\S+))?")
        yield Part(process, ready[1], ready[2])


async def said(process: asyncio.subprocess.Process, pattern: str) -> re.Match[str]:
    """Read standard error up to the line in which `pattern` is found."""
    assert process.stderr is not None
    lines: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        while line := (await process.stderr.readline()).decode():
            if found := re.search(pattern, line):
                return found
            lines.append(line)
    raise AssertionError(f"{pattern!r} was never said: {''.join(lines)}")


def children_of(launcher_pid: int) -> list[psutil.Process]:
    """The processes that were started by this `serve`, also when it is gone."""
    flag = f"--parent-pid={launcher_pid}"
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if flag in (process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


async def _none_if(processes: list[psutil.Process]) -> bool | None:
    return None if processes else True
