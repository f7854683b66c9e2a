"""What the doctor's processes tell of themselves, and what becomes of them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from neuron_machines import laptop, machine, options, simulated
from test_doctor_neuron_memory import holding

from neuron_di.clock import Deadline, sleep_s
from neuron_di.doctor import first_hour_transfers, neuron_asked
from neuron_di.doctor.first_hour_transfers import Bench, own_address, pair
from neuron_di.doctor.neuron_asked import Asked, ask, core_environment
from neuron_di.doctor.steps import Steps


def test_what_a_library_prints_is_not_taken_for_a_step():
    steps = Steps()
    lines = [
        "NRT: starting",
        '{"begins": "a"}',
        '{"level": "info"}',
        "[1, 2]",
        "3",
        '{"step": "a", "n": 1}',
        '{"begins": "b"}',
        '{"step": 7}',
    ]
    heard = [steps.hear(line) is not None for line in lines]
    assert heard == [False, True, False, False, False, True, True, False]
    assert steps.found == {"a": {"n": 1}}
    assert steps.begun == "b"
    assert steps.of("b") == {}


def test_a_line_that_a_library_left_unfinished_spoils_none():
    script = """if True:
        import os
        from neuron_di.doctor.steps import take
        os.write(1, b"half a line")
        take("a", lambda: {"n": 1})
        take("b", lambda: int("x"))
        take("c", lambda: 1 / 0)"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    steps = Steps()
    for line in done.stdout.splitlines():
        steps.hear(line)
    assert steps.of("a") == {"n": 1}
    assert "invalid literal" in steps.of("b")["failed"]
    assert steps.begun == "c", "a bug of ours is no finding"
    assert "ZeroDivisionError" in done.stderr


def test_where_no_runtime_is_the_mend_is_told_to_its_end(tmp_path):
    """Both of the places that are looked at are named, each twice."""
    asked = ask(laptop_without_runtime(tmp_path), options(), "library", timeout_s=20)
    failed = asked.failure("library")
    assert failed is not None
    assert failed.count("/opt/aws/neuron/lib/libnrt.so.1") == 2
    assert failed.endswith("NEURON_DI_LIBNRT names another path")


@pytest.mark.parametrize(
    ("asked", "failure"),
    [
        (Asked(Steps({"x": {}}), "", 0, False), None),
        (Asked(Steps({"x": {"failed": "no"}}), "loud", 0, False), "no; loud"),
        (Asked(Steps({}, "x"), "", -6, False), "it ended its process with code -6"),
        (Asked(Steps({}, "x"), "", -9, True), "it did not come back in time"),
        (Asked(Steps({}, "y"), "", 1, False), None),
    ],
)
def test_why_a_step_failed(asked, failure):
    assert asked.failure_in_full("x") == failure


def laptop_without_runtime(folder):
    return machine(laptop(folder), {"PATH": os.environ["PATH"]})


def test_a_core_that_is_taken_is_known_by_the_status_or_by_the_runtimes_words():
    words = "ERROR NRT:nrt_allocate_neuron_cores NeuronCore(s) not available - Requested:nc1-nc1"
    failed = {"runtime": {"failed": "nrt_init: NRT_FAILURE (1)", "status": 1}}
    assert Asked(Steps(failed), "the end", 0, False, f"{words} Available:0\nthe end\n").is_taken
    assert Asked(Steps({"runtime": {"failed": "no", "status": 1005}}), "", 0, False).is_taken
    assert not Asked(Steps(failed), "the end", 0, False, "the driver is old\nthe end\n").is_taken


def test_nobody_listens_at_the_servers_port(tmp_path):
    """Each probe meets at a port of its own: it neither finds a server's processes nor is found."""
    looked_at = machine(laptop(tmp_path / "root"), simulated(tmp_path / "sim"))
    environment = core_environment(looked_at, range(3, 4))
    name = "NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT"
    assert environment[name] != "45645"
    assert environment["NEURON_RT_VISIBLE_CORES"] == "3"
    assert environment["FI_EFA_ENABLE_SHM_TRANSFER"] == "0"
    assert name not in core_environment(looked_at, range(3, 4), {name: ""})


def test_a_peer_whose_core_is_taken(tmp_path):
    environment = simulated(tmp_path / "sim")
    looked_at = machine(laptop(tmp_path / "root"), environment)
    with holding(environment, "7"):
        killed, flush = pair(Bench(machine=looked_at, options=options(), total=32, cores=(9, 7)))
    assert killed.outcome == flush.outcome == "failed"
    assert "NC_BUSY" in flush.answer


def test_two_cores_that_meet_at_the_hosts_own_address_only(tmp_path, monkeypatch):
    address = own_address()
    if address is None or address == "127.0.0.1":
        pytest.skip("this host has no address but loopback")
    monkeypatch.setattr(first_hour_transfers, "CONNECT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(first_hour_transfers, "WATCH_S", 0.2)
    environment = simulated(tmp_path / "sim", NRT_SIM_HOST=address)
    looked_at = machine(laptop(tmp_path / "root"), environment)
    killed, flush = pair(Bench(machine=looked_at, options=options(), total=32, cores=(9, 7)))
    assert killed.outcome == flush.outcome == "ok"
    assert flush.facts["own_address"]


def test_the_second_process_ends_with_the_first(tmp_path):
    """The first one is killed in mid-connection: its peer's core is free again."""
    environment = simulated(tmp_path / "sim")
    looked_at = machine(laptop(tmp_path / "root"), environment)
    words = ("receive", "127.0.0.9", "9", "7", "60", "1")
    asked = ask(
        looked_at,
        options(),
        *words,
        module="nrt_pair",
        environment=core_environment(looked_at, range(9, 10)),
        timeout_s=5,
    )
    assert asked.has_timed_out
    assert asked.steps.begun == "connect"
    again = neuron_asked.ask_core(looked_at, options(), 7)
    for _ in range(20):  # the kernel tells it a moment later
        if not again.is_taken:
            break
        again = neuron_asked.ask_core(looked_at, options(), 7)
    assert again.failure("memory") is None
    assert "memory" in again.steps.found


def hears_hangups() -> None:
    """Whatever nohup makes of the tests."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_however_the_doctor_ends_its_processes_give_their_cores_back(tmp_path, number):
    """While a core's memory is read, which takes five minutes here."""
    fault = "function=nrt_tensor_read delay_us=300000000 sticky"
    doctor = subprocess.Popen(
        [sys.executable, "-m", "neuron_di", "doctor", "--only", "neuron"],
        env=simulated(tmp_path / "sim", NRT_SIM_FAULTS=fault),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=hears_hangups,
    )
    probers: list[int] = []
    try:
        probers = until(lambda: core_probers(tmp_path))
        assert probers, "one asks a core"
        doctor.send_signal(number)
        doctor.wait(20)
        assert until(lambda: not core_probers(tmp_path)), "it is gone"
    finally:
        doctor.kill()
        doctor.wait()
        for pid in core_probers(tmp_path):
            os.kill(pid, signal.SIGKILL)
    assert doctor.returncode == (-number if number == signal.SIGKILL else 128 + number)


def until(look):
    deadline = Deadline.after(40)
    while not (found := look()) and not deadline.has_passed():
        sleep_s(0.05)
    return found


def core_probers(folder):
    """Processes that ask a core of the simulator in this folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            is_ours = os.fsencode(folder) in (place / "environ").read_bytes()
        except OSError:  # it ended, or is another user's
            continue
        if is_ours and b"neuron_di.doctor.nrt_probe" in words and b"core" in words:
            found.append(int(place.name))
    return found


def test_nixl_reads_memory_of_the_host(tmp_path):
    """The same program as on a device, over UCX: what it says of devices needs one."""
    pytest.importorskip("nixl_cu12._bindings")
    looked_at = machine(laptop(tmp_path), {"PATH": os.environ["PATH"], "UCX_TLS": "tcp,self,sm"})
    words = ("UCX", "host", "0", "1")
    asked = ask(looked_at, options(), *words, module="first_hour_nixl", timeout_s=60)
    assert asked.failure_in_full("read") is None
    assert asked.steps.of("read")["num_bytes"] == 1 << 20
    assert asked.steps.of("read")["there_at_once"]


def test_nixl_without_its_backend_says_so(tmp_path):
    pytest.importorskip("nixl_cu12._bindings")
    looked_at = machine(
        laptop(tmp_path), {"PATH": os.environ["PATH"], "NIXL_PLUGIN_DIR": str(tmp_path)}
    )
    words = ("LIBFABRIC", "host", "0", "1")
    asked = ask(looked_at, options(), *words, module="first_hour_nixl", timeout_s=60)
    assert "plugin LIBFABRIC (libplugin_LIBFABRIC.so) cannot be loaded" in str(
        asked.failure("register")
    )
