"""The doctor on the variables that the Neuron runtime and libfabric read."""

import os

import pytest
from neuron_machines import by_name, instance, laptop, machine, options

from neuron_di.doctor import neuron_variables
from neuron_di.doctor.finding import Grade

SET = {
    "NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED": "1",
    "NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT": "20645",
    "FI_EFA_ENABLE_SHM_TRANSFER": "0",
}


@pytest.fixture
def root(tmp_path):
    return instance(tmp_path, "trn1.32xlarge")


def findings(root, environment, *transfer):
    found = neuron_variables.check(machine(root, environment), options("auto", *transfer))
    return by_name(found)


def test_all_is_well_when_all_is_set(root):
    assert findings(root, SET) == {}


def test_gates_that_are_unset_are_a_note_since_serve_sets_them(root):
    found = findings(root, {"PATH": os.environ["PATH"]})
    assert set(found) == {"neuron.unset", "neuron.bootstrap_port"}
    assert found["neuron.unset"].grade == Grade.NOTE
    assert found["neuron.unset"].facts["unset"] == [
        "NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED",
        "NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT",
        "FI_EFA_ENABLE_SHM_TRANSFER",
    ]
    wanted = "ENABLED=1 NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT=45645 FI_EFA_ENABLE_SHM_TRANSFER=0."
    assert found["neuron.unset"].mend.endswith(wanted)


@pytest.mark.parametrize("name", ["trn1.2xlarge", "inf2.48xlarge"])
def test_gates_are_not_asked_for_where_no_efa_sits_by_a_device(tmp_path, name):
    root, bare = instance(tmp_path, name), {"PATH": os.environ["PATH"]}
    assert "neuron.unset" not in findings(root, bare)
    assert "neuron.unset" in findings(root, bare, "nrt")


def test_a_port_that_the_kernel_gives_to_anybody(root):
    inside = SET | {"NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT": "45645"}
    found = findings(root, inside)["neuron.bootstrap_port"]
    assert found.grade == Grade.NOTE
    assert "ip_local_reserved_ports=45645" in found.mend
    root.file("/proc/sys/net/ipv4/ip_local_reserved_ports", "8080,45000-46000\n")
    assert findings(root, inside) == {}
    root.file("/proc/sys/net/ipv4/ip_local_reserved_ports", "8080,45646\n")
    found = findings(root, inside)["neuron.bootstrap_port"]
    assert "ip_local_reserved_ports=8080,45646,45645" in found.mend, "what is there stays"


@pytest.mark.parametrize(
    ("provider", "is_doubtful"),
    [("efa", False), ("tcp,efa", False), ("tcp", True), ("^tcp", False), ("^tcp,efa", True)],
)
def test_a_provider_that_is_not_efa(root, provider, is_doubtful):
    assert ("neuron.fi_provider" in findings(root, SET | {"FI_PROVIDER": provider})) is is_doubtful


@pytest.mark.parametrize(
    ("check", "variables", "grade"),
    [
        ("visible_cores", {"NEURON_RT_VISIBLE_CORES": "7-3"}, Grade.FAILED),
        ("visible_cores", {"NEURON_RT_VISIBLE_CORES": "0-15"}, Grade.NOTE),
        ("num_cores", {"NEURON_RT_NUM_CORES": "many"}, Grade.FAILED),
        ("logical_cores", {"NEURON_LOGICAL_NC_CONFIG": "4"}, Grade.FAILED),
        ("logical_cores", {"NEURON_LOGICAL_NC_CONFIG": "2"}, Grade.WARNING),
        (
            "send_receive_gate",
            {"NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED": "0"},
            Grade.WARNING,
        ),
        ("bootstrap_port", {"NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT": "0"}, Grade.FAILED),
        ("bootstrap_port", {"NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT": "x"}, Grade.FAILED),
        ("bootstrap_port", {"NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT": "65536"}, Grade.FAILED),
        ("efa_shared_memory", {"FI_EFA_ENABLE_SHM_TRANSFER": "1"}, Grade.WARNING),
        ("root_comm", {"NEURON_RT_ROOT_COMM_ID": "10.1.0.5"}, Grade.WARNING),
        ("exec_timeout", {"NEURON_RT_EXEC_TIMEOUT": "10m"}, Grade.WARNING),
        ("log_level", {"NEURON_RT_LOG_LEVEL": "loud"}, Grade.WARNING),
        ("async_exec", {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "2"}, Grade.WARNING),
        ("fi_provider", {"FI_PROVIDER": "tcp"}, Grade.WARNING),
        ("fi_rdma", {"FI_EFA_USE_DEVICE_RDMA": "0"}, Grade.WARNING),
        ("fi_p2p", {"FI_HMEM_DISABLE_P2P": "1"}, Grade.WARNING),
    ],
)
def test_a_value_that_does_harm_is_named(root, check, variables, grade):
    found = findings(root, SET | variables)
    assert list(found) == [f"neuron.{check}"]
    assert found[f"neuron.{check}"].grade == grade


@pytest.mark.parametrize(
    "variables",
    [
        {"NEURON_RT_ROOT_COMM_ID": "10.1.0.5:62182"},
        {"NEURON_RT_EXEC_TIMEOUT": "600"},
        {"NEURON_RT_LOG_LEVEL": "info"},
        {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "0"},
        {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_HMEM_DISABLE_P2P": "0"},
        {"FI_EFA_ENABLE_SHM_TRANSFER": "no"},
        {"NEURON_LOGICAL_NC_CONFIG": "1"},
    ],
)
def test_a_value_that_does_none_is_not(root, variables):
    assert findings(root, SET | variables) == {}


def test_a_gate_that_is_shut_fails_who_asks_for_nrt_by_name(root):
    shut = SET | {"NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED": "0"}
    found = findings(root, shut, "nrt", "tcp")
    assert found["neuron.send_receive_gate"].grade == Grade.FAILED


def test_a_number_of_cores_beside_named_ones(root):
    both = {"NEURON_RT_VISIBLE_CORES": "0-3", "NEURON_RT_NUM_CORES": "8"}
    assert findings(root, SET | both)["neuron.num_cores"].grade == Grade.NOTE


def test_logical_cores_on_trn2_are_a_choice(tmp_path):
    trn2 = instance(tmp_path / "trn2", "trn2.48xlarge")
    found = findings(trn2, SET | {"NEURON_LOGICAL_NC_CONFIG": "1"})
    assert found["neuron.logical_cores"].grade == Grade.NOTE


def test_a_laptop_is_asked_nothing(tmp_path):
    assert findings(laptop(tmp_path), {"FI_PROVIDER": "tcp"}) == {}
