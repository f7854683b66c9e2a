"""The doctor's flags are the server's, and a wrong variable does not keep it from looking."""

from pathlib import Path

import pytest

from neuron_di.config import (
    DoctorOptions,
    FlagParser,
    ServeOptions,
    load_options,
    refused_variables,
)
from neuron_di.doctor import add_doctor_flags
from neuron_di.doctor.command import read_options
from neuron_di.errors import ConfigError


def read(*arguments: str, **environment: str) -> DoctorOptions:
    parser = FlagParser(prog="neuron-di doctor")
    add_doctor_flags(parser)
    return read_options(parser.parse_args(arguments), environment)


def test_defaults() -> None:
    assert read() == DoctorOptions()


def test_a_servers_file_and_variables_are_read(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text("port = 9000\ndevice = 'neuron'\netcd = ['a:1', 'b:2']\nprefill = 3\n")
    options = read("--config", str(path), NEURON_DI_TRANSFER_PORT="9100", NEURON_DI_ROLE="both")
    assert (options.port, options.device, options.etcd.etcd) == (9000, "neuron", ("a:1", "b:2"))
    assert options.kv_transfer.transfer_port == 9100
    options = read("--port", "9001", "--no-transfer-test", NEURON_DI_PORT="9002")
    assert (options.port, options.transfer_test) == (9001, False)


def test_lists_may_be_given_in_pieces() -> None:
    options = read("--peer", "a:1", "--peer", "b:2,c:3", "--listen=d:4", NEURON_DI_PEER="e:5")
    assert options.peer == ("a:1", "b:2", "c:3")
    assert options.listen == ("d:4",)
    assert read(NEURON_DI_PEER="e:5,f:6").peer == ("e:5", "f:6")


def test_wrong_variables_are_left_out_for_the_check_that_tells_of_them() -> None:
    wrong = {"NEURON_DI_PORT": "many", "NEURON_DI_PROT": "1"}
    assert read(**wrong, NEURON_DI_HOST="::1") == DoctorOptions(host="::1")
    refused = refused_variables(wrong | {"NEURON_DI_HOST": "::1", "NEURON_DI_CONFIG": "x.toml"})
    assert set(refused) == set(wrong)
    assert "NEURON_DI_PORT must be a whole number" in refused["NEURON_DI_PORT"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--peer", "nohost"],
        ["--port", "70000"],
        ["--device", "tpu"],
        ["--listen", "a:99999"],
        ["--config", "/nowhere/site.toml"],
    ],
)
def test_wrong_flags_end_it(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        read(*arguments)


def test_a_server_knows_the_doctors_keys(tmp_path: Path) -> None:
    """A file may hold options of other commands, too."""
    path = tmp_path / "site.toml"
    path.write_text("model = 'm'\npeer = ['a:1']\ntransfer_test = false\nport = 9000\n")
    parser = FlagParser(prog="neuron-di serve")
    options = load_options(ServeOptions, parser.parse_args([]), {"NEURON_DI_ONLY": "host"}, path)
    assert options.port == 9000
