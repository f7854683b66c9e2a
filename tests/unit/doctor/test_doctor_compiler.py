"""The doctor on the Neuron compiler: there, missing, and not to be used."""

import os

import pytest
from machine_kit import make_program
from neuron_machines import by_name, instance, laptop, machine, options

from neuron_di.doctor import neuron_compiler
from neuron_di.doctor.finding import Grade


def findings(tmp_path, script=None, *, root=None):
    if script is not None:
        make_program(tmp_path / "bin", "neuronx-cc", script)
    root = root or instance(tmp_path / "root", "trn1.32xlarge")
    return by_name(neuron_compiler.check(machine(root, {"PATH": str(tmp_path / "bin")}), options()))


def test_a_compiler_of_a_known_release(tmp_path):
    found = findings(tmp_path, "echo 'NeuronX Compiler version 2.25.3371.0+f524f7c9'")
    assert found["neuron.compiler"].grade == Grade.OK
    assert found["neuron.compiler"].says == "the compiler is 2.25.3371.0, of SDK 2.30"
    assert found["neuron.compiler"].facts["path"] == str(tmp_path / "bin/neuronx-cc")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "is not on PATH"),
        ("echo no such module >&2; exit 3", "does not do: no such module"),
    ],
)
def test_without_one_a_model_is_compiled_elsewhere(tmp_path, script, words):
    found = findings(tmp_path, script)["neuron.compiler"]
    assert found.grade == Grade.WARNING
    assert words in found.says
    assert "pip install neuronx-cc --extra-index-url" in found.mend
    assert "compiled elsewhere" in found.mend


def test_where_no_device_is_nothing_is_said(tmp_path):
    assert findings(tmp_path, root=laptop(tmp_path / "root")) == {}
    root = instance(tmp_path / "proxy", "trn1.2xlarge")
    os.unlink(root.folder / "dev/neuron0")
    assert findings(tmp_path, root=root) == {}
