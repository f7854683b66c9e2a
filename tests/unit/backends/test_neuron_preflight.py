"""What keeps a worker from its NeuronCores, told before anything is loaded.

So far this has run on a simulator of libnrt only.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from neuron_backend_kit import simulated
from nrt_sim.build import compiler

from neuron_di.backends import neuron_preflight
from neuron_di.backends.neuron_preflight import check_devices, runtime_environment
from neuron_di.errors import ConfigError


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path / "root", monkeypatch)


def refusal(num_ranks: int = 1, library_path: str | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        check_devices(num_ranks, library_path, os.environ)
    return refused.value.message


def test_the_first_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_devices(4, None, os.environ) == range(4)
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "3")
    assert check_devices(2, None, os.environ) == range(2), "no more than there are ranks"
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "8-15")
    assert check_devices(2, None, os.environ) == range(8, 10)
    assert runtime_environment(range(8, 10), None) == {"NEURON_RT_VISIBLE_CORES": "8-9"}
    assert runtime_environment(range(1), "/lib/x")["NEURON_DI_LIBNRT"] == "/lib/x"


def test_the_runtime_is_not_started_in_this_process() -> None:
    """PyTorch's own start of it would fail."""
    from neuron_di_bindings.nrt import NrtRuntime, load_nrt

    check_devices(2, None, os.environ)
    with NrtRuntime(load_nrt()).init():
        pass


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_DI_LIBNRT", "/nowhere/libnrt.so.1")
    words = refusal()
    assert words.startswith("--device neuron needs the Neuron runtime: no libnrt can be loaded (")
    assert "/nowhere/libnrt.so.1: " in words
    assert "aws-neuronx-runtime-lib" in words
    assert "/else/where" in refusal(library_path="/else/where")


def make_library(folder: Path, body: str) -> str:
    """A library of the test's own, with what the bindings look for."""
    source, library = folder / "libnrt.c", folder / "libnrt.so.1"
    names = ["nrt_close", "nrt_tensor_allocate", "nrt_tensor_read", "nrt_tensor_write"]
    stubs = "".join(f"int {name}(void) {{ return 0; }}\n" for name in names)
    source.write_text(f"#include <stdint.h>\n#include <stdlib.h>\n{stubs}{body}")
    command = [compiler(), "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return str(library)


COUNTS = """
int nrt_get_total_vnc_count(uint32_t *n) { *n = 2; return 0; }
int nrt_get_visible_vnc_count(uint32_t *n) { *n = 2; return 0; }
"""


@pytest.mark.parametrize("major", [1, 3])
def test_a_library_of_another_generation(tmp_path: Path, major: int) -> None:
    version = f"int nrt_get_version(uint64_t *v, size_t s) {{ v[0] = {major}; return 0; }}"
    path = make_library(tmp_path, f"{COUNTS}{version}\nint nrt_init(void) {{ return 0; }}")
    words = refusal(library_path=path)
    assert words.startswith(f"the Neuron runtime {path} is version {major}.")
    assert "and 2.x is supported: install aws-neuronx-runtime-lib 2.x" in words


def test_a_library_that_lacks_functions(tmp_path: Path) -> None:
    path = make_library(tmp_path, "int nrt_init(void) { return 0; }")
    stripped = Path(path).with_name("short.so")
    source = tmp_path / "short.c"
    source.write_text("int nrt_init(void) { return 0; }")
    subprocess.run(
        [compiler(), "-shared", "-fPIC", "-o", str(stripped), str(source)], check=True, timeout=60
    )
    words = refusal(library_path=str(stripped))
    assert "lacks nrt_close, nrt_tensor_allocate" in words
    assert "install a newer aws-neuronx-runtime-lib" in words


def test_a_library_that_ends_its_process_ends_not_ours(tmp_path: Path) -> None:
    path = make_library(tmp_path, COUNTS + "int nrt_init(void) { abort(); }")
    words = refusal(library_path=path)
    assert words.startswith("the Neuron runtime ended its process with code -6 when it was asked")
    assert "Mend: is the driver (aws-neuronx-dkms) loaded" in words


def test_a_library_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_library(
        tmp_path, COUNTS + "#include <unistd.h>\nint nrt_init(void) { pause(); return 0; }"
    )
    monkeypatch.setattr(neuron_preflight, "_PROBE_TIMEOUT_S", 0.5)
    assert "did not take NeuronCores 0 within 0.5 s: is the driver" in refusal(library_path=path)


def test_a_host_without_cores(tmp_path: Path) -> None:
    body = "int nrt_get_total_vnc_count(uint32_t *n) { *n = 0; return 0; }"
    path = make_library(tmp_path, f"{body}\nint nrt_init(void) {{ return 0; }}")
    assert "this host has no NeuronCores" in refusal(library_path=path)


def test_a_runtime_that_takes_other_cores_than_it_was_told(tmp_path: Path) -> None:
    path = make_library(tmp_path, COUNTS + "int nrt_init(void) { return 0; }")
    words = refusal(library_path=path)
    assert "took 2 cores where NEURON_RT_VISIBLE_CORES named 1 (0)" in words


@pytest.mark.parametrize(
    ("cores", "num_ranks", "words"),
    [
        ("0-32", 1, "NEURON_RT_VISIBLE_CORES=0-32"),  # it has 0 to 31
        ("junk", 1, "NEURON_RT_VISIBLE_CORES=junk names no cores"),
        ("0-1", 4, "need 4 NeuronCores (this worker 4) and may use 2 (0-1)"),
        ("0,2,4", 2, "needs 2 NeuronCores beside each other"),
    ],
)
def test_wrong_numbers_of_cores(
    monkeypatch: pytest.MonkeyPatch, cores: str, num_ranks: int, words: str
) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", cores)
    assert words in refusal(num_ranks)


def test_more_ranks_than_the_host_has_cores() -> None:
    assert "need 64 NeuronCores (this worker 64) and may use 32 (0-31)" in refusal(64)


HOLD = """
import sys
from neuron_di_bindings.nrt import NrtRuntime, load_nrt
with NrtRuntime(load_nrt()).init():
    print("taken", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """Another process, which has the cores 2 and 3."""
    environ = os.environ | {"NEURON_RT_VISIBLE_CORES": "2-3"}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        yield process
        process.kill()


def test_cores_of_another_process(
    holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_devices(2, None, os.environ) == range(2)
    words = refusal(4)
    assert words.startswith(
        "NeuronCores 0-3 cannot be taken: another process has one of them: nrt_init: "
        "NRT_EXEC_NC_BUSY (1005); "
    )
    assert f"belongs to process {holder.pid}" in words
    assert words.endswith("Mend: end it, or name other cores with NEURON_RT_VISIBLE_CORES")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-7")
    assert check_devices(4, None, os.environ) == range(4, 8)


def test_a_runtime_that_refuses_for_another_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRT_SIM_FAULTS", "function=nrt_init status=1")
    words = refusal()
    assert "NeuronCores 0 cannot be taken: the runtime refuses them: nrt_init: NRT_FAILURE" in words
    assert "is the driver (aws-neuronx-dkms) of the runtime's release?" in words


@pytest.mark.parametrize(
    ("status", "words"),
    [(1, "the runtime refuses them: nrt_init: NRT_X"), (1005, "another process has one of them: ")],
)
def test_a_process_with_another_core_is_no_culprit(
    monkeypatch: pytest.MonkeyPatch, status: int, words: str
) -> None:
    """A sibling serves on the cores beside these: nothing but the runtime says whose they are."""
    monkeypatch.setattr(neuron_preflight, "_holders", lambda: iter(["process 7, neuron-di"]))
    said = neuron_preflight._why_not_taken(
        range(2), {"failed": "nrt_init: NRT_X", "status": status}, ""
    )
    assert said.startswith(f"NeuronCores 0-1 cannot be taken: {words}")
    assert "; processes that have Neuron devices open: process 7, neuron-di. Mend: " in said
    assert ("end it" in said) == (status == 1005)


def test_who_has_a_device_open_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux shows it in /proc."""
    for pid, target in (("7", "/dev/neuron3"), ("8", "/dev/null"), ("9", "/dev/neuron0")):
        descriptors = tmp_path / pid / "fd"
        descriptors.mkdir(parents=True)
        (descriptors / "3").symlink_to(target)
        (tmp_path / pid / "comm").write_text(f"python{pid}\n")
    (tmp_path / "10").mkdir()  # another user's
    monkeypatch.setattr(neuron_preflight, "_PROC", tmp_path)
    assert sorted(neuron_preflight._holders()) == ["process 7, python7", "process 9, python9"]


def test_the_probe_starts_without_what_a_worker_needs() -> None:
    """As a file, and without this package: it must be quick."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-P", str(neuron_preflight._PROBE)],
        env=os.environ | runtime_environment(range(1), None),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == '{"num_cores": 1}\n'
    assert "torch" not in done.stderr
