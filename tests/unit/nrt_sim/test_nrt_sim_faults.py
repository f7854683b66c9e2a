"""The simulator of libnrt: schedules that make calls fail, wait, hang or end the process."""

import os
import subprocess
import sys
import threading
from ctypes import create_string_buffer
from pathlib import Path

import pytest
from nrt_sim import plain
from nrt_sim.plain import SUCCESS, TIMEOUT, c_void_p

DMA_ABORT = 1203


def statuses(nrt, count):
    buffer, tensor = create_string_buffer(1), nrt.allocated(64)
    return [nrt.nrt_tensor_read(tensor, buffer, 0, 1) for _ in range(count)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("status=1203", [1203, 0, 0, 0, 0]),
        ("status=1203 call=3", [0, 0, 1203, 0, 0]),
        ("status=1203 call=2 times=2", [0, 1203, 1203, 0, 0]),
        ("sticky status=101 call=4", [0, 0, 0, 101, 101]),
        ("hang_ms=1", [TIMEOUT, 0, 0, 0, 0]),
        ("hang_ms=1 status=6 call=2", [0, 6, 0, 0, 0]),
        ("delay_us=1", [0, 0, 0, 0, 0]),
    ],
)
def test_a_schedule_hits_the_calls_that_it_names(load, monkeypatch, words, expected):
    text = f"# all of it\n function=nrt_tensor_read {words} # one\n;\n;"
    monkeypatch.setenv("NRT_SIM_FAULTS", text)
    nrt = load()
    nrt.open()
    assert nrt.nrt_sim_faults_left() == 1
    assert statuses(nrt, 5) == expected
    assert nrt.nrt_sim_faults_left() == 0
    assert nrt.nrt_sim_calls(b"nrt_tensor_read") == 5
    assert nrt.nrt_sim_calls(b"nrt_tensor_write") == 0


def test_a_schedule_may_be_a_file(load, monkeypatch, tmp_path):
    path = tmp_path / "faults"
    path.write_text(
        "function=nrt_tensor_read status=5  # first\nfunction=nrt_tensor_read call=3 status=7\n"
    )
    monkeypatch.setenv("NRT_SIM_FAULTS", f"@{path}")
    nrt = load()
    nrt.open()
    assert statuses(nrt, 4) == [5, 0, 7, 0]


def test_a_fault_may_be_for_one_core(load, monkeypatch):
    monkeypatch.setenv("NRT_SIM_FAULTS", "function=nrt_tensor_allocate core=1 status=4 sticky")
    nrt = load()
    nrt.open()
    nrt.allocated(64, vnc=0)
    assert nrt.nrt_tensor_allocate(0, 1, 64, b"", c_void_p()) == 4
    nrt.allocated(64, vnc=0)


def test_faults_are_added_and_taken_away_while_it_runs(nrt):
    assert nrt.nrt_sim_fault(b"nrt_tensor_read", DMA_ABORT, 2) == 0
    assert statuses(nrt, 3) == [DMA_ABORT, DMA_ABORT, SUCCESS]
    assert nrt.nrt_sim_schedule(b"function=nrt_tensor_read call=2 status=6 sticky") == 0
    assert statuses(nrt, 3) == [SUCCESS, 6, 6]  # counted from now on
    nrt.nrt_sim_clear_faults()
    assert statuses(nrt, 1) == [SUCCESS]
    for bad in ((b"nrt_tensor_reed", 1, 1), (b"nrt_tensor_read", -1, 1), (b"", 1, 1)):
        assert nrt.nrt_sim_fault(*bad) == -1
    assert nrt.nrt_sim_fault(b"nrt_tensor_read", 1, 0) == -1
    assert nrt.nrt_sim_faults_left() == 0


@pytest.mark.parametrize("where", [b"nrt_init", b"lifecycle.open"])
def test_init_itself_may_fail(load, monkeypatch, where):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "5")
    nrt, other = load(), load()
    assert nrt.nrt_sim_fault(where, 6, 1) == 0
    assert nrt.nrt_init(plain.NO_FRAMEWORK, b"", b"") == 6
    other.open()  # the core was given back
    other.nrt_close()
    nrt.open()


def test_a_delayed_call_holds_up_nobody_else(nrt):
    tensor = nrt.allocated(64)
    nrt.write(tensor, 0, b"\0")
    nrt.nrt_sim_delay(b"nrt_tensor_memset", 10**8, 1)
    thread = threading.Thread(target=nrt.nrt_tensor_memset, args=(tensor, 0, 1, 64))
    thread.start()
    while nrt.nrt_sim_faults_left() > 0:
        pass
    assert nrt.read(tensor, 0, 1) == b"\0"
    nrt.nrt_sim_clear_faults()  # the delay ends
    thread.join()
    assert nrt.read(tensor, 0, 1) == b"\1"


@pytest.mark.parametrize(
    "text",
    [
        "function=nrt_tensor_read",
        "status=3",
        "function=nrt_tensor_reed status=3",
        "function=nrt_tensor_read status=three",
        "function=nrt_tensor_read status=",
        "function=nrt_tensor_read status=-3",
        "function=nrt_tensor_read status=3 call=0",
        "function=nrt_tensor_read status=3 times=0",
        "function=nrt_tensor_read dies",
        "function=nrt_tensor_read status=3 calls=2",
        "function=nrt_tensor_read status=3 ;; function=",
        "f=nrt_tensor_read status=3",
    ],
)
def test_a_wrong_schedule_is_refused_as_a_whole(nrt, text):
    assert nrt.nrt_sim_schedule(f"function=nrt_tensor_write die;{text}".encode()) == -1
    assert nrt.nrt_sim_faults_left() == 0


DYING = """
import sys
from nrt_sim.plain import *
nrt = PlainNrt(sys.argv[1])
nrt.open()
tensor = nrt.allocated(64)
for number in range(5):
    print(number, flush=True)
    nrt.read(tensor, 0, 1)
"""


@pytest.mark.parametrize(
    ("text", "returncode", "last"),
    [
        ("function=nrt_tensor_read die call=3", -9, "2"),
        ("function=nrt_tensor_read hang_ms=1 die call=2", -9, "1"),
        ("function=nrt_tensor_reed die", -6, ""),  # a typing error proves nothing
        ("@nowhere", -6, ""),
    ],
)
def test_a_process_ends_where_the_schedule_says(load, tmp_path, text, returncode, last):
    load()
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(tmp_path / "libnrt_0.so")],
        env={
            **os.environ,
            "NRT_SIM_FAULTS": text,
            "PYTHONPATH": str(Path(plain.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout.split()[-1:]) == (returncode, [last] if last else [])
