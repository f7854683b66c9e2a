"""Finding libnrt, and calling it without C cutting anything off."""

import ctypes
import os
import shutil
import subprocess
import sys

import pytest
from nrt_sim.build import library_path

from neuron_di_bindings.nrt import (
    PATH_VARIABLE,
    NrtError,
    NrtMissing,
    NrtMisuse,
    NrtRequestError,
    NrtRuntime,
    NrtStatus,
    NrtUnsupported,
    load_nrt,
)
from neuron_di_bindings.nrt import (
    library as library_module,
)


def compiled(folder, source, *options):
    """A shared library of this C source."""
    path = folder / "libother.so.1"
    text = folder / "other.c"
    text.write_text(source)
    compiler = shutil.which("gcc") or shutil.which("cc")
    command = [compiler, "-shared", "-fPIC", *options, "-o", str(path), str(text)]
    subprocess.run(command, check=True)
    return str(path)


def test_an_import_loads_no_library():
    script = "import neuron_di_bindings.nrt; print(open('/proc/self/maps').read())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "libpython" in done.stdout or "libc" in done.stdout
    assert "libnrt" not in done.stdout


def test_a_missing_library_is_told_with_every_path_and_why(monkeypatch, tmp_path):
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    other = compiled(tmp_path, "int something_else(void) { return 0; }")
    no_library = tmp_path / "no_library.so"
    no_library.write_text("nothing")
    paths = ("/nowhere/libnrt.so.1", str(no_library), other)
    monkeypatch.setattr(library_module, "DEFAULT_PATHS", paths)
    with pytest.raises(NrtMissing) as caught:
        load_nrt()
    message = str(caught.value)
    assert all(path in message for path in paths)
    assert "cannot open shared object file" in message
    assert "libother.so.1 has no nrt_init" in message
    assert "aws-neuronx-runtime-lib" in message
    assert PATH_VARIABLE in message


def test_a_path_that_is_given_is_the_only_one_tried(monkeypatch):
    monkeypatch.setenv(PATH_VARIABLE, "/nowhere/else.so")
    with pytest.raises(NrtMissing, match=r"\(/nowhere/else\.so: "):
        load_nrt()
    with pytest.raises(NrtMissing, match=r"\(/nowhere/mine\.so: "):
        load_nrt("/nowhere/mine.so")


def test_a_library_is_one_object_whatever_its_path(monkeypatch, load, tmp_path):
    found = load()
    (tmp_path / "link.so").symlink_to(found.path)
    assert load_nrt(found.path) is found
    assert load_nrt(str(tmp_path / "link.so")) is found
    monkeypatch.setenv(PATH_VARIABLE, found.path)
    assert load_nrt() is found
    assert load() is not found


def test_the_default_is_what_the_loader_finds(simulated):
    """By its name alone, through LD_LIBRARY_PATH, and for the whole process."""
    script = (
        "import ctypes, neuron_di_bindings.nrt as nrt\n"
        "library = nrt.load_nrt()\n"
        "print(library.path, library.version(), hasattr(ctypes.CDLL(None), 'nrt_init'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"LD_LIBRARY_PATH": str(library_path().parent)},
    )
    assert done.stdout == "libnrt.so.1 2.32.31.0 True\n"


def test_the_generation_follows_from_what_the_library_has(load, tmp_path):
    assert load(3).async_api == 3
    assert load(2).async_api == 2
    older = load_nrt(compiled(tmp_path, "int nrt_init(int a) { return a; }"))
    assert older.async_api is None
    assert not older.has("nrta_is_completed")
    with pytest.raises(NrtUnsupported, match=r"libother\.so\.1 has no nrta_is_completed"):
        older.call("nrta_is_completed", 0, None)
    with pytest.raises(NrtUnsupported, match="has no nrt_tensor_read"):
        older.call("nrt_tensor_read", 0, 0, 0, 0)
    assert older.status_name(1203) == "NRT_EXEC_HW_ERR_DMA_ABORT"
    assert older.status_name(8) == "an unknown status"


def test_functions_of_before_both_generations_are_not_called(tmp_path):
    """They had the names of today's, other arguments, and no versions of their own."""
    source = "int nrt_init(void) { return 0; } int nrta_execute_schedule(void) { return 0; }"
    versions = tmp_path / "versions"
    versions.write_text("NRT_2.0.0 { global: nrt_*; nrta_*; local: *; };")
    for number, options in enumerate(((), (f"-Wl,--version-script={versions}",))):
        folder = tmp_path / str(number)
        folder.mkdir()
        library = load_nrt(compiled(folder, source, *options))
        assert library.async_api is None
        assert not library.has("nrta_execute_schedule")


def test_a_library_with_both_generations_is_of_the_later(tmp_path):
    """Its plain names are those of 3.0."""
    source = """
        int nrt_init(void) { return 0; }
        int before(void) { return 2; }
        int after(void) { return 3; }
        int tracker(void) { return 0; }
        __asm__(".symver before,nrta_execute_schedule@NRT_2.0.0");
        __asm__(".symver tracker,nrta_error_tracker_create@@NRT_2.0.0");
        __asm__(".symver after,nrta_execute_schedule@@NRT_3.0.0");
    """
    versions = tmp_path / "versions"
    versions.write_text(
        "NRT_2.0.0 { global: nrt_*; nrta_error_*; local: *; }; NRT_3.0.0 { nrta_*; } NRT_2.0.0;"
    )
    library = load_nrt(compiled(tmp_path, source, f"-Wl,--version-script={versions}"))
    assert library.async_api == 3


def test_names_of_statuses_are_those_of_the_library(library):
    """So that what the table says where a library has no names is right, too."""
    assert {int(status): library.status_name(status) for status in NrtStatus} == {
        int(status): f"NRT_{status.name}" for status in NrtStatus
    }


def test_a_version_is_of_the_library(load):
    assert str(load(2).version()) == "2.30.50.0"
    version = load(3).version()
    assert (version.major, version.minor, version.patch, version.maintenance) == (2, 32, 31, 0)
    assert version.detail == "a simulator of libnrt"


def test_a_failed_call_raises_by_its_status(library):
    with pytest.raises(NrtRequestError) as caught:
        library.call("nrt_tensor_read", 0, 0, 0, 0)
    error = caught.value
    assert isinstance(error, NrtError)
    assert error.status is NrtStatus.UNINITIALIZED
    assert str(error) == "nrt_tensor_read: NRT_UNINITIALIZED (13)"
    assert error.__notes__ == [f"not started in this process through {library.path}"]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("nrt_tensor_read", (1, 1, -1, 1)),
        ("nrt_tensor_read", (1, 1, 0, 2**63)),
        ("nrt_tensor_allocate", (0, 2**31, 8, "a", None)),
        ("nrt_tensor_allocate", (0, 0, 2**64 + 8, "a", None)),
        ("nrt_get_vnc_memory_stats", (2**32, None, 0, None)),
        ("nrt_get_vnc_memory_stats", (-1, None, 0, None)),
        ("nrt_get_dmabuf_fd", (-4096, 1, None)),
        ("nrt_tensor_check_output_completion", (1, 2**63, 1)),
        ("nrt_async_sendrecv_init", (-(2**31) - 1,)),
        ("nrt_tensor_read", (2**64, 1, 0, 1)),
    ],
)
def test_a_number_that_c_would_cut_off_never_arrives(library, sim, function, arguments):
    with pytest.raises(OverflowError, match=function):
        library.call(function, *arguments)
    assert sim.calls(function) == 0


def test_a_text_with_a_nul_never_arrives(library, sim):
    with pytest.raises(ValueError, match="NUL"):
        library.call("nrt_init", 1, "a\0b", "")
    assert sim.calls("nrt_init") == 0


def test_arguments_are_counted(library):
    with pytest.raises(TypeError, match="nrt_unload takes 1 arguments, not 2"):
        library.call("nrt_unload", 1, 2)


def test_wrong_kinds_never_arrive(library, sim):
    with pytest.raises(ctypes.ArgumentError):
        library.call("nrt_tensor_memset", 1, 0, "zero", 1)
    assert sim.calls("nrt_tensor_memset") == 0


def test_after_a_fork_the_child_uses_nothing(runtime):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answer = b"nothing was refused"
        try:
            runtime.memory_stats(0)
        except NrtMisuse as error:
            answer = str(error).encode()
        finally:
            os.write(writing, answer)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    assert answer.endswith("the runtime was started before this process was forked")
    assert runtime.memory_stats(0).bytes_used == 0


def test_an_error_is_an_error_of_the_request(runtime):
    with pytest.raises(NrtRequestError):
        runtime.memory_stats(2)


def test_a_started_runtime_is_known_by_its_library(library):
    assert library.started_by is None
    with NrtRuntime(library).init():
        assert library.started_by == os.getpid()
    assert library.started_by is None
