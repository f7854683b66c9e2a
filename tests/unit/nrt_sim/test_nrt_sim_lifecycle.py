"""The simulator of libnrt: what is refused before nrt_init, after nrt_close and in between."""

import ctypes
import os
import subprocess
import sys
import threading
from ctypes import byref, c_uint32, c_void_p, sizeof
from pathlib import Path

import pytest
from nrt_sim import plain
from nrt_sim.plain import (
    CLOSED,
    DEVICE,
    FAILURE,
    INVALID,
    NO_FRAMEWORK,
    SUCCESS,
    UNINITIALIZED,
    Version,
)

TESTS = Path(plain.__file__).parents[1]


def run(script: str, path: Path, **environment: str) -> subprocess.CompletedProcess:
    """A process of its own, for what ends it."""
    return subprocess.run(
        [sys.executable, "-c", f"from nrt_sim.plain import *\nimport os, sys\n{script}", str(path)],
        env={**os.environ, "PYTHONPATH": str(TESTS), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def some_calls(nrt):
    handle, number = c_void_p(), c_uint32()
    return [
        nrt.nrt_tensor_allocate(DEVICE, 0, 64, b"", byref(handle)),
        nrt.nrt_tensor_allocate_empty(b"", byref(handle)),
        nrt.nrt_tensor_read(None, None, 0, 0),
        nrt.nrt_tensor_memset(None, 0, 0, 0),
        nrt.nrt_host_device_id_get(0, byref(number)),
        nrt.nrt_barrier(0, 0, 1),
        nrt.nrt_get_dmabuf_fd(0, 4096, ctypes.byref(ctypes.c_int())),
    ]


def test_a_call_before_init_and_after_close_says_which(load):
    nrt = load()
    assert set(some_calls(nrt)) == {UNINITIALIZED}
    assert nrt.nrt_tensor_get_va(None) is None
    nrt.open()
    assert not {UNINITIALIZED, CLOSED} & set(some_calls(nrt))
    nrt.nrt_close()
    assert set(some_calls(nrt)) == {CLOSED}
    assert nrt.nrt_sim_violations() == 0


def test_the_runtime_opens_again_after_it_was_closed(nrt):
    kept = nrt.allocated(4096)
    nrt.nrt_close()
    nrt.open()
    assert nrt.nrt_tensor_read(kept, None, 0, 0) == plain.INVALID_HANDLE
    assert nrt.read(nrt.allocated(64), 0, 1) == b"\xcb"  # never zeroes


def test_close_unmaps_the_device(load):
    def num_mapped():
        return Path("/proc/self/maps").read_text().count("nrt_sim_hbm")

    nrt = load()
    before = num_mapped()
    nrt.open()
    nrt.allocated(64)
    assert num_mapped() == before + 1
    nrt.nrt_close()
    assert num_mapped() == before


def test_a_second_init_fails_and_the_first_stays(nrt):
    assert nrt.nrt_init(NO_FRAMEWORK, b"", b"") == FAILURE
    nrt.allocated(64)


@pytest.mark.parametrize(
    "arguments",
    [(0, b"", b""), (6, b"", b""), (-1, b"", b""), (1, None, b""), (1, b"", None)],
)
def test_init_refuses_arguments_that_there_are_not(load, arguments):
    nrt = load()
    assert nrt.nrt_init(*arguments) == INVALID
    assert nrt.nrt_tensor_memset(None, 0, 0, 0) == UNINITIALIZED


def test_closing_what_is_not_open_is_a_violation(load):
    nrt = load()
    nrt.nrt_close()
    assert nrt.nrt_sim_violations() == 1
    assert b"not open" in nrt.nrt_sim_last_violation()
    nrt.open()
    nrt.nrt_close()
    assert nrt.nrt_sim_violations() == 1
    nrt.nrt_close()
    assert nrt.nrt_sim_violations() == 2
    nrt.nrt_sim_forget_violations()
    assert (nrt.nrt_sim_violations(), nrt.nrt_sim_last_violation()) == (0, b"")


def test_a_tensor_freed_after_close_is_a_violation(nrt):
    tensor = nrt.allocated(64)
    nrt.nrt_close()
    nrt.nrt_tensor_free(byref(tensor))
    assert nrt.nrt_sim_violations() == 1


def test_a_close_beside_another_call_is_a_violation(nrt):
    nrt.nrt_sim_delay(b"nrt_tensor_memset", 10**8, 1)
    tensor = nrt.allocated(64)
    statuses = []
    thread = threading.Thread(
        target=lambda: statuses.append(nrt.nrt_tensor_memset(tensor, 0, 1, 64))
    )
    thread.start()
    while nrt.nrt_sim_faults_left() > 0:
        pass
    nrt.nrt_close()
    nrt.nrt_sim_clear_faults()  # the delay ends
    thread.join()
    assert statuses == [SUCCESS]  # its memory stayed
    assert nrt.nrt_sim_violations() == 1
    assert b"1 other" in nrt.nrt_sim_last_violation()


def test_a_violation_ends_the_process_when_it_shall(load, tmp_path):
    load()
    path = tmp_path / "libnrt_0.so"
    script = "PlainNrt(sys.argv[1]).nrt_close(); print('alive')"
    assert run(script, path).stdout == "alive\n"
    done = run(script, path, NRT_SIM_STRICT="abort")
    assert (done.returncode, done.stdout) == (-6, "")
    assert "violation: nrt_close" in done.stderr


FORKED = """
import warnings; warnings.simplefilter("ignore")
nrt = PlainNrt(sys.argv[1])
if sys.argv[2:] == []: nrt.open()
child = os.fork()
if child == 0:
    os._exit(nrt.nrt_tensor_memset(None, 0, 0, 0) + 100 * nrt.nrt_sim_violations())
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(code, nrt.nrt_tensor_memset(None, 0, 0, 0), nrt.nrt_sim_violations())
"""


def test_a_forked_child_has_no_runtime(load, tmp_path):
    load()
    path = tmp_path / "libnrt_0.so"
    done = run(FORKED, path)
    assert done.stdout == f"{100 + UNINITIALIZED} {plain.INVALID_HANDLE} 0\n", done.stderr
    early = run(FORKED.replace("== []", "!= []"), path)  # before nrt_init a fork is nobody's fault
    assert early.stdout == f"{UNINITIALIZED} {UNINITIALIZED} 0\n", early.stderr


HOLDING = """
import signal, warnings; warnings.simplefilter("ignore")
nrt = PlainNrt(sys.argv[1])
nrt.open()
if os.fork() == 0:
    print("child", flush=True)
    os.read(int(sys.argv[3]), 1)  # until the test closes the other end
    os._exit(0)
sys.stdin.readline()
nrt.nrt_close() if sys.argv[2] == "closes" else os.kill(os.getpid(), signal.SIGKILL)
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("parent", ["closes", "dies"])
def test_a_forked_child_holds_no_core(load, monkeypatch, tmp_path, parent):
    nrt = load()
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    script, pipe = f"from nrt_sim.plain import *\nimport os, sys\n{HOLDING}", subprocess.PIPE
    end, start = os.pipe()
    command = [sys.executable, "-c", script, str(tmp_path / "libnrt_0.so"), parent, str(end)]
    with (
        os.fdopen(start, "wb"),
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=(end,)) as process,
    ):
        os.close(end)
        assert process.stdout.readline() == "child\n"  # it runs, beside its parent
        assert nrt.nrt_init(NO_FRAMEWORK, b"", b"") == plain.NC_BUSY
        process.stdin.write("go on\n")
        process.stdin.flush()
        if parent == "closes":
            assert process.stdout.readline() == "closed\n"
        else:
            process.wait(60)
        assert nrt.nrt_init(NO_FRAMEWORK, b"", b"") == SUCCESS


def test_the_version_and_its_size(load):
    for api, minor in ((2, 30), (3, 32)):
        nrt = load(api)
        version = Version()
        assert nrt.nrt_get_version(byref(version), sizeof(version)) == SUCCESS  # before nrt_init
        assert (version.rt_major, version.rt_minor) == (2, minor)
        assert version.rt_detail == b"a simulator of libnrt"
        for size in (0, sizeof(version) - 1, sizeof(version) + 1):
            assert nrt.nrt_get_version(byref(version), size) == INVALID
        assert nrt.nrt_get_version(None, sizeof(version)) == INVALID


def test_statuses_have_names(load):
    nrt = load()
    names = {status: nrt.nrt_get_status_as_str(status) for status in range(2000)}
    known = {status: name for status, name in names.items() if name != b"UNKNOWN"}
    assert (known[0], known[13], known[1005]) == (
        b"NRT_SUCCESS",
        b"NRT_UNINITIALIZED",
        b"NRT_EXEC_NC_BUSY",
    )
    assert len(set(known.values())) == len(known) == 28


def test_collectives_between_processes_say_that_there_are_none(nrt, capfd):
    for function in (nrt.nrt_barrier, nrt.nrt_build_global_comm, nrt.nrt_cc_global_comm_init):
        assert function(1, 0, 1) == SUCCESS
        assert function(2, 0, 1) == INVALID
        assert function(0, 1, 1) == INVALID
        assert function(0, 0, 0) == INVALID
        assert function(0, 0, 2) == FAILURE
    assert capfd.readouterr().err.count("collectives between processes are not simulated") == 3
    error, text = ctypes.c_int(), ctypes.create_string_buffer(64)
    assert nrt.nrt_get_libnccl_net(byref(error), text, 64) is None
    assert (error.value, text.value) == (1, b"the simulator has no network plugin")
