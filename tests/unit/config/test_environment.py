"""What a child of ours is told by its environment."""

from neuron_di.cli import _KEY_VARIABLE
from neuron_di.config import child_environment
from neuron_di.transfer_bench.flags import KEY_VARIABLE


def test_a_child_gets_every_variable_but_the_keys(monkeypatch):
    monkeypatch.setenv(_KEY_VARIABLE, "an-operators-key")
    monkeypatch.setenv(KEY_VARIABLE, "a-measurements-key")
    kept = {"NEURON_DI_LOG_LEVEL": "debug", "UCX_TLS": "tcp", "LD_LIBRARY_PATH": "/x"}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    got = child_environment()
    assert got.items() >= kept.items()
    assert not {_KEY_VARIABLE, KEY_VARIABLE} & got.keys()
