"""What a GPU's errors cost: a step, or the process. They are torch's own, raised by hand."""

import pytest

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

import torch
from backend_kit import decode, make_request, prefill, random_prompt
from cuda_backend_kit import NUM_BLOCKS, opened_cuda

from neuron_di.backends.cuda_faults import lost_by
from neuron_di.core import PrefillChunk
from neuron_di.errors import BackendLost, ConfigError
from neuron_di.types import Incarnation
from neuron_di_bindings.cuda_runtime import CudaError

ILLEGAL = "CUDA error: an illegal memory access was encountered"


def fail_with(error):
    def fail(*_args, **_kwargs):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "is_end"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("The size of tensor a must match"), False),
        (ValueError("CUDA error"), False),
        (torch.AcceleratorError(f"{ILLEGAL}\nCUDA kernel errors might be reported later"), True),
        (RuntimeError(f"Triton Error [CUDA]: {ILLEGAL}"), True),
        (CudaError("cudaEventRecord", 700, "cudaErrorIllegalAddress"), True),
        (CudaError("cudaMalloc", 2, "cudaErrorMemoryAllocation"), False),
        (torch.AcceleratorError("CUDA error: out of memory\nmore"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublas`"), True),
    ],
)
def test_which_errors_are_the_end(error, is_end):
    lost = lost_by(error)
    assert (lost is not None) == is_end
    if lost is not None:
        assert "\n" not in lost.message


def test_a_step_without_memory_costs_that_step(llama_folder, monkeypatch):
    with opened_cuda(llama_folder) as backend:
        lost = []
        backend.watch(lost.append)
        request = make_request(random_prompt(5), [4])
        prefill(backend, request)
        error = torch.cuda.OutOfMemoryError("CUDA out of memory")
        with monkeypatch.context() as patch:
            patch.setattr(backend._computing.steps, "run", fail_with(error))
            with pytest.raises(torch.cuda.OutOfMemoryError):
                decode(backend, request)
        backend.quiesce(request.block_ids)
        decode(backend, request)
        assert lost == []


def test_a_device_that_fails_is_lost_once_and_for_all_steps(llama_folder, monkeypatch):
    with opened_cuda(llama_folder) as backend:
        lost = []
        backend.watch(lost.append)
        request = make_request(random_prompt(5), [4])
        prefill(backend, request)
        with monkeypatch.context() as patch:
            steps = backend._computing.steps
            patch.setattr(steps, "run", fail_with(torch.AcceleratorError(ILLEGAL)))
            with pytest.raises(BackendLost, match="illegal memory access"):
                decode(backend, request)
        for step in (
            lambda: decode(backend, request),
            lambda: backend.prefill(PrefillChunk.next_of(make_request([1, 2], [5]), 8)),
            lambda: backend.draw(torch.zeros(1, 8), [request]),
        ):
            with pytest.raises(BackendLost):
                step()
        backend.quiesce(request.block_ids)  # nothing runs there any more
        assert [each.message for each in lost] == [f"the GPU failed: {ILLEGAL}"]
        late = []
        backend.watch(late.append)
        assert len(late) == 1
        backend.close_pool()
        with pytest.raises(ConfigError, match="only a new process"):
            backend.open_pool(NUM_BLOCKS, Incarnation("d" * 32))


def test_a_draw_that_finds_the_device_lost(llama_folder, monkeypatch):
    """Kernels fail later than they are launched: where somebody waits for them."""
    with opened_cuda(llama_folder) as backend:
        request = make_request(random_prompt(5), [4])
        prefill(backend, request)
        logits = decode(backend, request)
        monkeypatch.setattr(backend, "_draw", fail_with(torch.AcceleratorError(ILLEGAL)))
        with pytest.raises(BackendLost):
            backend.draw(logits, [request])


def test_weights_that_do_not_fit(llama_folder, monkeypatch):
    error = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")
    monkeypatch.setattr("neuron_di.backends.cuda.load_weights", fail_with(error))
    with (
        pytest.raises(ConfigError, match="ran out of memory while the model was loaded"),
        opened_cuda(llama_folder),
    ):
        raise AssertionError("it was opened")
