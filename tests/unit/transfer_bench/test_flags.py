import argparse
from typing import get_args, get_type_hints

import pytest

from neuron_di.config import TransferOptions
from neuron_di.errors import ConfigError
from neuron_di.transfer_bench import add_bench_transfer_flags, run_bench_transfer
from neuron_di.transfer_bench.command import _options_of
from neuron_di.transfer_bench.flags import AUTO, ENGINES, KEY_VARIABLE, NIXL_BACKENDS
from neuron_di.transfer_bench.resources import require_room


def flags_of(*words):
    parser = argparse.ArgumentParser()
    add_bench_transfer_flags(parser)
    return parser.parse_args(words)


def test_the_flags_know_the_engines_that_a_worker_knows():
    assert ENGINES[0] == AUTO
    for name in ENGINES:
        assert TransferOptions(transfer=(name,)).transfer == (name,)
    with pytest.raises(ConfigError) as refused:
        TransferOptions(transfer=("carrier-pigeon",))
    assert all(name in refused.value.message for name in ENGINES)


def test_what_engines_are_told_is_what_a_worker_would_be_told():
    files = [f"--transfer-tls-{name}={name}.pem" for name in ("cert", "key", "ca")]
    more = ("--transfer-streams", "3", "--nixl-backend", "LIBFABRIC")
    assert _options_of(flags_of(*more, *files)) == TransferOptions(
        transfer_streams=3,
        nixl_backend="LIBFABRIC",
        transfer_tls_cert="cert.pem",
        transfer_tls_key="key.pem",
        transfer_tls_ca="ca.pem",
    )
    assert _options_of(flags_of()) == TransferOptions()


def test_what_moves_kv_beneath_nixl_has_the_names_that_workers_have_for_it():
    hints = get_type_hints(TransferOptions)
    assert get_args(hints["nixl_backend"]) == NIXL_BACKENDS
    with pytest.raises(SystemExit):
        flags_of("--nixl-backend", "SMOKE")


def test_serving_and_connecting_exclude_each_other():
    with pytest.raises(SystemExit):
        flags_of("--serve", "--connect", "127.0.0.1:1")


@pytest.mark.parametrize(
    "words",
    ["--engine tcp", "--shape 1MiB", "--repeats 1", "--pool-mib 1", "--verify", "--json"],
)
def test_the_end_that_is_read_from_is_not_told_what_to_measure(monkeypatch, words):
    monkeypatch.setenv(KEY_VARIABLE, "short")  # else an old version would listen for good
    with pytest.raises(ConfigError, match=f"{words.split()[0]}: the other end measures"):
        run_bench_transfer(flags_of("--serve", *words.split()))


@pytest.mark.parametrize("key", ["short", "", " " * 40])
def test_a_key_that_could_be_guessed_is_refused(monkeypatch, key):
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match="at least"):
        run_bench_transfer(flags_of("--serve"))


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:x", "host:0", "host:65536"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        run_bench_transfer(flags_of("--connect", address))


def test_a_pool_that_would_take_all_memory_is_refused():
    require_room(1)
    with pytest.raises(ConfigError, match="too large"):
        require_room(1 << 50)
