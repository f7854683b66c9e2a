"""The doctor in containers of a Neuron node: a proxy's, without devices, and one with a part."""

import os

import pytest
from neuron_machines import by_name, instance, machine, neuron_packages, options, simulated

from neuron_di.doctor import efa, neuron_devices, neuron_memory, neuron_software
from neuron_di.doctor.finding import Grade


def findings(root, environment, packages, device="auto"):
    looked_at = machine(root, environment, packages)
    modules = (neuron_devices, neuron_software, neuron_memory, efa)
    return by_name(each for module in modules for each in module.check(looked_at, options(device)))


@pytest.mark.parametrize("has_driver", [True, False])
def test_a_proxys_container_on_a_node(tmp_path, has_driver):
    root = instance(tmp_path / "root", "trn1.32xlarge", num_efa=4)
    root.remove("/dev/neuron*")
    root.remove("/dev/infiniband/*")
    if not has_driver:
        root.remove("/sys/module/neuron/version")
    (tmp_path / "none").mkdir()
    bare = {"PATH": os.environ["PATH"]}
    found = findings(root, bare, tmp_path / "none")
    assert [each.check for each in found.values() if each.grade is Grade.FAILED] == []
    warned = ["neuron.runtime", "neuron.packages"]
    for name in (*warned, "neuron.devices" if has_driver else "neuron.driver"):
        assert found[name].grade == Grade.WARNING
        assert "--device cpu" in found[name].mend
    assert found["neuron.memory"].grade == Grade.SKIPPED
    assert found["efa.pairs"].grade == Grade.WARNING
    assert "this container has 0 of 16 Neuron devices" in found["efa.pairs"].says
    wanted = findings(root, bare, tmp_path / "none", "neuron")
    assert {wanted[name].grade for name in warned} == {Grade.FAILED}


@pytest.mark.parametrize(("device", "grade"), [("auto", Grade.WARNING), ("neuron", Grade.FAILED)])
def test_what_ails_a_nodes_devices_ails_no_proxy(tmp_path, device, grade):
    """Errors that the driver counted, and a torch that torch-neuronx is not built for."""
    root = instance(tmp_path / "root", "trn1.32xlarge")
    root.remove("/dev/neuron*")
    hardware = "/sys/devices/virtual/neuron_device/neuron3/stats/hardware"
    root.file(f"{hardware}/mem_ecc_uncorrected", "1\n")
    packages = neuron_packages(tmp_path / "packages", torch="2.13.0+cpu")
    found = findings(root, {"PATH": os.environ["PATH"]}, packages, device)
    for name in ("neuron.health", "neuron.torch"):
        assert found[name].grade == grade
        assert ("--device cpu" in found[name].mend) == (device == "auto")
    failed = [each.check for each in found.values() if each.grade is Grade.FAILED]
    assert (failed == []) == (device == "auto")


@pytest.mark.parametrize(("kept", "grade"), [("0", Grade.WARNING), ("15", Grade.FAILED)])
def test_adapters_of_devices_that_a_container_has_not(tmp_path, kept, grade):
    """The first two adapters are those of the devices 0 to 3."""
    root = instance(tmp_path / "root", "trn1.32xlarge", num_efa=2)
    for path in (root.folder / "dev").glob("neuron*"):
        if path.name != f"neuron{kept}":
            path.unlink()
    found = by_name(efa.check(machine(root, {"PATH": "/nowhere"}), options()))["efa.pairs"]
    assert found.grade == grade
    assert ("this container has 1 of 16" in found.says) == (grade is Grade.WARNING)


def test_a_container_has_the_cores_of_its_devices(tmp_path):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    root.remove("/dev/neuron[1-9]*")
    found = by_name(
        neuron_devices.check(machine(root, simulated(tmp_path / "sim", "trn1.2xlarge")), options())
    )
    assert found["neuron.cores"].grade == Grade.OK
    assert found["neuron.cores"].says == "2 NeuronCores"


def test_one_device_is_no_plural(tmp_path):
    root = instance(tmp_path / "root", "trn2.3xlarge")
    root.process(7, "server", "/dev/neuron0")
    looked_at = machine(root, simulated(tmp_path / "sim", "trn2.48xlarge"))
    found = by_name(neuron_devices.check(looked_at, options()))
    assert found["neuron.instance"].says == "trn2.3xlarge: 1 device, 4 NeuronCores, 1 EFA adapter"
    assert found["neuron.devices"].says == "1 Neuron device is there"
    assert found["neuron.users"].says.startswith("1 device is open in other processes")
