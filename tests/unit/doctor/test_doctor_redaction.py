"""What says whose machine it is does not stay in a report."""

import socket

import pytest

from neuron_di.doctor import first_hour_report
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.redaction import Redactor

# Not spelled out: no file of this project names such a folder.
HOMES = ["/".join(["", folder, name, "x"]) for folder, name in (("home", "bob"), ("Users", "eve"))]
ENVIRONMENT = {
    "USER": "alice",
    "HOME": "/srv/people/alice",
    "HOSTNAME": "trn-7.lab.example",
    "AWS_SECRET_ACCESS_KEY": "abc/def+ghi=",
    "HF_TOKEN": "a-token-of-hf",
    "PASSWORD": "12",
    "NEURON_RT_LOG_LEVEL": "INFO",
}


@pytest.fixture
def redactor(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hostname").write_text("bighost\n")
    return Redactor(Machine(root=tmp_path, environment=ENVIRONMENT), kept=["2.32.31.0"])


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("peer 10.1.2.3:45645 lost", "peer [address]:45645 lost"),
        (
            "from fe80::1%eth0, 2001:db8::5 and [::1]:80",
            "from [address], [address] and [[address]]:80",
        ),
        ("mac 0a:1b:2c:3d:4e:5f", "mac [address]"),
        ("alice and malice", "[user] and malice"),
        ("mail alice@lab.example now", "mail [mail] now"),
        ("on trn-7.lab.example, trn-7 and bighost", "on [host], [host] and [host]"),
        ("ip-172-31-5-6.ec2.internal", "[host]"),
        (f"/srv/people/alice/x {HOMES[0]} {HOMES[1]}", "~/x ~/x ~/x"),
        ("cannot open /data/acme/libnrt.so.1", "cannot open [path]"),
        ("key abc/def+ghi= and a-token-of-hf", "key [secret] and [secret]"),
        ("AKIAABCDEFGHIJKLMNOP i-0123456789abcdef0", "[secret] [aws]"),
        ("arn:aws:iam::123456789012:role/x", "[aws]"),
        ("Authorization: Bearer eyJhbGciOi", "Authorization: [secret]"),
        ("hf_abcdefghijklmnopq", "[secret]"),
    ],
)
def test_goes(redactor, text, clean):
    assert redactor.text(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "runtime 2.32.31.0 of SDK 2.30",
        "adapters 0000:10:1a.0 and 0000:c9:00.0",
        "/opt/aws/neuron/lib/libnrt.so.1 and /dev/infiniband/uverbs0",
        "2021-Aug-11 18:38:27.0917 13713:13713 ERROR NRT:nrt_init",
        "libfabric:123:1700000000::core:core:f():1<info> FI_HMEM_NEURON is not initialized",
        "NRT_FAILURE (1); 12 of 16",
        "--transfer shm,tcp and/or nrt",
    ],
)
def test_stays(redactor, text):
    assert redactor.text(text) == text


def test_this_hosts_own_name_goes_without_being_told(redactor):
    name = socket.gethostname()
    if len(name) > 2 and name != "localhost":
        assert name not in redactor.text(f"on {name} it was")


def test_it_goes_through_whole_values(redactor):
    value = {"alice": [1, None, True, {"x": "10.0.0.1"}], "n": 2.5, "t": ("bighost",)}
    assert redactor.value(value) == {
        "[user]": [1, None, True, {"x": "[address]"}],
        "n": 2.5,
        "t": ["[host]"],
    }


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("u:/data/acme/x", "acme"),
        ("conf=/data/acme/x", "acme"),
        ("-I/data/acme/include", "acme"),
        ("/opt/acme/models", "acme"),
        ("https://user:pw@host.acme/x", "acme"),
        ("file:///srv/acme/x", "acme"),
        ("s3://acme-bucket/weights", "acme"),
        ("123456789012.dkr.ecr.us-west-2.amazonaws.com/acme:1", "123456789012"),
    ],
)
def test_places_of_the_operators_own_are_taken_out(tmp_path, text, hidden):
    told = Redactor(Machine(tmp_path, environment={})).text(text)
    assert hidden not in told
    assert "/opt/aws/neuron/lib" in Redactor(Machine(tmp_path, environment={})).text(
        "libnrt of /opt/aws/neuron/lib"
    )


def test_of_a_variable_only_numbers_and_known_words_are_told():
    environment = {
        "NEURON_RT_VISIBLE_CORES": "0-7,16",
        "FI_PROVIDER": "efa",
        "NEURON_RT_ROOT_COMM_ID": "head7.corp.example:62182",
        "NCCL_CONF": "u:/data/acme/x",
        "NEURON_RT_AUTH_TOKEN": "short",
    }
    assert first_hour_report._environment(Machine(environment=environment)) == {
        "FI_PROVIDER": "efa",
        "NCCL_CONF": "set",
        "NEURON_RT_AUTH_TOKEN": "set",
        "NEURON_RT_ROOT_COMM_ID": "set",
        "NEURON_RT_VISIBLE_CORES": "0-7,16",
    }
