"""`neuron-di key`, as an operator types it."""

import os
import subprocess
import sys

import pytest

from neuron_di.cli import main
from neuron_di_proxy.keys import Keys


@pytest.fixture
def file(tmp_path):
    return str(tmp_path / "keys.toml")


def run(capsys, *arguments):
    """(exit code, standard output, standard error)."""
    code = main(["key", *arguments])
    said = capsys.readouterr()
    return code, said.out.strip(), said.err.strip()


def test_a_key_is_made_listed_and_revoked(capsys, file):
    code, text, _ = run(capsys, "create", file, "alice", "--requests-max=4", "--expires-days=9")
    assert code == 0
    tenant = Keys(file).tenant_of(f"Bearer {text}")
    assert (tenant.name, tenant.requests_max, tenant.is_operator) == ("alice", 4, False)
    _, listed, _ = run(capsys, "list", file)
    key_id, secret = text.split("-", 2)[1:]
    assert key_id in listed
    assert "requests_max=4" in listed
    assert secret not in listed
    assert run(capsys, "revoke", file, key_id) == (0, f"revoked: {key_id}", "")
    assert key_id not in run(capsys, "list", file)[1]


def test_a_second_key_has_its_tenants_limits(capsys, file):
    run(capsys, "create", file, "op", "--operator", "--weight=3", "--expires-days=1")
    _, text, _ = run(capsys, "create", file, "op")
    tenant = Keys(file).tenant_of(f"Bearer {text}")
    assert (tenant.weight, tenant.is_operator) == (3.0, True)
    assert run(capsys, "list", file)[1].count("never") == 1  # it does not expire with the first
    code, _, words = run(capsys, "create", file, "op", "--weight=2")
    assert (code, "has keys already" in words) == (2, True)
    assert run(capsys, "revoke", file, "op")[1].count(",") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "FILE", "two words"], "tenant"),
        (["create", "FILE", "a", "--weight=-1"], "weight"),
        (["create", "FILE", "a", "--weight=nan"], "weight"),
        (["create", "FILE", "a", "--requests-max=0"], "requests_max"),
        (["create", "FILE", "a", "--requests-mix=1"], "--requests-max"),
        (["create", "FILE", "a", "--expires-days=1e99"], "expires-days"),
        (["create", "FILE", "a", "--expires-days=0"], "expires-days"),
        (["list", "FILE"], "neuron-di key create"),
        (["revoke", "FILE", "a"], "cannot read"),
        (["destroy", "FILE"], "invalid choice"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(capsys, file, arguments, said):
    code, output, words = run(capsys, *(file if each == "FILE" else each for each in arguments))
    assert (code, output) == (2, "")
    assert said in words
    assert "\n" not in words


def test_a_reader_that_has_seen_enough_is_no_failure(tmp_path, capsys):
    file = str(tmp_path / "keys.toml")
    for number in range(3):
        assert main(["key", "create", file, f"tenant-{number}"]) == 0
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "neuron_di", "key", "list", file]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_name_that_none_may_have_is_refused_in_words(capsys, file):
    code, _, error = run(capsys, "create", file, "two words")
    assert code == 2
    assert "1 to 64 letters" in error
    assert not os.path.exists(file)
