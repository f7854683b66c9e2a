import argparse

import pytest

from neuron_di.config import ProxyOptions, WorkerAddressOptions, WorkerOptions, load_options
from neuron_di.errors import ConfigError

ANY = WorkerAddressOptions()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "::1", "10.1.2.3", "192.0.2.7", "2001:db8::7", "fd00::1"]
)
def test_unicast_addresses_are_allowed(host):
    assert ANY.why_refused(host, 4000) == ""


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",  # a cloud's metadata
        "::ffff:169.254.169.254",  # the same in other clothes
        "2002:a9fe:a9fe::1",  # and in others
        "64:ff9b::a9fe:a9fe",  # as a translator of addresses has it
        "::a9fe:a9fe",
        "::169.254.169.254",
        "2001:0:a9fe:a9fe::",  # Teredo
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "fd00:ec2::254",
        "100.100.100.200",
        "64:ff9b::6464:64c8",
        "169.254.1.1",
        "fe80::1",
        "fe80::1%eth0",
        "0.0.0.0",
        "::",
        "0.1.2.3",
        "224.0.0.1",
        "ff02::1",
        "255.255.255.255",
        "240.0.0.1",
    ],
)
def test_what_is_no_machines_address_is_refused(host):
    assert ANY.why_refused(host, 4000) == f"{host} is not the address of one machine"


@pytest.mark.parametrize(
    "host",
    ["example.org", "LOCALHOST.", "127.1", "0x7f000001", "2130706433", "127.0.0.1 ", "", "a" * 999],
)
def test_a_name_is_refused_whatever_it_means_now(host):
    assert "is no IP address" in ANY.why_refused(host, 4000)


def test_networks_and_ports_narrow_it_down():
    options = WorkerAddressOptions(
        worker_networks=("10.1.0.0/16", "2001:db8::/32"), worker_ports="20000-20009"
    )
    assert options.why_refused("10.1.255.255", 20000) == ""
    assert options.why_refused("::ffff:10.1.0.1", 20009) == ""
    assert options.why_refused("2001:db8::1", 20005) == ""
    assert options.why_refused("64:ff9b::10.1.0.1", 20005) == ""
    assert "is in none of" in options.why_refused("64:ff9b::10.2.0.1", 20005)
    for host in ("10.2.0.1", "127.0.0.1", "localhost", "::1"):
        assert options.why_refused(host, 20000) == f"{host} is in none of --worker-networks"
    for port in (19999, 20010, 0, -1):
        assert "is not among --worker-ports 20000-20009" in options.why_refused("10.1.0.1", port)
    assert "port 1023 " in ANY.why_refused("10.1.0.1", 1023)
    linked = WorkerAddressOptions(worker_networks=("169.254.0.0/16",))
    assert linked.why_refused("169.254.169.254", 4000) != ""  # not even when it is named


@pytest.mark.parametrize(
    "flag",
    [
        "--worker-networks=10.1.0.0/33",
        "--worker-networks=10.1.2.3/16",
        "--worker-networks=here",
        "--worker-ports=5",
        "--worker-ports=9-5",
        "--worker-ports=0-5",
        "--worker-ports=1-70000",
    ],
)
@pytest.mark.parametrize("options_class", [ProxyOptions, WorkerOptions])
def test_what_cannot_be_read_ends_the_start(options_class, flag):
    key, value = flag.removeprefix("--").split("=")
    given = {key.replace("-", "_"): value, "model": "m", "role": "decode"}
    if options_class is ProxyOptions:
        del given["model"], given["role"]
    with pytest.raises(ConfigError, match=flag.split("=")[0]):
        load_options(options_class, argparse.Namespace(**given), {})
