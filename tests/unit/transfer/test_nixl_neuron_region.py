"""What a peer tells of its device may be anything: it harms nobody but itself."""

import hashlib
from importlib.util import find_spec

import msgspec
import pytest
from nixl_kit import DECODE, LAYOUT, NUM_BLOCKS, PREFILL, UNTOUCHED, two_ends

from neuron_di.errors import PeerError, PeerGone, PeerRefused, RemoteProtocolError
from neuron_di.kv import KvLayout
from neuron_di.transfer.nixl_agent import NixlAgent
from neuron_di.types import Incarnation
from neuron_di.wire import DeviceFields, NixlNeuronRegion, NrtRegion, Offer
from neuron_di.wire.regions import NIXL_METADATA_BYTES_MAX

pytestmark = pytest.mark.skipif(
    find_spec("nixl_cu12") is None, reason="the package nixl-cu12 is not installed"
)

MAX = 2**63 - 1


@pytest.fixture(scope="module")
def connected():
    with two_ends() as two:
        yield two


@pytest.fixture
def two(connected):
    connected.decode.engine.disconnect(PREFILL)
    return connected


@pytest.fixture
def region(two):
    return two.accept()


def check_goes_on(two, region):
    """Nothing was touched, and the peer that is told of rightly is connected."""
    assert isinstance(two.move([0], [0]).error(), PeerGone)
    assert (two.decode.blocks == UNTOUCHED).all()
    two.connect(region)
    assert two.move([1], [1]).error() is None
    assert (two.decode.blocks[1] == two.prefill.blocks[1]).all()
    two.decode.blocks[1] = UNTOUCHED


def test_a_region_goes_over_the_wire_and_is_no_ones_elses(region):
    assert Offer.of("nixl_neuron", region).read() == region
    assert "metadata" not in repr(region)
    assert set(DeviceFields.__struct_fields__) < set(NrtRegion.__struct_fields__)


@pytest.mark.parametrize("place", [0, 1])
def test_damaged_metadata_is_refused_before_nixl_sees_it(two, region, place, monkeypatch):
    monkeypatch.delattr(NixlAgent, "connect")
    part = region.metadata[place]
    for damaged in (b"", part[:-1], part + b"\0", bytes([part[0] ^ 1]) + part[1:]):
        metadata = [*region.metadata[:place], damaged, *region.metadata[place + 1 :]]
        with pytest.raises(PeerRefused, match="damaged"):
            two.connect(msgspec.structs.replace(region, metadata=metadata))


def shifted(region, offset, number=0):
    addresses = list(region.addresses)
    addresses[number] += offset
    return {"addresses": addresses}


CHANGES = {
    "no addresses": lambda region: {"addresses": []},
    "one address too few": lambda region: {"addresses": region.addresses[:-1]},
    "one address too many": lambda region: {"addresses": [*region.addresses, 4096]},
    "a tensor at 0": lambda region: shifted(region, -region.addresses[0]),
    "a tensor at the end": lambda region: shifted(region, MAX - region.addresses[0]),
    "a tensor before what is registered": lambda region: shifted(region, -1 << 24),
    "a tensor elsewhere": lambda region: {"addresses": [1 << 40] * len(region.addresses)},
    "a head at 0": lambda region: {"head_address": 0},
    "a head at the end": lambda region: {"head_address": MAX},
    "a head elsewhere": lambda region: {"head_address": region.head_address - 4096},
    "more slots": lambda region: {"num_blocks": NUM_BLOCKS + 1},
    "very many slots": lambda region: {"num_blocks": 1 << 24},
    "fewer slots": lambda region: {"num_blocks": NUM_BLOCKS - 1},
    "longer slots": lambda region: {"block_size": 1 << 24},
    "shorter slots": lambda region: {"block_size": LAYOUT.block_size - 1},
    "another agent": lambda region: {"agent": "another"},
    "no agent's metadata": lambda region: {"metadata": [b"", b""]},
    "made-up metadata": lambda region: {"metadata": [b"nixlSerDes|garbage"]},
    "the head's metadata alone": lambda region: {"metadata": region.metadata[1:]},
    "the tensors' metadata alone": lambda region: {"metadata": region.metadata[:1]},
    "another kind of memory": lambda region: {"kind": "VRAM"},
    "other heads": lambda region: {"heads": [[0], [2]]},
    "a head that nobody has": lambda region: {"heads": [[0], [0]]},
    "very many heads": lambda region: {"heads": [[0] * 256] * 2},
    "cores that are one": lambda region: {"lncs": [8, 8]},
    "more cores than ranks": lambda region: {"lncs": [8, 9, 10]},
    "other cores": lambda region: {"lncs": [10, 11]},
    "keys in another order": lambda region: {"keys": "HDS"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_region_that_is_not_the_peers_device_is_no_connection(two, region, change):
    changes = change(region)
    if "metadata" in changes:  # not damaged on the way: made so
        changes["digest"] = hashlib.sha256(b"".join(changes["metadata"])).digest()
    with pytest.raises(PeerError):
        two.connect(msgspec.structs.replace(region, **changes))
    check_goes_on(two, region)


def test_another_process_than_the_named_is_refused(two, region):
    with pytest.raises(PeerError):
        two.decode.engine.connect(Incarnation("x"), region, LAYOUT)
    check_goes_on(two, region)


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": [b"x" * (NIXL_METADATA_BYTES_MAX + 1)]},
        {"metadata": [b"", b"", b""]},
        {"digest": bytes(33)},
        {"addresses": [0] * ((1 << 17) + 1)},
        {"addresses": [-1]},
        {"addresses": [MAX + 1]},
        {"head_address": -1},
        {"agent": ""},
        {"agent": "x" * 129},
        {"lncs": []},
        {"heads": [[0]] * 257},
        {"num_blocks": 0},
        {"block_size": (1 << 24) + 1},
        {"kind": "FILE"},
        {"backend": "OTHER"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_beyond_bounds_is_not_read(region, changes):
    with pytest.raises(RemoteProtocolError):
        Offer.of("nixl_neuron", msgspec.structs.replace(region, **changes)).read()


def test_a_decode_workers_device_is_checked_when_it_is_accepted(two):
    told = two.decode.engine.local_region(PREFILL)
    for changes in (
        {"lncs": [8, 8]},
        {"heads": [[0], [0]]},
        {"block_size": LAYOUT.block_size - 1},
        {"num_blocks": 1 << 24, "block_size": 1 << 24, "heads": [[0] * 256] * 2},
    ):
        stranger = msgspec.structs.replace(told, **changes)
        with pytest.raises(PeerError):
            two.prefill.engine.accept(Incarnation("ab" * 16), stranger, LAYOUT)
    another = KvLayout(num_layers=1, num_kv_heads=2, head_dim=4, block_size=16, dtype="float32")
    with pytest.raises(PeerRefused):
        two.prefill.engine.accept(DECODE, told, another)
    assert isinstance(two.prefill.engine.local_region(Incarnation("ab" * 16)), NixlNeuronRegion)
    assert not two.prefill.engine.local_region(Incarnation("ab" * 16)).metadata
