"""Which of torch's, Triton's and CUDA's errors a GPU comes back from."""

import torch

from neuron_di.errors import BackendLost
from neuron_di_bindings.cuda_runtime import CudaError

# cudaErrorInvalidValue, cudaErrorMemoryAllocation: errors of one call.
_CODES_OF_A_CALL = (1, 2)
# How the libraries begin what CUDA told them: torch, with cuBLAS's errors too, and Triton.
_PREFIXES = ("CUDA error: ", "Triton Error [CUDA]: ")
# A cuBLAS handle that finds no memory says that it was not initialised.
_OUT_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
)


def lost_by(error: BaseException) -> BackendLost | None:
    """Why no further step can succeed in this process; None: the next one may.

    After an illegal address, a failed launch or a fault of the hardware every CUDA call of the
    process fails: its context is lost. Memory that is short, and kernels that do not fit the
    device, cost the step alone.
    """
    text = first_line(error)
    if isinstance(error, CudaError):
        is_lost = error.code not in _CODES_OF_A_CALL
    elif isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and text.startswith(_PREFIXES)
    ):
        is_lost = not any(words in text for words in _OUT_OF_MEMORY)
    else:  # torch's OutOfMemoryError is one of these
        is_lost = False
    return BackendLost(f"the GPU failed: {text}") if is_lost else None


def first_line(error: BaseException) -> str:
    """Without torch's advice on debugging."""
    return str(error).strip().partition("\n")[0]
