"""Which processors, libraries and restrictions a worker takes for the same rounding."""

import os
import subprocess
import sys

import pytest
import torch

from neuron_di.backends.cpu_numerics import require_threads, torch_rounding
from neuron_di.errors import ConfigError

_XEON = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
model name\t: a name that a cloud chose
microcode\t: 0x1
cpu MHz\t\t: 2299.998
flags\t\t: fpu vme sse2 fma avx avx2 avx512f amx_bf16

processor\t: 1
vendor_id\t: GenuineIntel
"""
_ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd sve bf16
CPU implementer\t: 0x41
CPU variant\t: 0x1
CPU part\t: 0xd40
"""


@pytest.fixture
def rounding(tmp_path, monkeypatch):
    """How a processor of this description rounds."""
    monkeypatch.delenv("MKL_CBWR", raising=False)

    def of(text):
        path = tmp_path / "cpuinfo"
        path.write_text(text)
        return torch_rounding(path)

    return of


@pytest.mark.parametrize("text", [_XEON, _ARM])
def test_the_same_processor_rounds_alike_wherever_it_runs(rounding, text):
    elsewhere = text.replace("2299.998", "3100.2").replace("243.75", "250.00")
    elsewhere = elsewhere.replace("0x1\ncpu MHz", "0x2b\ncpu MHz").replace("vme", "vme ibrs")
    assert elsewhere != text
    assert rounding(elsewhere) == rounding(text)


@pytest.mark.parametrize(
    ("text", "word", "other"),
    [
        (_XEON, "GenuineIntel", "AuthenticAMD"),  # MKL goes by the maker
        (_XEON, "\t: 207", "\t: 143"),
        (_XEON, "amx_bf16", ""),  # as a hypervisor hides it
        (_XEON, "avx512f", ""),
        (_ARM, "sve", "sve sve2"),
        (_ARM, "0xd40", "0xd4f"),
    ],
)
def test_another_processor_is_told_from_it(rounding, text, word, other):
    assert rounding(text.replace(word, other)) != rounding(text)


def test_a_restricted_library_is_told_from_a_free_one(rounding, monkeypatch):
    free = rounding(_XEON)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert rounding(_XEON) != free


def test_torchs_version_and_choice_of_code_are_said(rounding):
    said = rounding(_XEON)
    assert said.startswith(f"torch={torch.__version__}/")
    assert " " not in said
    command = "import neuron_di.backends.cpu_numerics as n; print(n.torch_rounding())"
    restricted = subprocess.run(
        [sys.executable, "-c", command],
        env=os.environ | {"ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "/DEFAULT/" in restricted.stdout


def test_a_kernel_that_tells_nothing_is_no_failure(tmp_path):
    assert torch_rounding(tmp_path / "absent") == torch_rounding(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "value", "dtype", "num_threads", "is_refused"),
    [
        ("OMP_DYNAMIC", "TRUE", "bfloat16", 2, True),
        ("OMP_THREAD_LIMIT", "1", "bfloat16", 2, True),
        ("OMP_THREAD_LIMIT", "2", "bfloat16", 2, False),
        ("OMP_THREAD_LIMIT", "1", "float32", 2, False),
        ("OMP_DYNAMIC", "true", "bfloat16", 1, False),
        ("OMP_DYNAMIC", "false", "bfloat16", 2, False),
    ],
)
def test_threads_that_openmp_may_withhold(monkeypatch, name, value, dtype, num_threads, is_refused):
    monkeypatch.setenv(name, value)
    if not is_refused:
        require_threads(num_threads, dtype)
        return
    with pytest.raises(ConfigError, match=f"{name}={value} may give torch fewer than 2 threads"):
        require_threads(num_threads, dtype)
