"""A machine with simulated NeuronCores, and what is started on it.

So far this has run on a simulator of libnrt only.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from chaos.fault_proxy import free_ports
from nrt_sim.build import library_path
from process_kit import Ended, run
from serving_kit import Serving, serving

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

    def serving(self, *arguments: str) -> AbstractAsyncContextManager[Serving]:
        """`neuron-di serve`, ready. At the end it is asked to stop, and does so in good order."""
        words = self.serve_arguments("--log-level=error", *arguments)
        return serving(words, self.model.name, self.environ)

    def _shape(self) -> tuple[str, ...]:
        return (*SHAPE, f"--neuron-artifacts={self.artifacts}")


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
