"""A short-lived process that asks CUDA, and torch. Started by `cuda`, never imported.

It allocates nothing on a device, so a server that runs there keeps all its memory.
"""

import os
import sys

from neuron_di.doctor.steps import Facts, take
from neuron_di_bindings.cuda_runtime import CudaError, CudaMissing, CudaRuntime, load_cuda


def probe() -> None:
    """Steps "runtime", "ipc", "torch" and "triton"."""
    loaded: list[CudaRuntime] = []
    if take("runtime", lambda: _runtime(loaded)):
        take("ipc", lambda: _ipc(loaded[0]))
    take("torch", _torch)
    take("triton", _triton)


def _runtime(loaded: list[CudaRuntime]) -> Facts:
    try:
        runtime = load_cuda()
    except CudaMissing as error:
        return {"failed": str(error)}
    loaded.append(runtime)
    return {"version": runtime.version, "num_devices": runtime.num_devices()}


def _ipc(runtime: CudaRuntime) -> Facts:
    """Which devices share memory with other processes, and which pairs read each other's."""
    devices = range(runtime.num_devices())
    try:
        shares = [device for device in devices if runtime.shares_events(device)]
        apart = [
            [device, peer]
            for device in devices
            for peer in devices
            if device < peer and not runtime.can_access_peer(device, peer)
        ]
    except CudaError as error:
        return {"failed": str(error)}
    return {"shares": shares, "apart": apart}


def _torch() -> Facts:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # does not start CUDA
    try:
        import torch
    except ImportError as error:
        return {"failed": str(error)}
    is_available = torch.cuda.is_available()
    devices = range(torch.cuda.device_count() if is_available else 0)
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "is_available": is_available,
        "names": [torch.cuda.get_device_name(device) for device in devices],
        "capabilities": [list(torch.cuda.get_device_capability(device)) for device in devices],
    }


def _triton() -> Facts:
    import triton

    return {"version": str(triton.__version__)}


if __name__ == "__main__":
    probe()
    sys.stdout.flush()
