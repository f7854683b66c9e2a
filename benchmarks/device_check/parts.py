"""The parts of the device check, in their order: each is a module with `measure`."""

from dataclasses import dataclass

from benchmarks.device_check.budget import Times

_MODEL = ("msgspec", "numpy", "torch", "tokenizers", "safetensors", "jinja2", "xxhash")
_TRANSFER = (*_MODEL, "zmq", "rich", "psutil")
_SERVE = (
    *(*_MODEL, "zmq", "aiohttp", "quart", "hypercorn", "httptools", "uvloop", "rich"),
    *("llguidance", "prometheus_client", "psutil"),
)
_TESTS = ("pytest", "pytest_timeout", "numpy", "torch")


@dataclass(frozen=True, slots=True)
class Part:
    """`needs` are modules: without one of them the part is skipped."""

    name: str
    title: str
    module: str
    times: Times
    needs: tuple[str, ...] = ()


def _part(
    name: str, title: str, deadline_s: float, least_s: float, needs: tuple[str, ...] = ()
) -> Part:
    module = f"benchmarks.device_check.part_{name}"
    return Part(name, title, module, Times(deadline_s, least_s), needs)


PARTS = (
    _part("environment", "The machine", 120, 10),
    _part("build", "C extensions", 240, 10),
    _part("kernels", "Tests: Triton kernels on the GPU", 540, 60, (*_TESTS, "triton")),
    _part("ipc", "Tests: CUDA IPC between processes", 180, 20, (*_TESTS, *_MODEL)),
    _part("backend", "Tests: the backend", 420, 30, (*_TESTS, *_MODEL, "triton")),
    _part("models", "Random checkpoints", 300, 30, _MODEL),
    _part("equality", "Tokens against the CPU backend", 420, 60, (*_MODEL, "triton")),
    _part("attention", "Attention beside torch's own", 240, 40, ("msgspec", "torch", "triton")),
    _part("decode", "Decode", 540, 60, (*_MODEL, "triton")),
    _part("prefill", "Prefill", 300, 40, (*_MODEL, "triton")),
    _part("invariant", "What batch invariance costs", 300, 40, (*_MODEL, "triton")),
    _part("profile", "Where the time goes", 240, 40, (*_MODEL, "triton")),
    _part("transfer", "KV between two processes on one GPU", 180, 20, _TRANSFER),
    _part("interference", "Decode while KV arrives", 240, 40, (*_TRANSFER, "triton")),
    _part("pair", "1P1D beside combined on one GPU", 540, 100, (*_SERVE, "triton")),
    _part("faults", "Bad input and faults", 420, 60, (*_SERVE, "triton")),
)
BY_NAME = {part.name: part for part in PARTS}
