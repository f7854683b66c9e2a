"""The doctor on one core's memory, and that it takes no core that somebody has.

Everything runs on the simulator of libnrt, in real processes.
"""

import contextlib
import os
import subprocess
import sys

import pytest
from neuron_machines import by_name, instance, laptop, machine, options, simulated
from nrt_sim.build import library_path

from neuron_di.doctor import neuron_asked, neuron_memory
from neuron_di.doctor.finding import Grade
from neuron_di.doctor.neuron_asked import ATTEMPTS_MAX, candidates

_HOLD = """if True:
    from neuron_di_bindings.nrt import NrtRuntime, load_nrt
    runtime = NrtRuntime(load_nrt()).init()
    print("has", runtime.visible_cores(), flush=True)
    input()
    runtime.close()"""


@contextlib.contextmanager
def holding(environment, cores):
    """Another process has these cores meanwhile."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD],
        env=environment | {"NEURON_RT_VISIBLE_CORES": cores},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("has ")
        yield
        process.communicate("\n", timeout=20)
    assert process.returncode == 0, "it had its cores until the end"


def findings(root, environment, *transfer):
    found = neuron_memory.check(machine(root, environment), options("auto", *transfer))
    return by_name(found)


@pytest.fixture
def root(tmp_path):
    return instance(tmp_path / "root", "trn1.32xlarge")


@pytest.fixture
def environment(tmp_path):
    return simulated(tmp_path / "sim")


def test_a_free_core_is_written_read_registered_and_opened(root, environment):
    found = findings(root, environment)
    assert {key: each.grade for key, each in found.items()} == {
        "neuron.memory": Grade.OK,
        "neuron.registration": Grade.OK,
        "neuron.send_receive": Grade.OK,
    }
    assert found["neuron.memory"].facts["core"] == 31
    assert found["neuron.registration"].facts["efa"] == "0000:a0:19.0"
    assert found["neuron.send_receive"].facts["communicators_max"] == 128


def test_nothing_is_left_behind(root, environment):
    findings(root, environment)
    with holding(environment, "0-31"):
        pass


@pytest.mark.parametrize("name", ["trn1.2xlarge", "inf2.48xlarge"])
def test_without_efa_the_host_is_the_way(tmp_path, name):
    root = instance(tmp_path / "root", name)
    found = findings(root, simulated(tmp_path / "sim", name))
    assert found["neuron.memory"].grade == Grade.OK
    assert found["neuron.registration"].grade == Grade.NOTE
    assert found["neuron.send_receive"].grade == Grade.NOTE
    assert f"{name} has no EFA beside its devices" in found["neuron.send_receive"].says
    wanted = findings(root, simulated(tmp_path / "sim", name), "nrt")
    assert wanted["neuron.send_receive"].grade == Grade.FAILED


def test_logical_cores_of_trn2(tmp_path):
    root = instance(tmp_path / "root", "trn2.48xlarge")
    found = findings(root, simulated(tmp_path / "sim", "trn2.48xlarge"))
    assert found["neuron.memory"].facts["core"] == 63
    assert found["neuron.send_receive"].grade == Grade.OK


def test_cores_of_a_server_stay_its_own(root, environment):
    with holding(environment, "1-31"):
        found = findings(root, environment | {"NEURON_RT_VISIBLE_CORES": "0,28-31"})
    assert found["neuron.memory"].grade == Grade.OK
    assert found["neuron.memory"].facts["core"] == 0


def test_when_all_cores_are_taken_it_is_skipped_and_says_so(root, environment, monkeypatch):
    asked = []
    monkeypatch.setattr(neuron_asked, "ask", counted(asked))
    with holding(environment, "0-31"):
        found = findings(root, environment)
    assert list(found) == ["neuron.memory"]
    assert found["neuron.memory"].grade == Grade.SKIPPED
    assert "other processes have the NeuronCores that were tried (31, 29, 27" in (
        found["neuron.memory"].says
    )
    assert asked.count("core") == ATTEMPTS_MAX


def counted(asked):
    plain = neuron_asked.ask

    def ask(*arguments, **named):
        asked.append(arguments[2])
        return plain(*arguments, **named)

    return ask


def test_the_likeliest_core_is_the_last_of_a_device_that_nobody_has_open(root, environment):
    looked_at = machine(root, environment)
    assert candidates(looked_at, 32)[:4] == [31, 29, 27, 25]
    assert candidates(looked_at, 32)[16:18] == [30, 28]
    root.process(7, "server", "/dev/neuron15", "/dev/neuron14")
    assert candidates(looked_at, 32)[:3] == [27, 25, 23]
    assert sorted(candidates(looked_at, 32)) == list(range(32))


def test_a_variable_that_names_no_core_of_this_host(root, environment):
    found = findings(root, environment | {"NEURON_RT_NUM_CORES": "99"})
    assert found["neuron.memory"].grade == Grade.SKIPPED


def test_a_gate_that_is_shut(root, environment):
    shut = environment | {"NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED": "0"}
    found = findings(root, shut)["neuron.send_receive"]
    assert found.grade == Grade.WARNING
    assert "it is switched off" in found.says
    assert found.mend == "export NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED=1."


def test_a_lock_file_that_another_user_left_behind(root, environment, tmp_path):
    folder = tmp_path / "sim/hosts/127.0.0.1/tmp"
    folder.mkdir(parents=True)
    name = f"nrt_kv_store_server_lock_uid_{os.getuid()}"
    (folder / name).touch(mode=0)
    lock = root.file(f"/tmp/{name}")
    if os.getuid() == 0:
        os.chown(lock, 12345, 12345)
    else:
        lock.chmod(0)
    found = findings(root, environment | {"NRT_SIM_LOCK_WAIT_MS": "20"})["neuron.send_receive"]
    assert found.grade == Grade.WARNING
    assert f"a lock file of another user in /tmp: {name}" in found.says
    assert "delete it" in found.mend


def test_a_device_whose_adapter_is_not_attached(tmp_path, environment):
    root = instance(tmp_path / "root", "trn1.32xlarge", num_efa=1)
    found = findings(root, environment)["neuron.registration"]
    assert found.grade == Grade.FAILED
    assert "No matching NIC" in found.says
    assert found.facts["present"] == ["0000:10:1a.0"]


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("function=nrt_init status=1", "memory", "nrt_init: NRT_FAILURE (1)"),
        ("function=nrt_init die", "memory", "it ended its process with code -9"),
        ("function=nrt_init hang_ms=60000", "memory", "it did not come back in time"),
        ("function=nrt_tensor_allocate status=4", "memory", "NRT_RESOURCE (4)"),
        ("function=nrt_tensor_read status=6", "memory", "NRT_HW_ERROR (6)"),
        ("function=nrt_get_dmabuf_fd status=2", "registration", "no dma-buf of device memory"),
        ("function=nrt_get_attached_efa_bdf status=1", "registration", "no EFA adapter beside"),
        ("function=nrt_async_sendrecv_init status=1", "send_receive", "no cause is known"),
        ("function=nrt_async_sendrecv_init die", "send_receive", "it ended its process"),
        (
            "function=nrt_async_sendrecv_get_max_num_pending_request status=1",
            "send_receive",
            "NRT_FAILURE",
        ),
    ],
)
def test_whatever_the_runtime_does_is_told(root, environment, monkeypatch, fault, check, words):
    monkeypatch.setattr(neuron_asked, "CORE_TIMEOUT_S", 4.0 if "hang" in fault else 60.0)
    found = findings(root, environment | {"NRT_SIM_FAULTS": fault})[f"neuron.{check}"]
    assert found.grade in (Grade.FAILED, Grade.WARNING)
    assert words in found.says


@pytest.mark.parametrize(
    "fault",
    [
        "function=nrt_close die",
        "function=nrt_async_sendrecv_close status=1",
        "function=nrt_async_sendrecv_close die",
    ],
)
def test_a_core_that_is_not_given_back_in_order(root, environment, fault):
    found = findings(root, environment | {"NRT_SIM_FAULTS": fault})
    assert found["neuron.memory"].grade == Grade.OK
    assert found["neuron.close"].grade == Grade.WARNING


def test_a_laptop_is_asked_nothing(tmp_path):
    assert findings(laptop(tmp_path), {"PATH": os.environ["PATH"]}) == {}


def test_no_bootstrap_lock_of_an_older_runtime_stays(root, tmp_path):
    folder = tmp_path / "sim" / "127.0.0.1" / "tmp"
    folder.mkdir(parents=True)
    older = simulated(tmp_path / "sim", NEURON_DI_LIBNRT=str(library_path(2)), TMPDIR=str(folder))
    found = findings(root, older)
    assert found["neuron.send_receive"].grade is Grade.OK
    assert list(folder.iterdir()) == []


def test_a_bootstrap_lock_that_was_there_stays(root, tmp_path):
    folder = tmp_path / "sim" / "127.0.0.1" / "tmp"
    folder.mkdir(parents=True)
    lock = folder / "nrt_kv_store_server.lock"
    lock.touch(0o600)
    findings(
        root, simulated(tmp_path / "sim", NEURON_DI_LIBNRT=str(library_path(2)), TMPDIR=str(folder))
    )
    assert lock.exists()


def test_where_no_efa_is_nothing_is_to_be_exported_or_attached(tmp_path):
    root = instance(tmp_path / "root", "inf2.48xlarge")
    shut = {"NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED": "0"}
    environment = simulated(tmp_path / "sim", "inf2.48xlarge", **shut)
    for transfer in ((), ("nrt",)):
        for found in findings(root, environment, *transfer).values():
            assert "export" not in found.mend
            assert "EFA adapters" not in found.mend
