"""The doctor on EFA: all adapters, some, none, no device files, and what libfabric says."""

import os

import pytest
from neuron_machines import by_name, fi_info, instance, laptop, log_line, machine, options

from neuron_di.doctor import efa
from neuron_di.doctor.finding import Grade

KNOWS_NEURON = log_line("number of neuron cores: 32")


def findings(root, path=None, device="auto", **variables):
    environment = {"PATH": path or "/nowhere", **variables}
    return by_name(efa.check(machine(root, environment), options(device)))


def domains_of(root):
    return [path.name for path in sorted((root.folder / "sys/class/infiniband").iterdir())]


def complete(tmp_path, name="trn1.32xlarge", log=KNOWS_NEURON):
    root = instance(tmp_path / "root", name)
    return root, fi_info(tmp_path / "bin", domains_of(root), log=log)


@pytest.mark.parametrize(
    ("name", "count", "pairs"),
    [
        ("trn1.32xlarge", 8, "2 devices by each adapter: 0,1 by 0000:10:1a.0; 2,3 by 0000:a0:1a.0"),
        ("trn2.48xlarge", 16, "one device by each adapter: 0 by 0000:c9:00.0; 1 by 0000:b4:00.0"),
    ],
)
def test_a_complete_instance(tmp_path, name, count, pairs):
    found = findings(*complete(tmp_path, name))
    assert {key: each.grade for key, each in found.items()} == {
        "efa.adapters": Grade.OK,
        "efa.driver": Grade.OK,
        "efa.verbs": Grade.OK,
        "efa.pairs": Grade.OK,
        "efa.libfabric": Grade.OK,
        "efa.memory": Grade.OK,
    }
    assert found["efa.adapters"].says == f"{count} EFA adapters"
    assert found["efa.pairs"].says.startswith(pairs)
    assert found["efa.libfabric"].says == f"libfabric 2.4.0 sees {count} EFA adapters"
    assert len(found["efa.pairs"].facts["efa_of_device"]) == 16


def test_one_adapter_of_eight(tmp_path):
    root = instance(tmp_path / "root", "trn1.32xlarge", num_efa=1)
    found = findings(root, fi_info(tmp_path / "bin", domains_of(root), log=KNOWS_NEURON))
    assert found["efa.adapters"].grade == Grade.FAILED
    assert found["efa.adapters"].says.startswith("1 of 8 EFA adapters are attached")
    assert "No matching NIC" in found["efa.adapters"].says
    assert found["efa.pairs"].grade == Grade.FAILED
    assert found["efa.pairs"].facts["devices_without"] == [str(number) for number in range(2, 16)]
    assert found["efa.libfabric"].grade == Grade.OK, "it sees what there is"


def test_an_instance_that_was_launched_without(tmp_path):
    root = instance(tmp_path, "trn1.32xlarge", num_efa=0)
    found = findings(root)
    assert list(found) == ["efa.adapters"]
    assert found["efa.adapters"].grade == Grade.WARNING
    assert "network cards" in found["efa.adapters"].mend


@pytest.mark.parametrize("name", ["inf2.48xlarge", "trn1.2xlarge"])
def test_an_instance_that_has_no_efa(tmp_path, name):
    found = findings(instance(tmp_path, name))
    assert list(found) == ["efa.adapters"]
    assert found["efa.adapters"].grade == Grade.NOTE
    assert found["efa.adapters"].says.startswith(f"{name} has no EFA")


def test_an_adapter_that_reaches_no_devices_memory_is_not_missed(tmp_path):
    found = findings(instance(tmp_path, "trn2.3xlarge", num_efa=0))["efa.adapters"]
    assert found.grade == Grade.NOTE
    assert "either way" in found.says
    assert found.facts["num_expected"] == 1


def test_a_laptop_has_none(tmp_path):
    found = findings(laptop(tmp_path))
    assert found["efa.adapters"].grade == Grade.NOTE
    assert findings(laptop(tmp_path), device="cpu") == {}


def test_a_container_without_its_device_files(tmp_path):
    root, path = complete(tmp_path)
    root.remove("/dev/infiniband/uverbs*")
    path = fi_info(tmp_path / "bin", [], failure="fi_getinfo: -61 (No data available)")
    found = findings(root, path)
    assert found["efa.verbs"].grade == Grade.WARNING, "the proxy needs none"
    assert found["efa.verbs"].says == "there is no EFA device file in /dev/infiniband"
    assert "--device=/dev/infiniband/uverbs0" in found["efa.verbs"].mend
    assert "efa.libfabric" not in found
    assert "efa.memory" not in found


def test_a_container_with_one_device_file_as_in_aws_tutorials(tmp_path):
    root, path = complete(tmp_path)
    root.remove("/dev/infiniband/uverbs[1-7]")
    found = findings(root, path)["efa.verbs"]
    assert found.grade == Grade.WARNING
    assert "has 1 of 8 EFA device files: /dev/infiniband/uverbs1 is not here" in found.says
    assert findings(root, path, "neuron")["efa.verbs"].grade == Grade.FAILED


def test_device_files_of_other_makers_do_not_count(tmp_path):
    root, path = complete(tmp_path)
    other = root.pci_device("0000:73:00.0", "0x1021", "mlx5_core")
    root.link("/sys/class/infiniband_verbs/uverbs20", f"{other}/infiniband_verbs/uverbs20")
    root.link(f"{other}/infiniband_verbs/uverbs20/device", other)
    assert findings(root, path)["efa.verbs"].says == "8 EFA device files"


def test_adapters_that_the_driver_does_not_have(tmp_path):
    root, path = complete(tmp_path)
    root.remove("/sys/module/efa/version")
    root.remove("/sys/devices/pci*/0000:*:1a.0/driver")
    found = findings(root, path)["efa.driver"]
    assert found.grade == Grade.FAILED
    assert "does not have 4 of 8 adapters: it is not loaded" in found.says


@pytest.mark.parametrize(("device", "grade"), [("auto", Grade.WARNING), ("neuron", Grade.FAILED)])
def test_a_proxys_container_needs_neither_efas_driver_nor_libfabric(tmp_path, device, grade):
    """It has no devices of Neuron's; those who say that it must have some need EFA, too."""
    root, _ = complete(tmp_path)
    root.remove("/dev/neuron*")
    root.remove("/sys/devices/pci*/0000:*:1a.0/driver")
    path = fi_info(tmp_path / "bin", [], failure="fi_getinfo: -61 (No data available)")
    found = findings(root, path, device)
    assert found["efa.driver"].grade == found["efa.libfabric"].grade == grade
    failed = [key for key, each in found.items() if each.grade is Grade.FAILED]
    assert (failed == []) == (device == "auto")


def test_adapters_at_other_addresses_than_the_table_has(tmp_path):
    root, path = complete(tmp_path)
    root.efa_adapters(["0000:77:19.0"], first=8)
    found = findings(root, path)["efa.pairs"]
    assert found.grade == Grade.NOTE
    assert found.facts["strange"] == ["0000:77:19.0"]


def test_efa_beside_other_devices(tmp_path):
    """Such as an instance with GPUs: nothing is asked of Neuron."""
    root = laptop(tmp_path / "root")
    root.efa_adapters(["0000:10:19.0"])
    found = findings(root, fi_info(tmp_path / "bin", domains_of(root)))
    assert found["efa.adapters"].grade == Grade.NOTE
    assert set(found) == {"efa.adapters", "efa.driver", "efa.verbs", "efa.libfabric"}


def test_no_libfabric(tmp_path):
    root, _ = complete(tmp_path)
    found = findings(root)
    assert found["efa.libfabric"].grade == Grade.WARNING
    assert "/opt/amazon/efa" in found["efa.libfabric"].mend


@pytest.mark.parametrize(
    ("words", "grade", "says"),
    [
        ("FI_HMEM_NEURON is not initialized", Grade.WARNING, "does not find the Neuron runtime"),
        (
            "FI_HMEM_NEURON requires p2p, unset FI_HMEM_DISABLE_P2P",
            Grade.WARNING,
            "switched off by FI_HMEM_DISABLE_P2P",
        ),
        (
            "No EFA RDMA read support, transfers using FI_HMEM_NEURON will fail.",
            Grade.WARNING,
            "have no RDMA read",
        ),
        ("Cannot allocate Neuron buffer", Grade.NOTE, "only in a process that has cores"),
        ("nothing of this", Grade.NOTE, "only in a process that has cores"),
    ],
)
def test_what_libfabric_says_of_neuron_memory(tmp_path, words, grade, says):
    root, path = complete(tmp_path, log=log_line(words))
    found = findings(root, path)["efa.memory"]
    assert found.grade == grade
    assert says in found.says


def test_a_libfabric_that_hangs(tmp_path, monkeypatch):
    from machine_kit import make_program

    root, _ = complete(tmp_path)
    make_program(tmp_path / "slow", "fi_info", "exec sleep 600")
    monkeypatch.setattr(efa.libfabric, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(efa.libfabric, "_VERSION_TIMEOUT_S", 0.2)
    found = findings(root, f"{tmp_path / 'slow'}:{os.environ['PATH']}")["efa.libfabric"]
    assert found.grade == Grade.FAILED
    assert "it did not end in time" in found.says
