"""Which engines a worker with a Neuron device offers, and what it says where one cannot be."""

import os
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import pytest
from contract import nrt_end
from nrt_kit import LAYOUT, NUM_BLOCKS, PREFILL

from neuron_di import neuron_cores
from neuron_di.config import TransferOptions
from neuron_di.errors import ConfigError
from neuron_di.kv import KvPool, NeuronPool
from neuron_di.transfer import make_engines, transfer_domain
from neuron_di.transfer import nrt_cores as cores
from neuron_di.transfer.nrt_connections import PROBE_BYTES
from neuron_di_bindings.nrt import ENABLED_VARIABLE, PORT_VARIABLE, NrtMisuse

AUTO = TransferOptions()
NAMED = TransferOptions(transfer=("nrt", "tcp"))
HOST, LOOPBACK = "10.1.2.3", "127.0.0.1"


@pytest.fixture
def pool():
    with closing(nrt_end.make_pool(LAYOUT, NUM_BLOCKS, PREFILL)) as pool:
        yield pool


@contextmanager
def engines_of(pool, options=AUTO, announced_host=LOOPBACK):
    lacking = {}
    with pool.place.environment(), ExitStack() as stack:
        engines = make_engines(
            pool,
            options,
            LOOPBACK,
            announced_host=announced_host,
            on_lacking=lacking.__setitem__,
        )
        for engine in engines:
            stack.callback(engine.close)
        yield engines, lacking


def names_of(engines):
    return [engine.name for engine in engines]


def test_auto_goes_from_core_to_core_first_and_by_way_of_the_host_where_it_must(pool):
    with engines_of(pool) as (engines, lacking):
        assert names_of(engines) == ["nrt", "shm"]
        assert "nrt" not in lacking
    with engines_of(pool, announced_host=HOST) as (engines, _):
        assert names_of(engines) == ["nrt", "shm", "tcp"]


def test_who_is_reached_by_a_device_follows_from_its_address(pool):
    with engines_of(pool) as (engines, _):
        assert transfer_domain(engines[0]).startswith("nrt@")
    with engines_of(pool, announced_host=HOST) as (engines, _):
        assert transfer_domain(engines[0]) == "nrt"


def without_handles(pool):
    bare = [replace_nrt(tensor) for tensor in pool.device.tensors]
    return NeuronPool.create(LAYOUT, NUM_BLOCKS, PREFILL, replace(pool.device, tensors=bare))


def replace_nrt(tensor):
    class Bare:
        num_bytes, core, nrt = tensor.num_bytes, tensor.core, None
        torch_tensor, address = None, None
        read, write = tensor.read, tensor.write

    return Bare()


def test_a_device_that_gives_no_handles_is_offered_by_way_of_the_host(pool):
    with closing(without_handles(pool)) as bare:
        bare.place = pool.place
        with engines_of(bare) as (engines, lacking):
            assert names_of(engines) == ["shm"]
            assert "12 of 12 KV tensors are not PyTorch's" in lacking["nrt"]
            assert "12 of 12 KV tensors have no handle" in lacking["nrt"]
        with pytest.raises(ConfigError, match="--transfer shm,tcp"), engines_of(bare, NAMED):
            pass


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (ENABLED_VARIABLE, None),
        (ENABLED_VARIABLE, "0"),
        (PORT_VARIABLE, None),
        (PORT_VARIABLE, "x"),
        (PORT_VARIABLE, "0"),
        (PORT_VARIABLE, "65536"),
    ],
)
def test_a_gate_that_is_shut_is_named_with_its_mend(pool, variable, value):
    def refused(environment):
        with pytest.raises(ConfigError, match=variable) as refusal:
            cores.open_driver(pool.device, PROBE_BYTES, environment)
        return refusal.value.message

    environment = {ENABLED_VARIABLE: "1", PORT_VARIABLE: "45645"}
    environment.pop(variable)
    if value is not None:
        environment[variable] = value
    assert f"set {variable}" in refused(environment)


def test_auto_says_why_there_is_no_way_from_core_to_core(pool, monkeypatch):
    with pool.place.environment():
        monkeypatch.delenv(ENABLED_VARIABLE, raising=False)
        lacking = {}
        engines = make_engines(pool, AUTO, LOOPBACK, on_lacking=lacking.__setitem__)
        assert names_of(engines) == ["shm"]
        assert ENABLED_VARIABLE in lacking["nrt"]
        engines[0].close()
        with pytest.raises(ConfigError, match=ENABLED_VARIABLE):
            make_engines(pool, NAMED, LOOPBACK)


@pytest.fixture
def lock_of_another_user(tmp_path, monkeypatch):
    monkeypatch.setattr(neuron_cores, "LOCK_FOLDER", tmp_path)
    lock = tmp_path / "nrt_kv_store_server_lock_uid_1000"
    lock.touch()
    uid = os.getuid()
    monkeypatch.setattr(neuron_cores.os, "getuid", lambda: uid + 1)
    return lock


@pytest.mark.usefixtures("lock_of_another_user")
def test_an_instance_without_efa_is_named_as_the_cause():
    settings = {"NRT_SIM_INSTANCE": "trn1.2xlarge", "NEURON_RT_VISIBLE_CORES": "0-1"}
    with closing(nrt_end.make_pool(LAYOUT, NUM_BLOCKS, PREFILL, settings=settings)) as pool:
        device = replace(pool.device, lncs=(0, 1))
        with (
            pool.place.environment(),
            pytest.raises(ConfigError, match="no EFA adapter") as refusal,
        ):
            cores.open_driver(device, PROBE_BYTES)
        assert "NRT_FAILURE" in refusal.value.message
        assert "--transfer shm,tcp" in refusal.value.message


def test_a_lock_file_that_was_left_behind_is_named_with_its_mend(pool, lock_of_another_user):
    pool.place.fault("function=nrt_async_sendrecv_init status=1")
    with pool.place.environment(), pytest.raises(ConfigError, match="delete it") as refusal:
        cores.open_driver(pool.device, PROBE_BYTES)
    assert str(lock_of_another_user) in refusal.value.message


def test_a_lock_file_of_its_own_is_in_nobodys_way(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(neuron_cores, "LOCK_FOLDER", tmp_path)
    (tmp_path / "nrt_kv_store_server.lock").touch()
    pool.place.fault("function=nrt_async_sendrecv_init status=1")
    with pool.place.environment(), pytest.raises(ConfigError, match="of the same release"):
        cores.open_driver(pool.device, PROBE_BYTES)


def test_a_core_that_does_not_open_leaves_none_open(pool):
    pool.place.fault("function=nrt_async_sendrecv_init call=2 status=1")
    with pool.place.environment(), pytest.raises(ConfigError, match=f"core {pool.device.lncs[1]}"):
        cores.open_driver(pool.device, PROBE_BYTES)
    with engines_of(pool) as (engines, _):
        assert names_of(engines) == ["nrt", "shm"]


def test_a_core_of_another_process_is_no_device_of_this_one(pool):
    device = replace(pool.device, lncs=(60, 61))
    with pool.place.environment(), pytest.raises(ConfigError, match="core 60"):
        cores.open_driver(device, PROBE_BYTES)


def test_memory_that_is_not_there_leaves_nothing_open(pool):
    pool.place.fault("function=nrt_tensor_allocate call=2 status=4")
    with pytest.raises(ConfigError, match="no memory"):
        nrt_end.make_engine(pool)
    with engines_of(pool) as (engines, _):
        assert names_of(engines) == ["nrt", "shm"]


def test_kv_of_a_host_has_no_cores():
    with closing(KvPool.create(LAYOUT, 1, PREFILL)) as pool:
        with pytest.raises(ConfigError, match="--device neuron"):
            make_engines(pool, NAMED, LOOPBACK)
        engines = make_engines(pool, AUTO, LOOPBACK)
        assert names_of(engines) == ["shm"]
        engines[0].close()


def test_a_core_that_cannot_be_closed_is_said_and_left(pool, caplog):
    class Stuck:
        def close(self, lnc):
            if lnc == pool.device.lncs[1]:
                raise NrtMisuse("something is posted")
            closed.append(lnc)

    closed = []
    with pool.place.environment():
        driver = cores.open_driver(pool.device, PROBE_BYTES)
    sendreceive, driver._sendreceive = driver._sendreceive, Stuck()
    with caplog.at_level("WARNING"):
        driver.close()
    assert closed == [pool.device.lncs[0]]
    assert [record.message for record in caplog.records] == ["nrt_core_not_closed"]
    assert len(driver.probes[0].read(0, PROBE_BYTES)) == PROBE_BYTES  # the runtime has them yet
    driver._sendreceive = sendreceive
    driver.close()
