"""What `serve --device cuda` says where it cannot: exit code 2, the cause, the mend."""

from pathlib import Path

import pytest
import torch
from contract.fake_cuda import WHY_NOT, library_path
from process_kit import run

from neuron_di_bindings.cuda_runtime import PATH_VARIABLE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.skipif(torch.cuda.is_available(), reason="here it can"),
]


@pytest.mark.parametrize(
    ("runtime", "arguments", "words"),
    [
        ("/nowhere/libcudart.so", (), ["nvidia-smi", ".[cuda]", "--device cpu"]),
        (None, ("--cuda-devices=0,9",), ["--cuda-devices 9", "shows GPU 0,"]),
        (None, ("--cuda-devices=0,0",), ["names a GPU twice"]),
        (None, ("--tp=2",), ["--tp 2", "one GPU"]),
    ],
)
async def test_it_says_why(
    llama: Path, runtime: str | None, arguments: tuple[str, ...], words: list[str]
) -> None:
    environ = {PATH_VARIABLE: runtime or str(library_path()), "TRITON_INTERPRET": "0"}
    ended = await run("serve", str(llama), "--port=0", "--device=cuda", *arguments, environ=environ)
    assert ended.code == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert [word for word in words if word not in ended.stderr] == [], ended.stderr


async def test_a_machine_without_what_computes(llama: Path) -> None:
    """Which of these it lacks first, that depends on what is installed."""
    environ = {PATH_VARIABLE: str(library_path()), "TRITON_INTERPRET": "0"}
    ended = await run("serve", str(llama), "--port=0", "--device=cuda", environ=environ)
    assert ended.code == 2, ended.stderr
    words = ("PyTorch built for CUDA", "needs Triton", "finds no NVIDIA GPU")
    assert any(each in ended.stderr for each in words), ended.stderr
