"""A machine with simulated NeuronCores, and what is started on it.

So far this has run on a simulator of libnrt only.
"""

import asyncio
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.fault_proxy import free_ports
from nrt_sim.build import library_path
from openai_kit import DEADLINE_S, Client
from process_kit import Ended, command, run, said, session_of_many

TESTS = Path(__file__).parents[1]
STAND_IN = TESTS / "neuron_stand_in"

# As small as the prompts allow: slots are as long as the context.
SHAPE = ("--context-tokens=256", "--decode-batch=4", "--dtype=float32")


@dataclass(frozen=True, slots=True)
class Host:
    """One simulated host. `root` is what its processes share: who has which core."""

    root: str
    artifacts: Path
    model: Path
    environ: dict[str, str] = field(default_factory=dict)

    def with_(self, **environ: str) -> "Host":
        return Host(self.root, self.artifacts, self.model, self.environ | environ)

    async def run(self, *arguments: str) -> Ended:
        """`neuron-di` with these arguments, to its end."""
        return await run(*arguments, environ=self.environ)

    async def compile(self, *arguments: str) -> Ended:
        return await self.run("compile", str(self.model), *self._shape(), *arguments)

    def serve_arguments(self, *arguments: str) -> list[str]:
        common = ("serve", str(self.model), "--port=0", "--device=neuron", "--threads=1")
        return [*common, *self._shape(), *arguments]

    @asynccontextmanager
    async def serving(self, *arguments: str) -> AsyncIterator["Serving"]:
        """`neuron-di serve`, ready. At the end it is asked to stop, and does so in good order."""
        words = self.serve_arguments("--log-level=error", *arguments)
        async with (
            command(*words, environ=self.environ) as process,
            session_of_many() as session,
        ):
            url = (await said(process, r"^serving \S+ at (http://\S+)/v1$"))[1]
            pids = (await said(process, r"^  (proxy .*)$"))[1]
            yield Serving(process, Client(session, url, self.model.name), _pids(pids))
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(DEADLINE_S):
                await process.communicate()
            assert process.returncode == 0

    def _shape(self) -> tuple[str, ...]:
        return (*SHAPE, f"--neuron-artifacts={self.artifacts}")


@dataclass(frozen=True, slots=True)
class Serving:
    """A running `neuron-di serve`: its process, a client, and the children it began with."""

    process: Any
    client: Client
    pids: dict[str, int]


@contextmanager
def simulated_host(model: Path, artifacts: Path) -> Iterator[Host]:
    """A trn1.32xlarge. Nobody else is on it."""
    # Sockets lie in there, and their paths have to be short.
    with tempfile.TemporaryDirectory(prefix="nrt-") as root:
        (port,) = free_ports(1)
        paths = [str(STAND_IN), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environ = {
            "NEURON_DI_LIBNRT": str(library_path()),
            "NRT_SIM_INSTANCE": "trn1.32xlarge",
            "NRT_SIM_ROOT": root,
            "NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT": str(port),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        yield Host(root, artifacts, model, environ)


def has_compiler() -> bool:
    return shutil.which("gcc") is not None or shutil.which("cc") is not None


def _pids(line: str) -> dict[str, int]:
    return {name: int(pid) for name, pid in re.findall(r"(\S+) \(pid (\d+)\)", line)}
