"""Which network devices NIXL's UCX is told to use."""

import socket

import psutil
import pytest

from neuron_di.transfer import nixl_devices
from neuron_di.transfer.nixl_devices import devices_of

ADDRESSES = [
    (address.address, interface)
    for interface, addresses in psutil.net_if_addrs().items()
    for address in addresses
    if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address
]


@pytest.fixture(autouse=True)
def rdma(monkeypatch, tmp_path):
    """The host has none."""
    monkeypatch.setattr(nixl_devices, "_RDMA", tmp_path)
    return tmp_path


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost"])
def test_loopback_is_one_interface_whatever_else_the_host_has(host, rdma):
    (rdma / "mlx5_0/ports/1").mkdir(parents=True)
    assert devices_of(host) == ["lo"]


def test_each_address_of_this_host_has_its_interface():
    assert ADDRESSES
    for host, interface in ADDRESSES:
        assert devices_of(host) == [interface]


def test_rdma_devices_are_used_beside_the_interface(rdma, monkeypatch):
    for port in ("mlx5_1/ports/1", "mlx5_0/ports/2", "mlx5_0/ports/1"):
        (rdma / port).mkdir(parents=True)
    monkeypatch.setattr(
        nixl_devices, "_interfaces", lambda: {nixl_devices.ipaddress.ip_address("10.1.2.3"): "ens5"}
    )
    assert devices_of("10.1.2.3") == ["ens5", "mlx5_0:1", "mlx5_0:2", "mlx5_1:1"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "198.51.100.7", "no.such.host.invalid"])
def test_other_addresses_are_of_no_interface(host):
    assert devices_of(host) == []
