"""Workers of two machines are no pair, although both move KV by shared memory."""

from pathlib import Path

import pytest

from neuron_di.transfer import transfer_domain
from neuron_di.transfer.domain import _this_machine


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
    _this_machine.cache_clear()
    try:
        assert transfer_domain(cluster.prefill().transfer) != here
    finally:
        _this_machine.cache_clear()


async def test_an_engine_that_reaches_everybody_says_its_name():
    class Wire:
        name = "wire"

    assert transfer_domain(Wire()) == "wire"
