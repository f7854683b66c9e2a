"""Builds the compiled CPU kernels. Everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

_FOLDER = "runtime_bindings/neuron_di_bindings"


class BuildKernels(build_ext):
    """Builds without OpenMP, for one thread, where the compiler has none."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CompileError, LinkError):
            ext.extra_compile_args.remove("-fopenmp")
            ext.extra_link_args.remove("-fopenmp")
            super().build_extension(ext)


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        # Loaded by ctypes from its file: it has no PyInit, and Python cannot import it.
        Extension(
            "neuron_di_bindings._cpu_kernels",
            [f"{_FOLDER}/cpu_kernels.c"],
            depends=[
                f"{_FOLDER}/cpu_decode_step.inc.c",
                f"{_FOLDER}/cpu_chunk_attention.inc.c",
                f"{_FOLDER}/cpu_vector.inc.c",
            ],
            extra_compile_args=["-std=gnu11", "-O2", "-g0", "-fno-math-errno", "-fopenmp"],
            extra_link_args=["-fopenmp"],
            libraries=["m"],
            optional=True,  # decode is then slower, by torch
        )
    ],
)
