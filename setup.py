"""Builds what is compiled. Everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

_KERNELS = "runtime_bindings/neuron_di_bindings"
_PROXY = "proxy/neuron_di_proxy"
_OPENMP = "-fopenmp"


class BuildCompiled(build_ext):
    """Builds without OpenMP, for one thread, where the compiler has none."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CompileError, LinkError):
            if _OPENMP not in ext.extra_compile_args:
                raise
            ext.extra_compile_args.remove(_OPENMP)
            ext.extra_link_args.remove(_OPENMP)
            super().build_extension(ext)


setup(
    cmdclass={"build_ext": BuildCompiled},
    ext_modules=[
        # Loaded by ctypes from its file: it has no PyInit, and Python cannot import it.
        Extension(
            "neuron_di_bindings._cpu_kernels",
            [f"{_KERNELS}/cpu_kernels.c"],
            depends=[
                f"{_KERNELS}/cpu_decode_step.inc.c",
                f"{_KERNELS}/cpu_chunk_attention.inc.c",
                f"{_KERNELS}/cpu_vector.inc.c",
            ],
            extra_compile_args=["-std=gnu11", "-O2", "-g0", "-fno-math-errno", _OPENMP],
            extra_link_args=[_OPENMP],
            libraries=["m"],
            optional=True,  # decode is then slower, by torch
        ),
        Extension(
            "neuron_di_bindings._kv_copy",
            [f"{_KERNELS}/_kv_copy.c"],
            depends=[f"{_KERNELS}/kv_copy.c"],
            extra_compile_args=["-std=gnu11", "-O3", "-g0"],
            optional=True,  # KV is then copied by numpy
        ),
        Extension(  # loaded by ctypes, too
            "neuron_di_bindings._socket_runs",
            [f"{_KERNELS}/socket_runs.c"],
            extra_compile_args=["-std=gnu11", "-O2", "-g0"],
            optional=True,  # more of a transfer over TCP then runs in Python
        ),
        Extension(
            "neuron_di_bindings._owner_words",
            [f"{_KERNELS}/_owner_words.c"],
            extra_compile_args=["-std=gnu11", "-O2", "-g0"],
            optional=True,  # workers of one host then copy blocks instead of passing them on
        ),
        Extension(
            "neuron_di_proxy._token_lane",
            [f"{_PROXY}/_token_lane.c"],
            depends=[f"{_PROXY}/token_sends.inc.c"],
            extra_compile_args=["-std=gnu11", "-O2", "-g0"],
            optional=True,  # every token then goes through Python
        ),
        Extension(
            "neuron_di_proxy._json_members",
            [f"{_PROXY}/_json_members.c"],
            extra_compile_args=["-std=gnu11", "-O3", "-g0"],
            optional=True,  # msgspec then finds where a long prompt ends
        ),
    ],
)
