"""Where a prefill worker takes data connections is where its peers are told to come."""

from contextlib import closing

import pytest
from tcp_kit import DECODE, LAYOUT, PREFILL

from neuron_di.config import TransferOptions
from neuron_di.errors import ConfigError
from neuron_di.kv import KvPool
from neuron_di.transfer.data_address import data_address
from neuron_di.transfer.tcp_engine import TcpEngine

OUTSIDE = "203.0.113.9"  # what a translation of addresses shows to others


@pytest.mark.parametrize(
    ("transfer_host", "host", "told"),
    [
        (None, "127.0.0.1", "127.0.0.1"),
        (None, "localhost", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.1", "127.0.0.2"),
        ("127.0.0.2", "0.0.0.0", "127.0.0.2"),
        ("localhost", "127.0.0.2", "127.0.0.1"),
        ("::1", "127.0.0.1", "::1"),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_a_decode_worker_connects_to_what_it_was_told(transfer_host, host, told):
    pools = [KvPool.create(LAYOUT, 4, incarnation) for incarnation in (PREFILL, DECODE)]
    options = TransferOptions(transfer_host=transfer_host)
    with (
        closing(pools[0]),
        closing(pools[1]),
        # As a worker makes it, which announces an address of --host.
        closing(TcpEngine(pools[0], options, host=host, announced_host="127.0.0.1")) as prefill,
        closing(TcpEngine(pools[1])) as decode,
    ):
        prefill.accept(DECODE, decode.local_region(PREFILL), LAYOUT)
        region = prefill.local_region(DECODE)
        assert region.host == told
        decode.connect(PREFILL, region, LAYOUT)


def test_what_others_reach_stays_what_was_announced_of_the_same_address():
    apart = TransferOptions(transfer_host="127.0.0.2")
    assert data_address(apart, "127.0.0.2", OUTSIDE) == ("127.0.0.2", OUTSIDE)
    assert data_address(TransferOptions(), "127.0.0.2", OUTSIDE) == ("127.0.0.2", OUTSIDE)


@pytest.mark.parametrize("name", ["no-such-name.invalid", "a" * 70 + ".b", ""])
def test_a_name_that_means_nothing_is_said(name):
    with pytest.raises(ConfigError, match="no address, and no name of one"):
        data_address(TransferOptions(), name)


@pytest.mark.parametrize(("listens", "host"), [("::", "127.0.0.1"), ("0.0.0.0", "::1")])
def test_all_addresses_of_another_kind_than_what_is_told_are_refused(listens, host):
    with pytest.raises(ConfigError, match=f"no connections to {host}"):
        data_address(TransferOptions(transfer_host=listens), host, host)
