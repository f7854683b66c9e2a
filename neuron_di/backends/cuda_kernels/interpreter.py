"""What Triton's interpreter (3.6 to 3.9) needs before these kernels run in it on a CPU.

Three mends, none of which a compiled kernel ever sees: a loop's bounds are arrays of one element,
which NumPy 2.4 no longer turns into integers; bfloat16 numbers are kept as 16-bit integers, and
its matrix product multiplies those; and its conversion to bfloat16 cuts bits off, where the device
rounds to the nearest.

And three savings, which halve the time of all tests of kernels: at each call of a function the
interpreter searches Triton for all that it has to replace, at each operation it makes a table of
types, and it looks for integers that overflow, only to tell nobody.
"""

import dataclasses
from functools import cache
from inspect import getmembers
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
    _save_time(tl, interpreter)


def _save_time(tl: Any, interpreter: Any) -> None:
    """Let the interpreter compute the same in less time."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # else an overflow that is found is an error
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _replace_once(tl, interpreter)
    np_type_of = interpreter._get_np_dtype  # noqa: SLF001
    np_types: dict[str, Any] = {}  # by a scalar's name: pointers cannot be hashed

    def get_np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in np_types:
            np_types[name] = np_type_of(kind.scalar)
        return np_types[name]

    interpreter._get_np_dtype = get_np_dtype  # noqa: SLF001


def _replace_once(tl: Any, interpreter: Any) -> None:
    """Replace the language once for a kernel, not again for each function that it calls."""
    patch_lang, patch_scope = interpreter._patch_lang, interpreter._LangPatchScope  # noqa: SLF001
    replaced: set[str] = set()  # the modules whose functions are the interpreter's by now

    class Scope(patch_scope):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def patch_lang_once(fn: Any) -> Any:
        modules = modules_of(fn)
        if modules <= replaced:
            return Scope()
        replaced.update(modules)
        return patch_lang(fn)

    @cache
    def modules_of(fn: Any) -> frozenset[str]:
        values = fn.__globals__.values()
        return frozenset(
            module.__name__ for module in (tl, tl.core) if any(value is module for value in values)
        )

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtin_names(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # no longer where it was replaced
                interpreter._patch_attr(package, name, member, builder, scope)  # noqa: SLF001

    @cache
    def builtin_names(package: Any) -> tuple[str, ...]:
        return tuple(n for n, member in getmembers(package) if tl.core.is_builtin(member))

    for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        builtin_names(package)  # now, as long as nothing is replaced
    interpreter._patch_builtin = patch_builtin  # noqa: SLF001
    interpreter._patch_lang = patch_lang_once  # noqa: SLF001
    interpreter._LangPatchScope = Scope  # noqa: SLF001


def _from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest, to the even one of two. NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
