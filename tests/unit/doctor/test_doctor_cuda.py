"""The doctor on NVIDIA GPUs, with a CUDA library of the tests' own: a real one needs a GPU."""

import os
import subprocess
import sys

import pytest
from neuron_machines import by_name, laptop, options
from nrt_sim.build import compiler

from neuron_di.doctor import cuda
from neuron_di.doctor.finding import Grade
from neuron_di.doctor.machine import Machine

_NAMES = (
    *("cudaSetDevice", "cudaGetDevice", "cudaMalloc", "cudaFree", "cudaIpcGetMemHandle"),
    *("cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"),
)


def make_cuda(folder, *, version=12_090, devices=2, status=0, shares=1):
    """A CUDA runtime with this many devices; `status` is what counting them answers."""
    source, library = folder / "cudart.c", folder / "libcudart.so.12"
    stubs = "".join(f"int {name}(void) {{ return 1; }}\n" for name in _NAMES)
    source.write_text(
        f"{stubs}"
        'const char *cudaGetErrorName(int code) { return "cudaErrorInsufficientDriver"; }\n'
        "int cudaGetLastError(void) { return 0; }\n"
        f"int cudaRuntimeGetVersion(int *n) {{ *n = {version}; return 0; }}\n"
        f"int cudaGetDeviceCount(int *n) {{ *n = {devices}; return {status}; }}\n"
        f"int cudaDeviceGetAttribute(int *n, int a, int d) {{ *n = {shares}; return 0; }}\n"
        "int cudaDeviceCanAccessPeer(int *n, int d, int p) { *n = 0; return 0; }\n"
    )
    command = [compiler(), "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return {"PATH": os.environ["PATH"], "NEURON_DI_CUDART": str(library)}


def with_gpus(folder, files=2):
    root = laptop(folder)
    for number in range(2):
        place = f"/sys/bus/pci/devices/0000:5{number}:00.0"
        root.file(f"{place}/vendor", "0x10de\n")
        root.file(f"{place}/class", "0x030200\n")
    root.file("/sys/module/nvidia/version", "570.133.20\n")
    for number in range(files):
        root.file(f"/dev/nvidia{number}")
    return root


def findings(root, environment, device="auto"):
    looked_at = Machine(root=root.folder, environment=environment)
    return by_name(cuda.check(looked_at, options(device)))


def test_no_gpu(tmp_path):
    root, bare = laptop(tmp_path), {"PATH": os.environ["PATH"]}
    assert findings(root, bare)["cuda.devices"].grade == Grade.NOTE
    assert findings(root, bare, "cuda")["cuda.devices"].grade == Grade.FAILED
    assert findings(root, bare, "cpu") == {}


def test_gpus_whose_memory_can_be_shared(tmp_path):
    found = findings(with_gpus(tmp_path / "root"), make_cuda(tmp_path))
    assert found["cuda.devices"].says == "2 NVIDIA GPUs, driver 570.133.20"
    assert found["cuda.runtime"].grade == found["cuda.ipc"].grade == Grade.OK
    assert found["cuda.runtime"].says == "CUDA 12.9 sees 2 devices"
    assert found["cuda.ipc"].facts["shares"] == [0, 1]
    assert "of 1 pair of GPUs neither reads the other" in found["cuda.ipc"].says


def test_gpus_whose_memory_cannot(tmp_path):
    found = findings(with_gpus(tmp_path / "root"), make_cuda(tmp_path, shares=0))
    assert found["cuda.ipc"].grade == Grade.WARNING


DEVICES = pytest.mark.parametrize(
    ("device", "grade"), [("auto", Grade.WARNING), ("cuda", Grade.FAILED)]
)


@DEVICES
def test_a_driver_that_is_older_than_the_library(tmp_path, device, grade):
    found = findings(with_gpus(tmp_path / "root"), make_cuda(tmp_path, status=35), device)
    assert found["cuda.runtime"].grade == grade
    assert ("--device cpu" in found["cuda.runtime"].mend) == (device == "auto")
    assert "cudaErrorInsufficientDriver" in found["cuda.runtime"].says
    assert "cuda.ipc" not in found


@DEVICES
def test_a_container_without_the_gpus(tmp_path, device, grade):
    found = findings(with_gpus(tmp_path / "root", files=0), make_cuda(tmp_path), device)
    assert found["cuda.devices"].grade == grade
    assert ("--device cpu" in found["cuda.devices"].mend) == (device == "auto")
    assert "--gpus all" in found["cuda.devices"].mend


@pytest.mark.parametrize(("device", "grade"), [("auto", Grade.WARNING), ("cuda", Grade.FAILED)])
def test_a_torch_that_was_built_without_cuda(tmp_path, device, grade):
    """The build of this environment, as long as it is one."""
    import torch

    if torch.version.cuda is not None:
        pytest.skip("torch has CUDA here")
    found = findings(with_gpus(tmp_path / "root"), make_cuda(tmp_path), device)["cuda.torch"]
    assert found.grade == grade
    assert "is built without CUDA" in found.says


def test_the_probe_loads_nothing_heavy_before_it_must():
    script = "import sys, neuron_di.doctor.cuda_probe; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


_TORCH = """
from types import SimpleNamespace
__version__ = "9.9"
version = SimpleNamespace(cuda="12.9")
_capabilities = {capabilities}
cuda = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: len(_capabilities),
    get_device_name=lambda device: "Some GPU",
    get_device_capability=lambda device: _capabilities[device],
)
"""


def with_modules(folder, environment, **sources):
    """Of a GPU's machine, which this one is not: what torch and Triton say there."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    return environment | {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("capabilities", "device", "grade", "mend"),
    [
        ([(9, 0), (8, 0)], "cuda", Grade.OK, ""),
        ([(7, 5), (8, 6)], "cuda", Grade.WARNING, "--cuda-devices 1."),
        ([(7, 5)], "cuda", Grade.FAILED, "newer GPU"),
        ([(7, 5)], "auto", Grade.WARNING, "--device cpu"),
    ],
)
def test_the_capability_that_kernels_need(tmp_path, capabilities, device, grade, mend):
    torch = _TORCH.format(capabilities=capabilities)
    environment = with_modules(tmp_path, make_cuda(tmp_path), torch=torch)
    found = findings(with_gpus(tmp_path / "root"), environment, device)
    assert found["cuda.torch"].says == "torch 9.9 with CUDA 12.9"
    assert found["cuda.capability"].grade == grade
    assert mend in found["cuda.capability"].mend
    first = ".".join(map(str, capabilities[0]))
    assert f"GPU 0 (Some GPU) {first}" in found["cuda.capability"].says


def test_the_capability_is_the_backends():
    from neuron_di.backends import cuda_device

    assert cuda.CAPABILITY_MIN == cuda_device.CAPABILITY_MIN


@DEVICES
def test_triton_that_is_not_there(tmp_path, device, grade):
    missing = "raise ImportError('no Triton')"
    torch = _TORCH.format(capabilities=[])
    environment = with_modules(tmp_path, make_cuda(tmp_path), torch=torch, triton=missing)
    found = findings(with_gpus(tmp_path / "root"), environment, device)["cuda.triton"]
    assert found.grade == grade
    assert found.says == "Triton cannot be imported: no Triton"
    assert "pip install '.[cuda]'" in found.mend


def test_triton_that_is_there(tmp_path):
    environment = with_modules(tmp_path, make_cuda(tmp_path), triton="__version__ = '3.6.0'")
    found = findings(with_gpus(tmp_path / "root"), environment)["cuda.triton"]
    assert (found.grade, found.says) == (Grade.OK, "Triton 3.6.0")
