"""Whether a worker offers its device's memory by NIXL, and what it says where it does not.

The runtime is the simulator's; NIXL is real, and finds no Neuron device here.
"""

import importlib.metadata
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec

import pytest
from contract import nixl_end, nrt_end
from nixl_kit import DECODE, LAYOUT, NUM_BLOCKS, PREFILL
from nrt_sim.build import library_path

from neuron_di.config import TransferOptions
from neuron_di.errors import ConfigError
from neuron_di.neuron_cores import SHARED_MEMORY_OF_EFA
from neuron_di.transfer import LaneSet, ShmEngine, make_engines, nixl_neuron_engine
from neuron_di.transfer import nixl_neuron_probe as probe
from neuron_di.transfer.nixl_tensors import neuron_pool
from neuron_di.wire import Offer

pytestmark = [
    pytest.mark.skipif(nrt_end.WHY_NOT is not None, reason=str(nrt_end.WHY_NOT)),
    pytest.mark.skipif(
        find_spec("nixl_cu12") is None, reason="the package nixl-cu12 is not installed"
    ),
]

LOOPBACK = "127.0.0.1"
RIGHT = {SHARED_MEMORY_OF_EFA: "0"}
SHOWN = 150  # characters of a reason, in the status


@pytest.fixture
def pool():
    with closing(nrt_end.make_pool(LAYOUT, NUM_BLOCKS, PREFILL)) as pool:
        yield pool


@pytest.fixture
def rdma_devices(tmp_path, monkeypatch, pool):
    """The folder of this host's, with the EFA adapters beside the pool's memory."""
    folder = tmp_path / "rdma"
    monkeypatch.setattr(probe, "_RDMA_DEVICES", folder)
    for number, adapter in enumerate(adapters_of(pool)):
        add_device(folder, f"rdmap{number}s0", adapter)
    return folder


def adapters_of(pool):
    """Of each rank's memory, by the simulator."""
    device = pool.device
    ranks = range(len(device.lncs))
    found = [device.tensors[n].nrt.runtime.attached_efa(device.tensors[n].address) for n in ranks]
    assert None not in found
    return list(dict.fromkeys(found))


def add_device(folder, name, pci_address, vendor="0x1d0f"):
    """As sysfs has it: a link to the PCI device."""
    pci = folder.parent / "pci" / pci_address
    pci.mkdir(parents=True, exist_ok=True)
    (pci / "vendor").write_text(f"{vendor}\n")
    (folder / name).mkdir(parents=True)
    (folder / name / "device").symlink_to(pci)


def refusal(device, environment=RIGHT, shown=SHOWN):
    with pytest.raises(ConfigError) as refused:
        probe.check_device(device, environment)
    message = refused.value.message
    assert refused.value.param == "transfer"
    assert len(message) <= shown
    return message


@pytest.mark.usefixtures("rdma_devices")
@pytest.mark.parametrize("value", ["0", "no", "False", "off"])
def test_a_device_with_efa_beside_its_memory_will_do(pool, value):
    probe.check_device(pool.device, {SHARED_MEMORY_OF_EFA: value})
    probe.check_device(neuron_pool(pool).device, RIGHT)


@pytest.mark.parametrize("environment", [{}, {SHARED_MEMORY_OF_EFA: "1"}])
def test_shared_memory_of_libfabrics_is_named_with_its_mend(pool, environment):
    assert f"set {SHARED_MEMORY_OF_EFA}=0" in refusal(pool.device, environment)


def test_a_runtime_that_does_not_tell_where_tensors_lie_is_repeated(pool):
    pool.place.fault("function=nrt_tensor_get_va status=4")
    with pytest.raises(ConfigError, match="where KV tensors lie: nrt_tensor_get_va: NRT_FAILURE"):
        neuron_pool(pool)


def test_an_instance_without_efa_is_named():
    settings = {"NRT_SIM_INSTANCE": "trn1.2xlarge", "NEURON_RT_VISIBLE_CORES": "0-1"}
    with closing(nrt_end.make_pool(LAYOUT, NUM_BLOCKS, PREFILL, settings=settings)) as pool:
        device = replace(pool.device, lncs=(0, 1))
        assert "no EFA adapter is beside the memory of core 0" in refusal(device)


def test_an_address_that_is_none_of_the_device_is_noticed(pool):
    class Elsewhere:
        num_bytes, core, nrt = 1 << 20, 1, pool.device.tensors[1].nrt
        address = 4096  # what torch calls a data_ptr need not be an address of the device

    tensors = [pool.device.tensors[0], Elsewhere(), *pool.device.tensors[2:]]
    device = replace(pool.device, tensors=tensors)
    assert f"memory of core {device.lncs[1]}" in refusal(device)


@pytest.mark.usefixtures("rdma_devices")
def test_a_runtime_that_fails_is_repeated(pool):
    pool.place.fault("function=nrt_get_attached_efa_bdf status=4")
    assert "NRT_RESOURCE" in refusal(pool.device)
    probe.check_device(pool.device, RIGHT)


def without_handles(pool):
    class Bare:
        nrt = None

        def __init__(self, tensor):
            self.num_bytes, self.core = tensor.num_bytes, tensor.core
            self.address = tensor.address

    return replace(pool.device, tensors=[Bare(tensor) for tensor in pool.device.tensors])


@pytest.mark.usefixtures("rdma_devices")
def test_without_handles_the_runtime_that_pytorch_started_is_asked(pool, monkeypatch):
    monkeypatch.setenv("NEURON_DI_LIBNRT", pool.place.library.path)
    probe.check_device(without_handles(pool), RIGHT)


def test_a_runtime_that_cannot_tell_is_named_with_its_mend(pool, monkeypatch):
    monkeypatch.setenv("NEURON_DI_LIBNRT", str(library_path(2)))  # it lacks the function
    assert "update aws-neuronx-runtime-lib" in refusal(without_handles(pool))
    monkeypatch.setenv("NEURON_DI_LIBNRT", "/nowhere/libnrt.so.1")
    with pytest.raises(ConfigError, match="no libnrt can be loaded"):
        probe.check_device(without_handles(pool), RIGHT)


def test_a_host_or_container_without_efa_is_named(pool, tmp_path, monkeypatch):
    folder = tmp_path / "rdma"
    monkeypatch.setattr(probe, "_RDMA_DEVICES", folder)
    assert "load EFA's driver" in refusal(pool.device)
    add_device(folder, "mlx5_0", adapters_of(pool)[0], "0x15b3")
    (folder / "bare").mkdir()
    assert "load EFA's driver" in refusal(pool.device)


def test_an_adapter_beside_the_memory_that_this_process_lacks_is_named(pool, rdma_devices):
    """NIXL would take all others for that memory, and what one reads says nothing of the rest."""
    adapter = adapters_of(pool)[-1]
    for device in rdma_devices.iterdir():
        if (device / "device").resolve().name == adapter:
            (device / "device").unlink()
    add_device(rdma_devices, "rdmap255", "0000:ff:ff.0")
    longer = len(str(rdma_devices)) - len("/sys/class/infiniband")
    message = refusal(pool.device, shown=SHOWN + longer)
    assert f"the EFA adapter {adapter} beside the memory of core" in message
    assert "give it to the container" in message


@pytest.mark.usefixtures("rdma_devices")
@pytest.mark.parametrize(
    ("version", "is_enough"),
    [("0.10.0", False), ("1.0.1", False), ("1.1.0", True), ("1.1", False), ("1.10.2rc1", True)],
)
def test_a_nixl_that_takes_no_neuron_memory_is_named(pool, monkeypatch, version, is_enough):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {probe.PACKAGE: version}[name])
    if is_enough:
        probe.check_device(pool.device, RIGHT)
    else:
        assert f"NIXL {version} takes no Neuron memory" in refusal(pool.device)


@pytest.mark.usefixtures("rdma_devices")
def test_without_the_package_the_loader_says_what_to_install(pool, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    probe.check_device(pool.device, RIGHT)


def test_nixl_without_neuron_memory_is_refused_and_its_agent_closed():
    agents = []

    def open_agent(name, is_serving):
        agent = nixl_end.open_ucx(name, is_serving)
        agent.kinds = frozenset({"DRAM_SEG"})  # as LIBFABRIC without EFA
        agents.append(agent)
        return agent

    with closing(nixl_end.make_pool(LAYOUT, NUM_BLOCKS, PREFILL)) as pool:
        with pytest.raises(ConfigError, match="finds no Neuron device here, or no EFA") as refused:
            nixl_end.make_engine(pool, open_agent=open_agent, kind="VRAM")
        assert len(refused.value.message) <= SHOWN
        assert [agent._agent for agent in agents] == [None]


def test_memory_that_nixl_does_not_take_for_a_devices_is_refused():
    """As where driver and adapter do not share it. UCX looks: here it is the host's."""
    with closing(nixl_end.make_pool(LAYOUT, NUM_BLOCKS, PREFILL)) as pool:
        with pytest.raises(ConfigError, match=r"cannot register \d+ bytes.* of device memory"):
            nixl_end.make_engine(pool, kind="VRAM")
        nixl_end.make_engine(pool).close()


@contextmanager
def engines_of(pool, options, announced_host=LOOPBACK):
    lacking, engines = {}, []
    with pool.place.environment(**RIGHT):
        engines = make_engines(
            pool,
            options,
            LOOPBACK,
            announced_host=announced_host,
            on_lacking=lacking.__setitem__,
        )
    try:
        yield [engine.name for engine in engines], lacking, engines
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.usefixtures("rdma_devices")
def test_auto_goes_on_where_nixl_has_no_device_and_the_status_says_why(pool):
    with engines_of(pool, TransferOptions(), "10.1.2.3") as (names, lacking, engines):
        assert names == ["nrt", "shm", "tcp"]
        (reason,) = lacking.values()
        assert list(lacking) == ["nixl_neuron"]
        assert "LIBFABRIC" in reason  # the plugin, or what it finds here
        with closing(nixl_end.make_pool(LAYOUT, NUM_BLOCKS, DECODE)) as peer:
            offers = [Offer.of("shm", peer.region())]
            lanes = LaneSet(engines[1:2], lacking)
            lane = lanes.connect(DECODE, offers, LAYOUT)
            assert lane.reason.startswith(f"nixl_neuron: {reason[:SHOWN]}")
            assert lane.verdicts == "nixl_neuron: not_available; shm: chosen"


def test_auto_takes_nixl_first_where_it_has_the_device(monkeypatch):
    monkeypatch.setattr(probe, "check_device", lambda _device: None)
    monkeypatch.setattr(nixl_neuron_engine, "NixlNeuronEngine", nixl_end.make_engine)
    with closing(nixl_end.make_pool(LAYOUT, NUM_BLOCKS, PREFILL)) as pool:
        lacking = {}
        engines = make_engines(
            pool,
            TransferOptions(),
            LOOPBACK,
            announced_host="10.1.2.3",
            on_lacking=lacking.__setitem__,
        )
        for engine in engines:
            engine.close()
        assert [engine.name for engine in engines] == ["nixl_neuron", "shm", "tcp"]
        assert list(lacking) == ["nrt"]


@pytest.mark.usefixtures("rdma_devices")
def test_nixl_by_name_is_the_device_over_libfabric_and_the_mirror_over_ucx(pool):
    named = TransferOptions(transfer=("nixl", "shm"), nixl_backend="LIBFABRIC")
    with pytest.raises(ConfigError, match="LIBFABRIC"), engines_of(pool, named):
        pass
    with engines_of(pool, replace(named, nixl_backend="UCX")) as (names, lacking, engines):
        assert names == ["nixl", "shm"]
        assert lacking == {}
        region = engines[0].local_region(DECODE)
        assert (region.address, region.kind) == (pool.memory().address, "DRAM")
        assert isinstance(engines[1], ShmEngine)
