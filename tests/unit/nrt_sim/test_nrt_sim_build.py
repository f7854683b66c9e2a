"""The simulator of libnrt as a library: what it exports, and its run under the sanitizers."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nrt_sim import plain
from nrt_sim.build import (
    FOLDER,
    CannotBuild,
    compiler,
    library_path,
    sanitized_library_path,
    sanitizer_runtime,
)

ONLY_API_2 = {
    "nrta_get_completion_handle",
    "nrta_error_tracker_create",
    "nrta_error_tracker_destroy",
    "nrta_error_tracker_get_list",
}
ONLY_API_3 = {
    "nrt_get_attached_efa_bdf",
    "nrta_event_register_seq_id_completion",
    "nrta_event_register_xu_completion",
}


def exported(path):
    """Name -> version of what a library defines."""
    tool = shutil.which("nm")
    if tool is None:
        pytest.skip("there is no nm")
    command = [tool, "-D", "--defined-only", "--with-symbol-versions", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    symbols = (line.split()[-1] for line in done.stdout.splitlines() if " A " not in line)
    return dict(re.split("@+", symbol) for symbol in symbols)


def declared(header):
    return set(re.findall(r"\b(nrta?_\w+)\(", (FOLDER / header).read_text()))


@pytest.mark.parametrize(
    ("api", "version", "absent"), [(2, "NRT_2.0.0", ONLY_API_3), (3, "NRT_3.0.0", ONLY_API_2)]
)
def test_exactly_the_declared_functions_are_exported(api, version, absent):
    found = exported(library_path(api))
    public = {name for name in found if not name.startswith("nrt_sim_")}
    assert public == declared("nrt_functions.h") - absent
    assert len(public) > 60
    for name in public:
        assert found[name] == (version if name.startswith("nrta_") else "NRT_2.0.0")
    steering = set(found) - public
    assert steering >= {name for name in declared("sim.h") if name.startswith("nrt_sim_")}
    assert {found[name] for name in steering} == {"NRT_SIM"}


def test_the_sources_are_short_and_plainly_written():
    paths = [path for path in FOLDER.iterdir() if path.suffix in (".c", ".h")]
    assert len(paths) > 15
    for path in paths:
        lines = path.read_text(encoding="ascii").splitlines()
        assert len(lines) < 400, path.name
        assert lines[0].startswith("/*"), path.name
        for line in lines:
            assert len(re.sub("-+ [*]/$", "", line)) <= 100, (path.name, line)  # rulers may be


def test_a_library_is_built_once_for_each_content():
    first = library_path(3)
    changed_us = first.stat().st_mtime_ns
    library_path.cache_clear()
    assert library_path(3) == first
    assert first.stat().st_mtime_ns == changed_us
    assert library_path(2) != first
    with pytest.raises(ValueError, match="API 4"):
        library_path(4)


def test_two_libraries_in_one_process_are_two(load):
    first, second = load(), load()
    first.open()
    assert second.nrt_sim_calls(b"nrt_init") == 0
    assert first.nrt_sim_calls(b"nrt_init") == 1


SCENARIO = """
import ctypes, os, sys, threading
from ctypes import byref, c_void_p, create_string_buffer
from nrt_sim.plain import *

nrt = PlainNrt(sys.argv[1])

def expect(found, expected):
    if found != expected:
        sys.exit(f"{found} is not {expected}")

for turn in range(3):
    nrt.open()
    expect(nrt.nrt_sim_schedule(b"x" * 40000), -1)
    expect(nrt.nrt_sim_schedule(b"function=" + b"x" * 200 + b" status=1"), -1)
    expect(nrt.nrt_sim_fault(b"x" * 200, 1, 1), -1)
    tensors = [nrt.allocated(size, vnc, where) for size in (1, 4096, 4097, 99999)
               for vnc, where in ((0, DEVICE), (1, DEVICE), (0, HOST))]
    slices = [nrt.sliced(t, 0, nrt.nrt_tensor_get_size(t)) for t in tensors]
    slices += [nrt.sliced(t, 1, nrt.nrt_tensor_get_size(t) - 1) for t in slices[3:]]
    for t in tensors + slices:
        size = nrt.nrt_tensor_get_size(t)
        content = os.urandom(size)
        nrt.write(t, 0, content)
        expect(nrt.read(t, 0, size), content)
        for offset, length in ((0, size + 1), (size, 1), (2**64 - 1, 2), (1, 2**64 - 1)):
            expect(nrt.nrt_tensor_read(t, create_string_buffer(1), offset, length), INVALID)
            expect(nrt.nrt_tensor_memset(t, offset, 0, length), INVALID)
    expect(nrt.nrt_sim_schedule(b"function=nrt_tensor_memset status=5 call=2 # no more"), 0)
    expect([nrt.nrt_tensor_memset(tensors[0], 0, 0, 1) for _ in range(3)], [0, 5, 0])
    expect(nrt.nrt_tensor_allocate(DEVICE, 0, 64, b"n" * 5000, byref(c_void_p())), SUCCESS)
    expect(nrt.nrt_tensor_copy(tensors[3], 0, tensors[3], 1, 4095), SUCCESS)  # overlapping
    empty = c_void_p()
    expect(nrt.nrt_tensor_allocate_empty(None, byref(empty)), SUCCESS)
    buffer = create_string_buffer(64)
    expect(nrt.nrt_tensor_attach_buffer(empty, buffer, 64), SUCCESS)
    nrt.write(empty, 0, bytes(64))

    def churn(vnc):
        for number in range(300):
            tensor = nrt.allocated(1 + number * 17, vnc)
            part = nrt.sliced(tensor, 0, 1)
            nrt.write(part, 0, b"x")
            nrt.nrt_tensor_free(byref(tensor))
            expect(nrt.read(part, 0, 1), b"x")
            nrt.nrt_tensor_free(byref(part))

    threads = [threading.Thread(target=churn, args=(vnc % 2,)) for vnc in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    for t in tensors[::2] + slices[::3]:
        nrt.nrt_tensor_free(byref(t))
    nrt.nrt_close()
    nrt.nrt_sim_clear_faults()
expect(nrt.nrt_sim_violations(), 0)
print("whole")
"""

TOO_SMALL = """
import sys
from ctypes import create_string_buffer
from nrt_sim.plain import *
nrt = PlainNrt(sys.argv[1])
nrt.open()
nrt.nrt_tensor_read(nrt.allocated(4096), create_string_buffer(100), 0, 4096)
print("whole")
"""


def run_sanitized(script: str, folder: Path, api: int = 3) -> subprocess.CompletedProcess:
    try:
        library, runtime = sanitized_library_path(api), sanitizer_runtime()
    except CannotBuild as error:
        pytest.skip(str(error))
    return subprocess.run(
        [sys.executable, "-c", script, str(library)],
        env={
            **os.environ,
            "LD_PRELOAD": str(runtime),
            # Leaks are Python's own business; its small blocks must come from malloc to be watched.
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONMALLOC": "malloc",
            "PYTHONPATH": str(Path(plain.__file__).parents[1]),
            "NRT_SIM_ROOT": str(folder),
            "NRT_SIM_TRACE": str(folder / "trace"),
            "NRT_SIM_HBM_BYTES": "8000000",
            "NEURON_RT_NUM_CORES": "2",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


@pytest.mark.timeout(300)  # sanitized, on a machine that may be busy
@pytest.mark.parametrize("api", [2, 3])
def test_no_byte_is_touched_that_there_is_not(tmp_path, api):
    done = run_sanitized(SCENARIO, tmp_path, api)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-2000:]


def test_a_caller_s_buffer_that_is_too_small_is_found(tmp_path):
    done = run_sanitized(TOO_SMALL, tmp_path)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "whole" not in done.stdout


LEAKS = """
#include <stdio.h>
#include "sim.h"

int main(void)
{
    char bytes[64] = "content";
    for (int turn = 0; turn < 2; turn++) {
        nrt_tensor_t *tensor, *slice, *left;
        if (nrt_init(NRT_FRAMEWORK_TYPE_NO_FW, "", "") != NRT_SUCCESS)
            return 1;
        nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, 5000, "device", &tensor);
        nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_HOST, 0, 5000, "host", &left);
        nrt_tensor_allocate_slice(tensor, 10, 64, "slice", &slice);
        nrt_tensor_write(slice, bytes, 0, 64);
        nrt_tensor_free(&tensor);
        nrt_close(); /* frees what is left */
    }
    puts("whole");
    return (int)nrt_sim_violations();
}
"""


def test_nothing_is_leaked_after_close(tmp_path):
    """A program in C, with the leak detector: it sees the library's memory alone."""
    try:
        library = sanitized_library_path()
    except CannotBuild as error:
        pytest.skip(str(error))
    source, program = tmp_path / "leaks.c", tmp_path / "leaks"
    source.write_text(LEAKS)
    flags = ["-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    paths = [f"-I{FOLDER}", str(source), str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run([compiler(), *flags, *paths, "-o", str(program)], check=True, timeout=250)
    environment = {
        **os.environ,
        "NRT_SIM_ROOT": str(tmp_path),
        "ASAN_OPTIONS": "detect_leaks=1:fast_unwind_on_malloc=0",
    }
    done = subprocess.run(
        [str(program)], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    if "LeakSanitizer has encountered a fatal error" in done.stderr:
        pytest.skip("the leak detector may not watch here (ptrace)")
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-3000:]


def test_structs_have_the_sizes_of_the_plain_declarations(tmp_path):
    """C's view against ctypes' view; both have the members of the public headers."""
    names = {
        "nrt_version_t": plain.Version,
        "nrt_instance_info_t": plain.InstanceInfo,
        "nrt_vnc_memory_stats_t": plain.MemoryStats,
        "nrt_tensor_device_allocation_info_t": plain.AllocationInfo,
        "nrt_tensor_batch_op_t": plain.BatchOp,
        "nrt_tensor_batch_t": plain.Batch,
    }
    checks = "".join(
        f'_Static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "{name}");\n'
        for name, kind in names.items()
    )
    source = tmp_path / "sizes.c"
    source.write_text(f'#include "nrt_types.h"\n{checks}')
    command = [compiler(), "-fsyntax-only", f"-I{FOLDER}", str(source)]
    subprocess.run(command, check=True, timeout=60)
    assert ctypes.sizeof(plain.Version) == 224
    assert ctypes.sizeof(plain.InstanceInfo) == 32
