"""What Triton's interpreter (3.6 to 3.9) needs before these kernels run in it on a CPU.

Three mends, none of which a compiled kernel ever sees: a loop's bounds are arrays of one element,
which NumPy 2.4 no longer turns into integers; bfloat16 numbers are kept as 16-bit integers, and
its matrix product multiplies those; and its conversion to bfloat16 cuts bits off, where the device
rounds to the nearest.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt


@cache
def mend_interpreter() -> None:
    """Change the interpreter of this process, once."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle_of = interpreter.TensorHandle
    patch_tensor = interpreter._patch_lang_tensor  # noqa: SLF001
    multiply, cast = builder.create_dot, builder.cast_impl

    def patch_tensor_too(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return handle_of(_from_bfloat16(operand.data), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        kinds = (source.dtype.scalar, target.scalar)
        if kinds == (tl.float32, tl.bfloat16):
            return handle_of(_to_bfloat16(source.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return handle_of(_from_bfloat16(source.data), tl.float32)
        return cast(self, source, target)

    interpreter._patch_lang_tensor = patch_tensor_too  # noqa: SLF001
    builder.create_dot = create_dot
    builder.cast_impl = cast_impl


def _from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest, to the even one of two. NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
