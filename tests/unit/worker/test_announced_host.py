"""What a worker announces is an address that its peers reach, whatever it listens on."""

import socket

import pytest

from neuron_di.config import EtcdOptions, WorkerOptions
from neuron_di.errors import ConfigError
from neuron_di.worker import announced_host as module
from neuron_di.worker.announced_host import announced_host, as_announced

AWAY = "192.0.2.7"  # a registry on another machine, by the routes below
OWN = "192.0.2.99"


@pytest.fixture
def ways(monkeypatch):
    """The routes of a machine that has the address OWN beside loopback."""

    def way_to(host, family):
        if family == socket.AF_INET6 and ":" not in host:
            return "", ""
        known = {"127.0.0.1": "127.0.0.1", AWAY: OWN, OWN: OWN, "192.0.2.1": OWN}
        return (known[host], host) if host in known else ("", "")

    monkeypatch.setattr(module, "_way_to", way_to)


def announced(host: str, **options: object) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    given = WorkerOptions(model="m", role="decode", host=host, **options)
    with socket.create_server((host, 0), family=family) as sock:
        return announced_host(given, sock)


def etcd(*members: str) -> EtcdOptions:
    return EtcdOptions(etcd=members)


def test_a_name_is_announced_as_the_address_that_it_listens_on():
    assert announced("localhost") == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1"])
def test_an_address_is_announced_as_it_is(host):
    assert announced(host) == host


def test_of_all_addresses_the_one_that_leads_to_the_registry(ways):
    assert announced("0.0.0.0", registry="tcp://127.0.0.1:4000") == "127.0.0.1"
    assert announced("0.0.0.0", registry=f"tcp://{AWAY}:4000") == OWN
    assert announced("0.0.0.0", etcd=etcd("gone:2379", f"{AWAY}:2379")) == OWN


def test_without_a_registry_the_one_that_leads_anywhere(ways, monkeypatch):
    assert announced("0.0.0.0") == OWN
    monkeypatch.setattr(module, "_way_to", lambda *_: ("", ""))
    assert announced("0.0.0.0") == "127.0.0.1"


def test_the_system_is_asked_for_the_way():
    assert announced("0.0.0.0", registry="tcp://localhost:4000") == "127.0.0.1"
    assert announced("0.0.0.0", etcd=etcd("127.0.0.1:2379")) == "127.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_who_cannot_be_reached_by_anybody_does_not_start(ways, host):
    with pytest.raises(ConfigError, match=r"leads to gone:2379.*--announce-host"):
        announced(host, etcd=etcd("gone:2379"))


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_the_operators_word_counts(ways, host):
    assert announced(host, announce_host="10.1.2.3", etcd=etcd("gone:2379")) == "10.1.2.3"


@pytest.mark.parametrize("host", ["my-machine", "0.0.0.0", "::", "169.254.1.1", ""])
def test_what_peers_would_not_take_is_refused_at_once(host):
    with pytest.raises(ConfigError, match="--announce-host: "):
        WorkerOptions(model="m", role="decode", announce_host=host)


@pytest.mark.parametrize(
    ("registry", "is_elsewhere"), [(AWAY, True), (OWN, False), ("127.0.0.1", False)]
)
def test_loopback_is_announced_with_a_warning_where_the_registry_is_elsewhere(
    ways, caplog, registry, is_elsewhere
):
    assert announced("127.0.0.1", registry=f"tcp://{registry}:4000") == "127.0.0.1"
    assert [record.msg for record in caplog.records] == ["announces_loopback"] * is_elsewhere


def test_a_partners_name_is_compared_as_its_address():
    assert as_announced("localhost:4000") == "127.0.0.1:4000"
    assert as_announced("[::1]:4000") == "::1:4000"
    assert as_announced("10.0.0.7:4000") == "10.0.0.7:4000"
    assert as_announced("no-such-host.invalid:4000") == "no-such-host.invalid:4000"
