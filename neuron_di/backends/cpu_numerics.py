"""What decides how torch rounds on this processor, apart from a worker's options.

Its libraries (MKL, oneDNN, ATen) each choose their code when they are loaded: by the processor's
maker, by its instruction sets, and by variables that restrict them.
"""

import hashlib
import os
import re
from pathlib import Path

import torch

from neuron_di.errors import ConfigError

# Of x86: maker and model, and what it can. Of ARM: the same by other names.
_FIELDS = (
    "vendor_id",
    "cpu family",
    "model",
    "flags",
    "CPU implementer",
    "CPU variant",
    "CPU part",
    "Features",
)
_RESTRICTIONS = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)


def torch_rounding(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Words without blanks between the parts, as `torch=2.13.0+cpu/AVX512/7c0f2a91`.

    Workers of which it is the same round alike, as far as torch is concerned. The digest is of the
    processor's maker, model and instruction sets, and of what restricts the libraries. Where the
    kernel tells nothing of the processor, two unlike ones may look the same.
    """
    try:
        first_core = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        first_core = ""
    found = [
        f"{name}={' '.join(filter(_computes, value.split())) if name == 'flags' else value}"
        for name, value in re.findall(r"^(.*?)[ \t]*:[ \t]*(.*)$", first_core, re.MULTILINE)
        if name in _FIELDS
    ]
    found += [f"{name}={os.environ[name]}" for name in _RESTRICTIONS if os.environ.get(name)]
    digest = hashlib.sha256("\n".join(found).encode()).hexdigest()[:8]
    return f"torch={torch.__version__}/{torch.backends.cpu.get_cpu_capability()}/{digest}"


def _computes(flag: str) -> bool:
    """Most of x86's flags say what the kernel minds, and are others after its next update."""
    return flag.startswith(("sse", "ssse", "avx", "amx", "fma", "f16c"))


_threaded_pid: int | None = None  # the process whose torch has been given several threads


def set_threads(num_threads: int) -> None:
    """Let torch, and OpenMP, have so many here.

    ConfigError in a process that was forked from one that had several: OpenMP knows of threads
    which did not come along, and would wait for them for ever.
    """
    global _threaded_pid
    if num_threads > 1:
        if _threaded_pid not in (None, os.getpid()):
            raise ConfigError(
                f"a process forked from one that computes on several threads cannot use "
                f"{num_threads} itself: start it with multiprocessing's `spawn`, or give threads=1"
            )
        _threaded_pid = os.getpid()
    torch.set_num_threads(num_threads)


def require_threads(num_threads: int, dtype: str) -> None:
    """ConfigError where OpenMP may give torch fewer threads than it was told of.

    Its bfloat16 products divide their work by what it was told: what the missing threads should
    have computed stays as the memory was.
    """
    if dtype != "bfloat16" or num_threads == 1:
        return
    limit = os.environ.get("OMP_THREAD_LIMIT", "").strip()
    if os.environ.get("OMP_DYNAMIC", "").strip().lower() == "true":
        name = "OMP_DYNAMIC"
    elif limit.isdecimal() and int(limit) < num_threads:
        name = "OMP_THREAD_LIMIT"
    else:
        return
    raise ConfigError(
        f"{name}={os.environ[name]} may give torch fewer than {num_threads} threads, and its "
        "bfloat16 products are wrong then: unset it, or give a --threads that it allows"
    )
