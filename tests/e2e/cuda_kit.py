"""A machine with a simulated NVIDIA GPU: Triton's interpreter computes, in "device" memory that the
CUDA runtime's simulator keeps.

So far --device cuda has run like this only.
"""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
from contract.fake_cuda import WHY_NOT, library_path
from process_kit import Ended, run
from serving_kit import Serving, serving

from neuron_di_bindings.cuda_runtime import PATH_VARIABLE

# Small: an interpreted step takes tens of milliseconds.
SHAPE = ("--context-tokens=160", "--decode-batch=4", "--chunk-tokens=32", "--threads=1")

needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or WHY_NOT is not None,
    reason=WHY_NOT or "Triton, of the extra `dev`, is missing",
)


@dataclass(frozen=True, slots=True)
class GpuHost:
    """What its processes find in their environment, and the model that is served there."""

    model: Path
    environ: dict[str, str] = field(default_factory=dict)

    @classmethod
    def simulated(cls, model: Path) -> "GpuHost":
        return cls(model, {PATH_VARIABLE: str(library_path()), "TRITON_INTERPRET": "1"})

    def with_(self, **environ: str) -> "GpuHost":
        return GpuHost(self.model, self.environ | environ)

    async def serve(self, *arguments: str) -> Ended:
        """`neuron-di serve` that is expected to say no."""
        return await run(*self._words(*arguments), environ=self.environ)

    def serving(self, *arguments: str) -> AbstractAsyncContextManager[Serving]:
        """`neuron-di serve`, ready. At the end it is asked to stop, and does so in good order."""
        return serving(self._words(*arguments), self.model.name, self.environ)

    def _words(self, *arguments: str) -> list[str]:
        common = ("serve", str(self.model), "--port=0", "--device=cuda", "--log-level=error")
        dtype = [] if any(word.startswith("--dtype") for word in arguments) else ["--dtype=float32"]
        return [*common, *SHAPE, *dtype, *arguments]
