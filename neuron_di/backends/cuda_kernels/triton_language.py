"""Triton, for the files that define kernels: where it is missing, importing them says the mend.

With TRITON_INTERPRET=1, set before Triton is first imported, all kernels run on the CPU, slowly.
"""

from collections.abc import Callable
from typing import Any

from neuron_di.errors import ConfigError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ConfigError(
        f"--device cuda needs Triton ({error}): pip install '.[cuda]' in neuron-di's folder"
    ) from error

from neuron_di.backends.cuda_kernels.interpreter import mend_interpreter

__all__ = ["IS_INTERPRETED", "jit", "jit_for_any", "next_power_of_2", "tl"]

# A decorator. Its declared type is why a file of kernels needs no stubs of Triton.
jit: Callable[[Callable[..., Any]], Any] = triton.jit


def jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """As `jit`, but these arguments change from call to call.

    By itself Triton compiles again, for seconds, where a number becomes 1 or a multiple of 16, or
    an address no multiple of 16.
    """
    decorate: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=list(names))
    return decorate


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


IS_INTERPRETED = bool(triton.knobs.runtime.interpret)

if IS_INTERPRETED:
    mend_interpreter()
