"""The doctor on the Neuron driver, runtime and packages: which belong together."""

import os

import pytest
from neuron_machines import (
    by_name,
    instance,
    laptop,
    machine,
    neuron_packages,
    options,
    package,
    simulated,
)

from neuron_di.doctor import neuron_software
from neuron_di.doctor.finding import Grade
from neuron_di.neuron_releases import RELEASES, sdks_of, why_not_together


def findings(root, environment, packages, device="auto"):
    looked_at = machine(root, environment, packages)
    return by_name(neuron_software.check(looked_at, options(device)))


@pytest.fixture
def environment(tmp_path):
    return simulated(tmp_path / "sim")


def test_parts_of_one_release(tmp_path, environment):
    root = instance(tmp_path / "root", "trn2.48xlarge")
    found = findings(root, environment, neuron_packages(tmp_path / "packages"))
    assert {key: each.grade for key, each in found.items()} == {
        "neuron.driver": Grade.OK,
        "neuron.runtime": Grade.OK,
        "neuron.pair": Grade.OK,
        "neuron.release": Grade.OK,
        "neuron.inference": Grade.NOTE,
    }
    assert found["neuron.pair"].says == "driver and runtime are both of SDK 2.30"
    assert found["neuron.runtime"].facts["version"] == "2.32.31.0"
    assert found["neuron.runtime"].facts["sdks"] == ["2.30"]
    assert found["neuron.release"].facts["versions"]["neuronx-cc"] == "2.25.3371.0"


def test_a_laptop_is_asked_nothing(tmp_path):
    assert findings(laptop(tmp_path), {"PATH": os.environ["PATH"]}, tmp_path) == {}


def test_a_driver_that_is_not_loaded(tmp_path, environment):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    root.remove("/sys/module/neuron/version")
    found = findings(root, environment, neuron_packages(tmp_path / "packages"))
    assert found["neuron.driver"].grade == Grade.FAILED
    assert "modprobe neuron" in found["neuron.driver"].mend
    assert "neuron.pair" not in found


@pytest.mark.parametrize(
    ("driver", "grade", "words"),
    [
        ("2.26.10.0", Grade.FAILED, "runtime 2.32 needs a driver later than 2.26"),
        ("2.29.0.0", Grade.FAILED, "driver 2.29 and later need a runtime 2.33 or later"),
        ("2.27.4.0", Grade.WARNING, "the driver is of SDK 2.29 and the runtime of SDK 2.30"),
        ("2.19.64.0", Grade.FAILED, "runtime 2.32 needs a driver later than 2.26"),
    ],
)
def test_a_driver_of_another_release(tmp_path, environment, driver, grade, words):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    root.file("/sys/module/neuron/version", f"{driver}\n")
    found = findings(root, environment, neuron_packages(tmp_path / "packages"))
    assert found["neuron.pair"].grade == grade
    assert words in found["neuron.pair"].says


def test_pairs_that_nothing_is_known_of(tmp_path, environment):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    root.file("/sys/module/neuron/version", "2.28.0.0-custom\n")
    packages = neuron_packages(tmp_path / "packages")
    assert findings(root, environment, packages)["neuron.pair"].grade == Grade.OK
    assert why_not_together("2.40.1", "2.39", "trn1") is None
    assert sdks_of("runtime", "2.40.1") == ()
    assert why_not_together("2.26.42.0", "2.21.37.0", "trn2") is not None
    assert why_not_together("2.26.42.0", "2.21.37.0", "trn1") is None


def test_the_runtime_is_missing(tmp_path, environment):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    nowhere = environment | {"NEURON_DI_LIBNRT": str(tmp_path / "libnrt.so.1")}
    found = findings(root, nowhere, neuron_packages(tmp_path / "packages"))
    assert found["neuron.runtime"].grade == Grade.FAILED
    assert "cannot open shared object file" in found["neuron.runtime"].says
    assert "NEURON_DI_LIBNRT names another path" in found["neuron.runtime"].says
    assert "aws-neuronx-runtime-lib" in found["neuron.runtime"].mend


def test_an_older_runtime_says_what_it_lacks(tmp_path, environment):
    from nrt_sim.build import library_path

    root = instance(tmp_path / "root", "trn1.32xlarge")
    root.file("/sys/module/neuron/version", "2.26.10.0\n")
    older = environment | {"NEURON_DI_LIBNRT": str(library_path(2))}
    packages = neuron_packages(tmp_path / "packages")
    found = findings(root, older, packages)
    assert found["neuron.runtime"].facts["async_api"] == 2
    assert found["neuron.attached_efa"].grade == Grade.NOTE
    assert found["neuron.pair"].grade == Grade.OK
    assert "neuron.tensors" not in found, "2.30 takes 4 GiB and more"
    assert found["neuron.release"].grade == Grade.WARNING
    assert "neuronx-cc 2.25 (SDK 2.30)" in found["neuron.release"].says


def test_packages_that_are_not_there(tmp_path, environment):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    (tmp_path / "none").mkdir()
    found = findings(root, environment, tmp_path / "none")
    assert found["neuron.packages"].grade == Grade.FAILED
    assert found["neuron.packages"].facts["placeholders"] == []
    assert "--extra-index-url" in found["neuron.packages"].mend


def test_an_indexs_placeholder_is_no_package(tmp_path, environment):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    packages = tmp_path / "packages"
    neuron_packages(packages)
    hollow = next(packages.glob("neuronx_distributed_inference-*"))
    (hollow / "RECORD").write_text("neuronx_distributed_inference/__init__.py,,\n")
    found = findings(root, environment, packages)
    assert found["neuron.packages"].facts["placeholders"] == ["neuronx-distributed-inference"]
    assert "is an empty placeholder" in found["neuron.packages"].says


def test_a_torch_that_torch_neuronx_is_not_built_for(tmp_path, environment):
    root = instance(tmp_path / "root", "trn1.32xlarge")
    packages = neuron_packages(tmp_path / "packages", torch="2.13.0+cpu")
    found = findings(root, environment, packages)
    assert found["neuron.torch"].grade == Grade.FAILED
    assert "torch==2.9.*" in found["neuron.torch"].mend


@pytest.mark.parametrize(
    ("version", "grade"),
    [("0.6.10598", Grade.FAILED), ("0.7.15063", None), ("0.8.16251", None)],
)
def test_an_nxd_inference_that_no_worker_takes(tmp_path, environment, version, grade):
    packages = neuron_packages(tmp_path / "packages", **{"neuronx-distributed-inference": version})
    found = findings(instance(tmp_path / "root", "trn2.48xlarge"), environment, packages)
    assert (found["neuron.inference"].grade if "neuron.inference" in found else None) == grade


def test_nxd_inference_for_trn2_on_trn1(tmp_path, environment):
    packages = neuron_packages(tmp_path / "packages")
    root = instance(tmp_path / "root", "trn1.32xlarge")
    assert findings(root, environment, packages)["neuron.inference"].grade == Grade.WARNING
    root.instance("trn1.999xlarge")  # then its devices tell
    assert findings(root, environment, packages)["neuron.inference"].grade == Grade.WARNING


@pytest.mark.parametrize(
    ("version", "is_doubtful"),
    [("1.0.0", True), ("1.0.1", True), ("0.9.0", True), ("1.1.0", False), ("1.5.1", False)],
)
def test_nixl_that_refuses_neuron_memory(tmp_path, environment, version, is_doubtful):
    root = instance(tmp_path / "root", "trn2.48xlarge")
    packages = neuron_packages(tmp_path / "packages")
    package(packages, "nixl-cu12", version)
    found = findings(root, environment, packages)
    assert ("neuron.nixl" in found) == is_doubtful


def test_the_table_of_releases_is_in_order():
    sdks = [row.sdk for row in RELEASES]
    assert sdks == [f"2.{minor}" for minor in range(33, 23, -1)]
    assert sdks_of("torch", "2.9.0.2.13.26312+abc") == ("2.29",)
    assert sdks_of("inference", "0.10.17970") == ("2.31", "2.30")
    for part, version in (
        ("runtime", "2.35.30.0"),
        ("driver", "2.31.7.0"),
        ("compiler", "2.28.7631.0+abc"),
    ):
        assert sdks_of(part, version) == ("2.33",)
    assert why_not_together("2.35.30.0", "2.31.7.0", "trn2") is None
    assert sdks_of("compiler", "") == sdks_of("compiler", "x") == ()
