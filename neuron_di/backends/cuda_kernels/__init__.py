"""What the CUDA backend computes with: Triton kernels as plain functions on torch's tensors.

Importing it needs Triton, and raises ConfigError without; nothing else in neuron_di imports it.
Each kernel names what of it is untuned; tests have its reference in plain torch. Grids depend on
shapes only, so all of it can be captured in a CUDA graph. In float32 no product uses tf32.

None of this has run on a GPU: it was compared with the references in Triton's interpreter, on a
CPU, and compiled for compute capability 9.0.
"""

from neuron_di.backends.cuda_kernels.decode_attention import (
    INVARIANT_SPLITS,
    attend_decode,
    num_decode_splits,
)
from neuron_di.backends.cuda_kernels.key_tiles import HEAD_DIM_MAX
from neuron_di.backends.cuda_kernels.linear import invariant_linear
from neuron_di.backends.cuda_kernels.norm import add_and_norm_, rms_norm
from neuron_di.backends.cuda_kernels.prefill_attention import attend_prefill
from neuron_di.backends.cuda_kernels.sampling import DrawRules, choose, choose_greedy
from neuron_di.backends.cuda_kernels.silu import silu_and_multiply
from neuron_di.backends.cuda_kernels.write_kv import write_kv_

__all__ = [
    "HEAD_DIM_MAX",
    "INVARIANT_SPLITS",
    "DrawRules",
    "add_and_norm_",
    "attend_decode",
    "attend_prefill",
    "choose",
    "choose_greedy",
    "invariant_linear",
    "num_decode_splits",
    "rms_norm",
    "silu_and_multiply",
    "write_kv_",
]
