"""Workers of two machines are no pair, although both move KV by shared memory."""

from pathlib import Path

import pytest

from neuron_di.transfer import transfer_domain
from neuron_di.transfer.domain import _this_network, this_machine
from neuron_di.wire import TcpRegion


async def test_workers_of_one_machine_say_the_same(cluster):
    prefill, decode = cluster.prefill(), cluster.decode()
    domain = transfer_domain(prefill.transfer)
    assert domain == transfer_domain(decode.transfer)
    assert domain.startswith("shm@")


@pytest.mark.parametrize("part", ["boot", "user"])
async def test_another_machine_or_user_says_another(cluster, monkeypatch, tmp_path, part):
    here = transfer_domain(cluster.prefill().transfer)
    if part == "boot":
        other = tmp_path / "boot_id"
        other.write_text("another kernel")
        monkeypatch.setattr("neuron_di.transfer.domain._BOOT_ID", Path(other))
    else:
        monkeypatch.setattr("os.geteuid", lambda: 4711)
    this_machine.cache_clear()
    try:
        assert transfer_domain(cluster.prefill().transfer) != here
    finally:
        this_machine.cache_clear()


async def test_an_engine_that_reaches_everybody_says_its_name():
    class Wire:
        name = "wire"

        def local_region(self, _peer):
            return None

    assert transfer_domain(Wire()) == "wire"


async def test_a_loopback_reaches_other_users_of_this_network(tmp_path, monkeypatch):
    class Loopback:
        name = "tcp"
        host = "127.0.0.1"

        def local_region(self, _peer):
            return TcpRegion(host=self.host, port=4711, secret=bytes(32), num_streams=1)

    here = transfer_domain(Loopback())
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    this_machine.cache_clear()
    _this_network.cache_clear()
    try:
        assert transfer_domain(Loopback()) == here
        other = tmp_path / "net"
        other.symlink_to("net:[1]")
        monkeypatch.setattr("neuron_di.transfer.domain._NETWORK_NAMESPACE", other)
        _this_network.cache_clear()
        assert transfer_domain(Loopback()) != here
        monkeypatch.setattr(Loopback, "host", "10.1.0.1")
        assert transfer_domain(Loopback()) == "tcp"
    finally:
        this_machine.cache_clear()
        _this_network.cache_clear()
