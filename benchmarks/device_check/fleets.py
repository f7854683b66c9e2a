"""Servers for the parts that need a whole one."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.device_check.settings import Settings
from neuron_di.config import ByteSize, EngineOptions, LogOptions, ServeOptions
from neuron_di.serve import Fleet

_MPS_TIMEOUT_S = 30.0
_MPS_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


def fleet(
    settings: Settings,
    model: Path,
    *,
    combined: bool = False,
    decode: int = 1,
    batch_invariant: bool = False,
) -> Fleet:
    """Of one GPU, which its workers share. Small in a rehearsal: a step takes tens of ms there."""
    engine: dict[str, Any] = {"device": settings.device}
    if settings.device == "cuda":
        from neuron_di.config import CudaOptions

        engine["cuda"] = CudaOptions(batch_invariant=batch_invariant)
    if settings.is_small:
        engine |= {"context_tokens": 160, "decode_batch": 4, "chunk_tokens": 32, "threads": 1}
        engine |= {"dtype": "float32"}
    else:
        # Long prompts in large pieces; a pool of 8 GiB is 64k positions of the 8b model.
        engine |= {"context_tokens": 16_384, "decode_batch": 64, "chunk_tokens": 2048}
        engine |= {"kv_memory": ByteSize(8 << 30)}
    options = ServeOptions(
        model=str(model),
        combined=combined,
        decode=decode,
        port=0,
        engine=EngineOptions(**engine),
        log=LogOptions(log_level="warning"),
    )
    return Fleet(options)


@contextlib.contextmanager
def mps() -> Iterator[bool]:
    """A CUDA MPS server of our own, whose clients are the processes that are started meanwhile.

    False where this machine has none, or it does not start. No setting of the GPU is changed.
    """
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        yield False
        return
    before = {name: os.environ.get(name) for name in _MPS_VARIABLES}
    with tempfile.TemporaryDirectory(prefix="device-check-mps-") as folder:
        os.environ.update(dict.fromkeys(_MPS_VARIABLES, folder))
        try:
            started = subprocess.run([program, "-d"], timeout=_MPS_TIMEOUT_S)
            yield started.returncode == 0
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([program], input=b"quit\n", timeout=_MPS_TIMEOUT_S)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
