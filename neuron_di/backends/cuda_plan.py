"""How a model would run on an NVIDIA GPU, and what memory of it that takes.

Said before anything is loaded. Of the GPU's memory this worker counts on its share: what is free
now, divided among the workers that are started on it together.
"""

from dataclasses import dataclass
from pathlib import Path

from neuron_di.backends.cuda_device import CudaDevice
from neuron_di.backends.memory import MemoryPlan
from neuron_di.backends.open_backend import DevicePlan
from neuron_di.config import EngineOptions
from neuron_di.errors import ConfigError
from neuron_di.kv import DTYPE_BYTES, KvLayout
from neuron_di.kv.device_pool import open_runtime
from neuron_di.models import ModelSpec

# cuBLAS's workspaces, kernels' code, graphs, and what torch's allocator cannot use of what it took.
_LIBRARIES_BYTES = 512 << 20
_FREE_SHARE = 0.9  # of what weights and workspace leave: nobody else may take the rest meanwhile
_BYTES_PER_LOGIT = 4 + 4 + 8  # in the compute dtype's product, in float32, and while it is sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaPlan(DevicePlan):
    """What the backend opens."""

    device: CudaDevice
    workspace_bytes: int
    has_graphs: bool
    is_invariant: bool
    decode_batch: int

    def free_bytes(self) -> int:
        return self.device.free_bytes()

    def pool_bytes(self, spec: ModelSpec, available_bytes: int) -> int:
        left = available_bytes - spec.weight_bytes(self.dtype) - self.workspace_bytes
        return int(max(0, left) * _FREE_SHARE)

    def memory_plan(self, spec: ModelSpec, layout: KvLayout, num_blocks: int) -> MemoryPlan:
        return MemoryPlan(
            weights_bytes=spec.weight_bytes(layout.dtype),
            pool_bytes=num_blocks * layout.block_bytes,
            workspace_bytes=self.workspace_bytes,
            num_blocks=num_blocks,
            block_bytes=layout.block_bytes,
        )


def plan_device(options: EngineOptions, spec: ModelSpec, folder: Path) -> CudaPlan:  # noqa: ARG001
    """What cannot work is found out here, before anything is loaded: ConfigError says what."""
    if options.tp != 1:
        raise ConfigError(
            f"--tp {options.tp}: a worker on --device cuda has one GPU. Mend: more workers "
            "(--prefill, --decode), each with the whole model",
            param="tp",
        )
    cuda = options.cuda
    index = _index(cuda.cuda_devices[0]) if cuda.cuda_devices else 0
    device = CudaDevice.open(index, open_runtime())
    from neuron_di.backends.cuda_kernels import HEAD_DIM_MAX

    if spec.head_dim > HEAD_DIM_MAX:
        raise ConfigError(
            f"the model's heads have {spec.head_dim} dims, and the kernels for CUDA do at most "
            f"{HEAD_DIM_MAX}"
        )
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    return CudaPlan(
        dtype=dtype,
        block_size=options.block_size,
        num_ranks=1,
        chunk_tokens=options.chunk,
        workspace_tokens=0,
        device=device,
        workspace_bytes=_workspace_bytes(spec, dtype, options),
        num_sharing=cuda.cuda_share,
        has_graphs=cuda.cuda_graphs,
        is_invariant=cuda.batch_invariant,
        decode_batch=options.decode_batch,
    )


def _index(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"--cuda-devices {text}: GPUs have numbers, from 0", param="cuda_devices")
    return int(text)


def _workspace_bytes(spec: ModelSpec, dtype: str, options: EngineOptions) -> int:
    """A layer's activations in the largest step, the logits of each graph, the table of angles."""
    query = spec.num_heads * spec.head_dim
    rows = max(options.chunk, options.decode_batch)
    activations = rows * (4 * spec.hidden + spec.num_qkv + 2 * query + 4 * spec.intermediate)
    logits = 3 * options.decode_batch * spec.num_vocab * _BYTES_PER_LOGIT
    angles = spec.head_dim * spec.context_tokens * 4
    return activations * DTYPE_BYTES[dtype] + logits + angles + _LIBRARIES_BYTES
