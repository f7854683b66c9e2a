"""The doctor on Neuron devices: instances as they are, and as they are when something is wrong."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from neuron_machines import by_name, instance, laptop, machine, options, simulated

from neuron_di.doctor import neuron_devices
from neuron_di.doctor.finding import Grade
from neuron_di.doctor.neuron_instances import INSTANCES


def findings(root, environment, device="auto"):
    return by_name(neuron_devices.check(machine(root, environment), options(device)))


@pytest.mark.parametrize(
    ("name", "num_devices", "num_cores", "logical"),
    [("trn1.32xlarge", 16, 32, 1), ("inf2.48xlarge", 12, 24, 1), ("trn2.48xlarge", 16, 64, 2)],
)
def test_a_complete_instance(tmp_path, name, num_devices, num_cores, logical):
    root = instance(tmp_path / "root", name)
    found = findings(root, simulated(tmp_path / "sim", name))
    assert {key: each.grade for key, each in found.items()} == {
        "neuron.instance": Grade.NOTE,
        "neuron.devices": Grade.OK,
        "neuron.cores": Grade.OK,
    }
    assert found["neuron.instance"].facts["num_devices"] == num_devices
    assert found["neuron.cores"].facts["num_cores"] == num_cores
    assert found["neuron.cores"].facts["logical"] == logical
    assert found["neuron.instance"].says.startswith(f"{name}: {num_devices} devices, {num_cores} ")


def test_a_laptop_has_none_and_that_is_a_note_unless_it_must_have_some(tmp_path):
    root, bare = laptop(tmp_path), {"PATH": os.environ["PATH"]}
    found = findings(root, bare)
    assert list(found) == ["neuron.devices"]
    assert found["neuron.devices"].grade == Grade.NOTE
    assert findings(root, bare, "cpu") == {}
    found = findings(root, bare, "neuron")
    assert found["neuron.devices"].grade == Grade.FAILED
    assert "Trn1" in found["neuron.devices"].mend


def test_on_the_simulator_alone_the_runtime_is_believed(tmp_path):
    found = findings(laptop(tmp_path / "root"), simulated(tmp_path / "sim"))
    assert found["neuron.devices"].grade == Grade.NOTE
    assert found["neuron.devices"].facts["num_cores"] == 32
    assert found["neuron.cores"].grade == Grade.OK


def test_without_its_driver_nothing_else_is_blamed(tmp_path):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    root.remove("/dev/neuron*")
    root.remove("/sys/module/neuron/version")
    found = findings(root, {"PATH": os.environ["PATH"]})
    assert list(found) == ["neuron.instance"], "the driver is neuron_software's to find"


def test_a_container_without_the_devices(tmp_path):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    root.remove("/dev/neuron*")
    found = findings(root, simulated(tmp_path / "sim"))
    assert found["neuron.devices"].grade == Grade.WARNING, "the proxy needs none"
    assert "this container has 0 of 16" in found["neuron.devices"].says
    assert "--device=/dev/neuron0" in found["neuron.devices"].mend


def test_a_container_with_some_of_them(tmp_path):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    root.remove("/dev/neuron[2-9]")
    root.remove("/dev/neuron1[0-5]")
    found = findings(root, simulated(tmp_path / "sim"))
    assert found["neuron.devices"].grade == Grade.WARNING
    assert found["neuron.devices"].says == (
        "this container has 2 of 16 Neuron devices: the others have no file in /dev"
    )


def test_a_device_that_has_gone_from_the_bus(tmp_path):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    root.remove("/sys/bus/pci/devices/0000:a0:1b.0")
    root.remove("/dev/neuron15")
    found = findings(root, simulated(tmp_path / "sim"))
    assert found["neuron.devices"].grade == Grade.FAILED
    assert (
        found["neuron.devices"].says == "the PCI bus shows 15 of the instance's 16 Neuron devices"
    )


def test_hardware_errors_that_the_driver_counted(tmp_path):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    hardware = "/sys/devices/virtual/neuron_device/neuron3/stats/hardware"
    root.file(f"{hardware}/mem_ecc_uncorrected", "2\n")
    root.file(f"{hardware}/health_status/unhealthy_components", "hbm,link_efa\n")
    found = findings(root, simulated(tmp_path / "sim"))
    assert found["neuron.health"].grade == Grade.FAILED
    assert found["neuron.health"].facts["errors"] == {"neuron3.mem_ecc_uncorrected": 2}
    assert "neuron3 hbm, neuron3 link_efa" in found["neuron.health"].says


def test_who_has_devices_open(tmp_path):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    root.process(4711, "python3.11", "/dev/neuron0", "/dev/neuron1", "/dev/null")
    root.process(4712, "bash", "/dev/pts/0")
    found = findings(root, simulated(tmp_path / "sim"))
    assert found["neuron.users"].grade == Grade.NOTE
    assert "python3.11 (4711)" in found["neuron.users"].says
    assert set(found["neuron.users"].facts["devices"]) == {"0", "1"}


def test_cores_that_are_counted_in_another_way(tmp_path):
    root = instance(tmp_path / "root", "trn2.48xlarge")
    environment = simulated(tmp_path / "sim", "trn2.48xlarge")
    found = findings(root, environment | {"NEURON_LOGICAL_NC_CONFIG": "1"})
    assert found["neuron.cores"].facts["num_cores"] == 128
    assert found["neuron.cores"].grade == Grade.OK, "as the variable says"
    root.file("/opt/aws/neuron/logical_nc_config", "NEURON_LOGICAL_NC_CONFIG=1")
    found = findings(root, environment)
    assert found["neuron.cores"].grade == Grade.WARNING, "the simulator does not read that file"
    assert found["neuron.cores"].facts["num_expected"] == 128


def test_the_runtimes_refusal_to_count_is_told_with_its_words(tmp_path):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    environment = simulated(tmp_path / "sim", NEURON_RT_VISIBLE_CORES="99")
    found = findings(root, environment)
    assert found["neuron.cores"].grade == Grade.FAILED
    assert "names cores that there are not: 99" in found["neuron.cores"].says


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        ("function=nrt_get_version status=1", "version"),
        ("function=nrt_get_version die", "version"),
        ("function=nrt_get_visible_vnc_count status=1", "visible"),
        ("function=nrt_get_visible_vnc_count die", "visible"),
    ],
)
def test_a_question_that_the_runtime_does_not_answer(tmp_path, fault, step):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    found = findings(root, simulated(tmp_path / "sim", NRT_SIM_FAULTS=fault))
    assert found["neuron.answers"].grade == Grade.WARNING
    assert list(found["neuron.answers"].facts["steps"]) == [step]


def test_devices_that_this_user_may_not_open():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        os.chmod(folder, 0o755)
        root = instance(Path(folder), "trn1.2xlarge")
        (root.folder / "dev/neuron0").chmod(0o600)
        script = f"""if True:
            import os
            from pathlib import Path
            from neuron_di.doctor.machine import Machine
            from neuron_di.doctor.pci import may_use
            if os.getuid() == 0:
                os.setgid(65534), os.setgroups([]), os.setuid(65534)
            else:
                os.chmod({str(root.folder / "dev/neuron0")!r}, 0)
            print(may_use(Machine(root=Path({folder!r})), "/dev/neuron0"))"""
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert done.stdout == "False\n"


def test_the_table_agrees_with_itself():
    for name, row in INSTANCES.items():
        assert name == row.name
        assert len(row.efa_of_device) in (0, row.num_devices)
        if row.efa_of_device:
            assert len(set(row.efa_of_device)) == row.num_efa
        assert row.cores_per_device % row.logical_default == 0
    assert INSTANCES["trn1.32xlarge"].devices_per_efa == 2
    assert INSTANCES["trn2.48xlarge"].devices_per_efa == 1
    assert INSTANCES["trn1.2xlarge"].num_efa == INSTANCES["inf2.48xlarge"].num_efa == 0
