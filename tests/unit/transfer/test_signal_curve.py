"""Who may talk on an encrypted signal link, with real sockets and real keys (B32, B33, B36)."""

import asyncio

import msgspec
import pytest
import zmq
from tcp_relay import TcpRelay
from transfer_kit import WAIT_S, BareDecode, Decode, Prefill, R, new_incarnation, pull_of, until

from neuron_di.clock import Deadline
from neuron_di.errors import PeerGone, PeerRefused
from neuron_di.transfer import KeyOwner, SignalKeys, make_signal_keys
from neuron_di.transfer.door import WAITING_MAX, WAITING_PER_ADDRESS_MAX
from neuron_di.transfer.tcp_engine import TcpEngine
from neuron_di.types import RequestId, WorkerId
from neuron_di.wire import LookupAll, Malformed, Never, NotYet, Ready, Refused, Welcome

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq has no CURVE")


def fresh_keys() -> SignalKeys:
    keys = make_signal_keys("auto")
    assert keys is not None
    return keys


def owner_of(decode: Decode) -> KeyOwner:
    return KeyOwner(decode.local.worker_id, decode.local.incarnation)


def list_in_directory(prefill: Prefill, *decodes: Decode, **others: KeyOwner) -> None:
    """What the prefill worker's directory says of decode workers from now on."""
    assert prefill.connector.admission is not None
    owners = {decode.keys.public: owner_of(decode) for decode in decodes if decode.keys}
    prefill.connector.admission.set_owners(owners | others)


@pytest.fixture
async def prefill(cluster):
    return cluster.prefill(keys=fresh_keys())


@pytest.fixture
async def decode(cluster):
    return cluster.decode(keys=fresh_keys())


async def test_a_hand_over_of_workers_that_know_each_other(prefill, decode):
    list_in_directory(prefill, decode)
    prefill.park()
    assert (await decode.hand_over(prefill, [0, 1])).error() is None
    assert (decode.pool.tensor()[0] == 3).all()
    assert prefill.connector.connections() == ["decode-0"]
    assert decode.connector.connections() == ["prefill-0"]
    assert prefill.counters.num_signals_refused == decode.counters.num_signals_refused == 0


async def test_both_ends_give_an_encrypted_links_transfers_the_same_names(cluster):
    """Over an engine that matches the two halves of a transfer by its tag."""
    prefill = cluster.prefill(keys=fresh_keys(), make_transfer=TcpEngine)
    decode = cluster.decode(keys=fresh_keys(), make_transfer=TcpEngine)
    list_in_directory(prefill, decode)
    prefill.park()
    assert (await decode.hand_over(prefill, [0, 1])).error() is None
    assert (decode.pool.tensor()[0] == 3).all()


async def test_nothing_of_a_hand_over_can_be_read_on_the_way(prefill, decode):
    list_in_directory(prefill, decode)
    prefill.park()
    async with TcpRelay(prefill.buffer.port) as relay:
        address = msgspec.structs.replace(prefill.address, signal_port=relay.port)
        buffer = decode.connector.maybe_setup_buffer(address)
        await buffer.lookup(R, 0, Deadline.after(WAIT_S), decode.on_lost)
        buffer.close()
    assert len(relay.seen) > 500
    for secret in (R, decode.local.incarnation, decode.local.worker_id, "handshake", "ready"):
        assert secret.encode() not in relay.seen


async def test_a_key_that_is_not_known_yet_is_waited_for(prefill, decode):
    """A decode worker joined, and connects before the prefill worker's watch told of it."""
    list_in_directory(prefill)
    prefill.park()
    waiting = asyncio.create_task(decode.hand_over(prefill, [0, 1]))
    door = prefill.connector._transport._door
    await until(lambda: door.num_waiting == 1)
    assert prefill.connector.connections() == []
    list_in_directory(prefill, decode)
    assert (await waiting).error() is None
    assert door.num_waiting == 0
    assert prefill.counters.num_signals_refused == decode.counters.num_signals_refused == 0


async def test_a_key_that_stays_unknown_is_refused_and_not_for_ever(cluster):
    prefill = cluster.prefill(keys=fresh_keys(), peer_connect_timeout_s=0.3)
    decode = cluster.decode(keys=fresh_keys())
    list_in_directory(prefill)
    prefill.park()
    with pytest.raises(PeerGone, match="the directory there does not know our key") as refused:
        await decode.lookup(prefill)
    assert refused.value.retryable
    assert prefill.counters.num_signals_refused == 1
    assert prefill.connector._transport._door.num_waiting == 0
    list_in_directory(prefill, decode)
    assert (await decode.hand_over(prefill, [0, 1])).error() is None


async def test_unknown_keys_wait_in_a_bounded_number(cluster):
    prefill = cluster.prefill(keys=fresh_keys())
    list_in_directory(prefill)
    door = prefill.connector._transport._door
    strangers = [BareDecode(prefill, keys=fresh_keys()) for _ in range(WAITING_PER_ADDRESS_MAX + 5)]
    await until(lambda: door.num_waiting == WAITING_PER_ADDRESS_MAX)
    await until(lambda: prefill.counters.num_signals_refused == 5)
    assert door._has_room("192.0.2.1")
    # As if they came from elsewhere, so many that no place is left.
    door._waiting *= WAITING_MAX // WAITING_PER_ADDRESS_MAX
    assert not door._has_room("192.0.2.1")
    del door._waiting[WAITING_PER_ADDRESS_MAX:]
    for stranger in strangers:
        stranger.__exit__()


async def test_a_plain_client_of_an_encrypted_link_is_not_heard(prefill, decode):
    list_in_directory(prefill, decode)
    with BareDecode(prefill) as plain:
        plain.send(LookupAll(request_id=R, attempt=0))
        await until(lambda: prefill.counters.num_signals_refused)
        assert plain.hears_nothing()
    assert prefill.buffer.lookup_dict == {}
    prefill.park()
    assert (await decode.hand_over(prefill, [0, 1])).error() is None


async def test_a_client_with_the_key_of_another_server_is_told_soon(prefill, decode):
    """As where another process listens at the address by now."""
    list_in_directory(prefill, decode)
    other = msgspec.structs.replace(prefill.address, signal_key=fresh_keys().public)
    buffer = decode.connector.maybe_setup_buffer(other)
    with pytest.raises(PeerGone, match="does not have the key it should"):
        await buffer.connect()
    assert decode.counters.num_signals_refused == 1
    assert prefill.counters.num_signals_refused > 0
    assert decode.connector.connections() == prefill.connector.connections() == []


async def test_a_key_that_is_no_key(prefill, decode):
    for key in ("", "short", "ä" * 40, " " * 40):
        address = msgspec.structs.replace(prefill.address, signal_key=key)
        with pytest.raises(PeerRefused, match="40 characters of Z85"):
            decode.connector.maybe_setup_buffer(address)
    assert decode.connector.connection_dict == {}


async def test_a_worker_without_keys_says_so(cluster, prefill):
    plain = cluster.decode()
    with pytest.raises(PeerRefused, match="prefill-0 encrypts its signal link"):
        plain.buffer(prefill)


async def test_a_worker_with_keys_talks_plainly_where_the_record_has_none(cluster, decode):
    prefill = cluster.prefill()
    prefill.park()
    assert (await decode.hand_over(prefill, [0, 1])).error() is None


async def test_a_worker_cannot_say_that_it_is_another(prefill, decode):
    """Its own key is good; the name and the incarnation that it states are another worker's."""
    intruder = fresh_keys()
    owner = KeyOwner(WorkerId("decode-9"), new_incarnation())
    list_in_directory(prefill, decode, **{intruder.public: owner})
    with BareDecode(prefill, keys=intruder, incarnation=decode.local.incarnation) as impostor:
        refused = await impostor.shake_hands(worker_id=decode.local.worker_id)
        assert isinstance(refused, Refused)
        assert "decode-0 came with the key of another worker, decode-9" in refused.reason
        refused = await impostor.shake_hands(worker_id=WorkerId("decode-9"))
        assert "another of its processes" in refused.reason
    assert prefill.counters.num_signals_refused == 2
    assert prefill.connector.connections() == []


async def test_a_worker_that_left_the_directory_cannot_shake_hands(prefill, decode):
    list_in_directory(prefill, decode)
    with BareDecode(prefill, keys=decode.keys, incarnation=decode.local.incarnation) as late:
        assert isinstance(await late.shake_hands(worker_id=decode.local.worker_id), Welcome)
        list_in_directory(prefill)
        refused = await late.shake_hands(worker_id=decode.local.worker_id)
        assert refused.reason == "decode-0 is not in the directory"


async def test_the_identity_of_another_connection_gives_nothing_of_it(cluster, prefill, decode):
    """A worker of the cluster takes the name of another's connection once that has broken.

    It can neither take that worker's KV nor end its requests: to prefill it is somebody else.
    """
    intruder = fresh_keys()
    owner = KeyOwner(WorkerId("decode-9"), new_incarnation())
    list_in_directory(prefill, decode, **{intruder.public: owner})
    name = f"{decode.local.incarnation}.1".encode()
    with BareDecode(
        prefill, name, keys=decode.keys, incarnation=decode.local.incarnation
    ) as victim:
        assert isinstance(await victim.shake_hands(worker_id="decode-0"), Welcome)
        prefill.buffer.expect(R, 0)
        assert isinstance(await victim.lookup(), NotYet)
        prefill.buffer.park(prefill.ready())
        assert isinstance(await victim.receive(), Ready)
    with BareDecode(prefill, name, keys=intruder, incarnation=owner.incarnation) as impostor:
        answer = await impostor.ask(pull_of())
        assert answer == Malformed(reason="handshake first")
        assert isinstance(await impostor.shake_hands(worker_id="decode-9"), Refused)
    assert prefill.ended == []


async def test_the_name_of_a_connection_cannot_be_guessed(prefill, decode):
    """A message to a broken connection must not reach whoever takes its name."""
    list_in_directory(prefill, decode)
    await decode.buffer(prefill).connect()
    (identity,) = prefill.buffer._peers._peers
    name = identity.removeprefix(decode.keys.public)
    start = f"{decode.local.incarnation}.1-"
    assert name.startswith(start)
    assert len(name) == len(start) + 16


async def test_without_a_directory_whoever_knows_the_server_key_may_connect(prefill, decode):
    prefill.park()
    assert (await decode.hand_over(prefill, [0, 1])).error() is None
    with BareDecode(prefill, keys=fresh_keys()) as anybody:
        assert isinstance(await anybody.shake_hands(), Welcome)
        assert isinstance(await anybody.lookup(RequestId("other")), NotYet | Never)


async def test_a_static_peer_key_binds_a_prefill_worker_to_one_partner(cluster, decode):
    prefill = cluster.prefill(keys=fresh_keys(), static_peer_key=decode.keys.public)
    stranger = cluster.decode(worker_id="decode-1", keys=fresh_keys())
    with pytest.raises(PeerGone, match="does not know our key"):
        await stranger.lookup(prefill)
    prefill.park()
    assert (await decode.hand_over(prefill, [0, 1])).error() is None


async def test_a_static_peer_key_binds_a_decode_worker_to_one_partner(cluster, prefill):
    decode = cluster.decode(keys=fresh_keys(), static_peer_key=prefill.keys.public)
    other = cluster.prefill(worker_id="prefill-1", keys=fresh_keys())
    with pytest.raises(PeerRefused, match="another key"):
        decode.buffer(other)
    prefill.park()
    # Also where the leg names no key: a proxy that knows none cannot make it talk plainly.
    unnamed = msgspec.structs.replace(prefill.address, signal_key=None)
    ready = await decode.connector.maybe_setup_buffer(unnamed).lookup(
        R, 0, Deadline.after(WAIT_S), decode.on_lost
    )
    assert ready.request_id == R


async def test_a_connection_that_is_reset_goes_on_with_its_name_and_key(prefill, decode):
    """F41: TCP breaks once; the next connection is the same peer."""
    list_in_directory(prefill, decode)
    async with TcpRelay(prefill.buffer.port) as relay:
        address = msgspec.structs.replace(prefill.address, signal_port=relay.port)
        buffer = decode.connector.maybe_setup_buffer(address)
        await buffer.connect()
        relay.reset()
        await until(lambda: relay.num_connections == 2)
        prefill.park()
        ready = await buffer.lookup(R, 0, Deadline.after(WAIT_S), decode.on_lost)
        assert ready.request_id == R
        assert not buffer.is_broken
        buffer.close()


def test_the_secret_half_is_not_shown():
    keys = fresh_keys()
    assert keys.secret.decode() not in f"{keys!r} {keys}"
    assert fresh_keys().public != keys.public


def test_no_keys_where_they_are_off():
    assert make_signal_keys("off") is None
