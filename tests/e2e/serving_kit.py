"""`neuron-di serve` as a command, ready, with a client."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from openai_kit import DEADLINE_S, Client
from process_kit import command, said, session_of_many


@dataclass(frozen=True, slots=True)
class Serving:
    """A running `neuron-di serve`: its process, a client, and the children it began with."""

    process: Any
    client: Client
    pids: dict[str, int]


@asynccontextmanager
async def serving(
    words: Sequence[str], model_name: str, environ: dict[str, str]
) -> AsyncIterator[Serving]:
    """Run these words. At the end it is asked to stop, and does so in good order."""
    async with (
        command(*words, environ=environ) as process,
        session_of_many() as session,
    ):
        url = (await said(process, r"^serving \S+ at (http://\S+)/v1$"))[1]
        pids = (await said(process, r"^  (proxy .*)$"))[1]
        yield Serving(process, Client(session, url, model_name), _pids(pids))
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(DEADLINE_S):
            await process.communicate()
        assert process.returncode == 0


def _pids(line: str) -> dict[str, int]:
    return {name: int(pid) for name, pid in re.findall(r"(\S+) \(pid (\d+)\)", line)}
