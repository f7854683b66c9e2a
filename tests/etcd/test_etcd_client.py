"""The client at real members: fail-over, users, what it refuses and what it leaves behind."""

import asyncio
import contextlib
import gc
import os
import re
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import aiohttp
import grpc
import pytest
import uvloop
from etcd_kit import PASSWORD, fill, running_etcd
from watching import Watching, until

from neuron_di.clock import Deadline
from neuron_di.errors import PeerGone, PeerRefused, PeerTimeout, RemoteProtocolError
from neuron_di.etcd.client import EtcdClient
from neuron_di.etcd.failures import HistoryGone, PermissionDenied
from neuron_di.etcd.key_value import KeyRange
from neuron_di.etcd.messages import Compare, PutRequest, RequestOp
from neuron_di.etcd.registry import EtcdRegistry
from neuron_di.etcd.security import Security

KEY = "/workers/decode/127.0.0.1/4000"
OURS = b"/neuron-di" + KEY.encode()

MANIFEST = Path(__file__).parents[2] / "examples/neuron_common/kubernetes/base/etcd.yaml"
PROBED = re.findall(
    r'path: "?(/health[^,"]*)"?, port: metrics', MANIFEST.read_text(encoding="utf-8")
)


async def status_of(etcd, path):
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{etcd.addresses[0]}{path}") as response,
    ):
        return response.status


def user(name, password=PASSWORD):
    return Security(user=name, password=lambda: password)


async def eventually(call):
    """What the call returns once etcd answers."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(PeerGone, PeerTimeout):
                return await call()


async def first_change(batches):
    async with aclosing(batches):
        async for batch in batches:
            if batch.changes:
                return batch.changes[0]
    raise AssertionError("a watch that ends says why")


def num_sockets():
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    targets = []
    for link in links:
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(link))
    return sum(target.startswith("socket:") for target in targets)


async def test_keys_leases_transactions_and_listings(monkeypatch):
    async with running_etcd() as etcd, EtcdClient(etcd.addresses) as client:
        assert await client.get(b"/a") is None
        revision = await client.put(b"/a", b"1")
        found = await client.get(b"/a")
        assert (found.value, found.mod_revision, found.version) == (b"1", revision, 1)
        is_first = Compare(result=0, target=0, key=b"/a", version=1)
        put = RequestOp(request_put=PutRequest(key=b"/b", value=b"2"))
        assert (await client.txn([is_first], [put])).succeeded
        assert not (await client.txn([Compare(result=0, target=0, key=b"/a")], [put])).succeeded
        await asyncio.gather(*(client.put(b"/c/%04d" % i, bytes(1000)) for i in range(1000)))
        listing = await client.list_keys(KeyRange.prefix(b"/c/"))
        assert (len(listing.items), listing.num_left_out) == (1000, 0)
        assert [item.key for item in listing.items] == sorted(item.key for item in listing.items)
        monkeypatch.setattr("neuron_di.etcd.client.LIST_KEYS_MAX", 300)
        listing = await client.list_keys(KeyRange.prefix(b"/c/"))
        assert (len(listing.items), listing.num_left_out) == (300, 700)
        assert await client.delete(KeyRange.prefix(b"/")) == 1002
        lease = await client.grant(1.5)
        assert (await client.time_to_live(lease)).grantedTTL == 2
        assert await client.keep_alive(lease) == 2
        assert await client.revoke(lease)
        assert not await client.revoke(lease)
        assert (await client.time_to_live(lease)).TTL == -1
        await client.compact(revision)
        with pytest.raises(HistoryGone):
            await first_change(client.watch(KeyRange(b"/a"), 1))
        assert (await client.status()).version >= "3.4"


async def test_a_page_of_large_values_is_asked_for_in_smaller_pieces(monkeypatch):
    async with running_etcd() as etcd, EtcdClient(etcd.addresses) as client:
        value = bytes(1 << 20)
        for number in range(20):
            await client.put(b"/%02d" % number, value)
        await client.put(b"/z", b"small")
        listing = await client.list_keys(KeyRange.prefix(b"/"))
        assert (len(listing.items), listing.num_left_out) == (21, 0)
        monkeypatch.setattr("neuron_di.etcd.client.LIST_BYTES_MAX", 2 << 20)
        listing = await client.list_keys(KeyRange.prefix(b"/"))
        assert (len(listing.items), listing.num_left_out) == (1, 20)


async def test_the_leader_of_three_is_killed_and_then_another():
    async with (
        running_etcd(num_members=3) as etcd,
        EtcdClient(etcd.addresses) as client,
        Watching(EtcdRegistry(client, "/neuron-di")) as seen,
    ):
        registry = EtcdRegistry(client, "/neuron-di")
        lease = await registry.grant(10)
        await registry.put(KEY, b"one", lease)
        await seen.until(lambda: seen.view == {KEY: b"one"})
        first = await etcd.leader()
        first.kill()
        await eventually(lambda: registry.put(KEY, b"two", lease))
        await seen.until(lambda: seen.view == {KEY: b"two"})
        first.launch()
        await etcd.answers()
        second = await etcd.leader()
        second.freeze()
        await eventually(lambda: registry.put(KEY, b"three", lease))
        await seen.until(lambda: seen.view == {KEY: b"three"})
        assert await eventually(lambda: registry.keep_alive(lease)) == 10
        assert seen.num_deleted == 0
        second.thaw()


async def test_without_a_majority_nothing_is_said():
    async with (
        running_etcd(num_members=3) as etcd,
        EtcdClient(etcd.addresses) as client,
    ):
        registry = EtcdRegistry(client, "/neuron-di")
        async with Watching(registry) as seen:
            await client.put(OURS, b"one")
            await seen.until(lambda: bool(seen.view))
            for member in etcd.members[:2]:
                member.kill()
            with pytest.raises((PeerGone, PeerTimeout)):
                await client.put(OURS, b"two")
            # Also the member that is left has no leader.
            await until(lambda: registry.num_breaks > 0)
            assert seen.view == {KEY: b"one"}
            for member in etcd.members[:2]:
                member.launch()
            await eventually(lambda: client.put(OURS, b"three"))
            await seen.until(lambda: seen.view == {KEY: b"three"})


async def test_users_passwords_and_what_they_may():
    async with running_etcd() as etcd:
        etcd.enable_users()
        async with EtcdClient(etcd.addresses, user("worker")) as client:
            await client.put(OURS, b"one")
            with pytest.raises(PermissionDenied):
                await client.get(b"/else")
            with pytest.raises(PermissionDenied):
                await client.list_keys(KeyRange.prefix(b"/"))
            with pytest.raises(PermissionDenied):
                await first_change(client.watch(KeyRange.prefix(b"/")))
            lease = await client.grant(5)
            assert await client.keep_alive(lease) == 5
        async with EtcdClient(etcd.addresses, user("nobody")) as client:
            with pytest.raises(PermissionDenied):
                await client.put(OURS, b"a fake worker")
        for security in (user("worker", "wrong-horse"), user("stranger")):
            async with EtcdClient(etcd.addresses, security) as client:
                with pytest.raises(PeerRefused, match="authentication failed") as caught:
                    await client.get(OURS)
                assert "horse" not in caught.value.message
        async with EtcdClient(etcd.addresses) as client:
            with pytest.raises(PeerRefused, match="--etcd-user"):
                await client.get(OURS)


async def test_an_expired_token_is_renewed_for_calls_and_streams():
    flags = ("--auth-token-ttl=1",)
    async with running_etcd(flags=flags) as etcd:
        etcd.enable_users()
        async with EtcdClient(etcd.addresses, user("worker")) as client:
            registry = EtcdRegistry(client, "/neuron-di", relist_s=1.0)  # a stream a second
            lease = await registry.grant(10)
            async with Watching(registry) as seen:
                for number in range(3):
                    await asyncio.sleep(2.2)  # longer than a token lasts
                    before = client.num_authentications
                    at_once = (registry.keep_alive(lease) for _ in range(16))
                    assert set(await asyncio.gather(*at_once)) == {10.0}
                    assert client.num_authentications <= before + 1
                    await registry.put(KEY, b"%d" % number, lease)
                    await seen.until(lambda n=number: seen.view == {KEY: b"%d" % n})
            assert client.num_authentications >= 3
            assert registry.num_breaks == 0
            # A restart forgets every token.
            etcd.members[0].kill()
            etcd.members[0].launch()
            await eventually(lambda: registry.put(KEY, b"after", lease))


async def test_a_member_that_lags_behind_is_no_other_etcd():
    async with running_etcd() as etcd, EtcdClient(etcd.addresses) as client:
        keys = KeyRange(b"/a")
        revision = await client.put(b"/a", b"1")
        async with aclosing(client.watch(keys)) as batches:
            batch = await anext(batches)
        late = replace(batch, revision=revision - 1)
        await client.require_same(keys, late, None)
        await client.require_same(keys, batch, replace(batch, revision=revision - 1))
        await client.require_same(keys, late, batch)
        for before in (
            replace(batch, revision=revision + 1),
            replace(batch, cluster_id=batch.cluster_id + 1),
        ):
            with pytest.raises(HistoryGone):
                await client.require_same(keys, batch, before)


async def test_users_switched_on_while_we_are_there():
    async with running_etcd() as etcd, EtcdClient(etcd.addresses, user("worker")) as client:
        await client.put(OURS, b"nobody asks")
        etcd.enable_users()
        await client.put(OURS, b"now they do")
        assert client.num_authentications == 2


async def test_users_switched_on_while_a_watch_is_broken():
    """A token that said "nobody asks" is no token: it is renewed at once, not after a pause."""
    async with running_etcd() as etcd, EtcdClient(etcd.addresses, user("worker")) as client:
        registry = EtcdRegistry(client, "/neuron-di", relist_s=1e6)
        async with Watching(registry) as seen:
            assert client.num_authentications == 1
            etcd.enable_users()
            etcd.members[0].kill()
            num_breaks = registry.num_breaks
            await until(lambda: registry.num_breaks > num_breaks)
            etcd.members[0].launch()
            await until(lambda: client.num_authentications == 2)
            await eventually(lambda: registry.put(KEY, b"one", 0))
            await seen.until(lambda: seen.view == {KEY: b"one"})
            await until(lambda: not registry.trouble())
        assert client.num_authentications == 2


async def test_an_etcd_without_space_says_what_to_do():
    flags = ("--quota-backend-bytes=1000000",)
    async with running_etcd(flags=flags) as etcd, EtcdClient(etcd.addresses) as client:
        lease = await client.grant(10)
        await client.put(OURS, b"one", lease=lease)
        with pytest.raises(PeerRefused, match=r"alarm NOSPACE.*alarm disarm"):
            await fill(client)
        with pytest.raises(PeerRefused, match="NOSPACE"):
            await client.grant(10)
        assert await client.keep_alive(lease) == 10
        assert (await client.get(OURS)).value == b"one"
        # So Kubernetes must go on finding it well: it would end it again and again.
        assert [await status_of(etcd, path) for path in PROBED] == [200, 200]
        assert await status_of(etcd, "/health") == 503


async def test_what_runs_when_the_client_is_closed_ends_with_a_word():
    async with running_etcd() as etcd:
        async with EtcdClient(etcd.addresses) as client:
            await client.put(OURS, b"one")
            etcd.members[0].freeze()
            calls = [
                asyncio.create_task(client.get(OURS)),
                asyncio.create_task(client.keep_alive(1)),
                asyncio.create_task(first_change(client.watch(KeyRange(OURS)))),
            ]
            await asyncio.sleep(0.1)
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in ended] == [PeerGone] * 3
        with pytest.raises(PeerGone, match="closed"):
            await client.get(OURS)


async def test_what_is_no_etcd_is_named():
    async def answer(reader, writer):
        await reader.read(1000)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with EtcdClient([address], call_timeout_s=0.5) as client:
            with pytest.raises((PeerGone, PeerTimeout, RemoteProtocolError), match=address):
                await client.get(b"/")
    async with EtcdClient(["no-such-host.invalid:2379"], call_timeout_s=0.5) as client:
        with pytest.raises((PeerGone, PeerTimeout), match="no-such-host"):
            await client.get(b"/")


async def test_a_member_that_is_something_else_is_passed_over():
    """Another service has its port: what that says of a method it does not know is no answer."""
    async with contextlib.AsyncExitStack() as stack:
        other = grpc.aio.server()
        address = f"127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
        stack.push_async_callback(other.stop, None)
        await other.start()
        etcd = await stack.enter_async_context(running_etcd())
        addresses = [address, *etcd.addresses]
        async with EtcdClient(addresses) as client:
            assert (await client.txn([], [])).succeeded
        async with EtcdClient(addresses) as client:
            lease = await client.grant(10)
            await client.put(OURS, b"one", lease=lease)
        async with EtcdClient(addresses) as client:
            assert await client.keep_alive(lease) == 10
        async with (
            EtcdClient(addresses) as client,
            Watching(EtcdRegistry(client, "/neuron-di")) as seen,
        ):
            await seen.until(lambda: seen.view == {KEY: b"one"})
        async with EtcdClient([address], call_timeout_s=0.5) as client:
            with pytest.raises(RemoteProtocolError, match="does not answer as etcd does"):
                await client.get(OURS)


async def test_a_call_ends_at_its_deadline_and_a_transaction_is_not_sent_twice():
    async with running_etcd() as etcd, EtcdClient(etcd.addresses) as client:
        await client.put(b"/a", b"1")
        etcd.members[0].freeze()
        before = client.num_attempts
        with pytest.raises(PeerTimeout):
            await client.txn([], [], deadline=Deadline.after(2.5))
        assert client.num_attempts == before + 1
        with pytest.raises(PeerTimeout):
            await client.get(b"/a", deadline=Deadline.after(2.5))
        assert client.num_attempts == before + 1 + 3


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_nothing_is_left_of_a_client(make_loop):
    async def live(addresses):
        async with EtcdClient(addresses) as client:
            registry = EtcdRegistry(client, "/neuron-di")
            async with Watching(registry) as seen:
                lease = await registry.grant(5)
                await registry.put(KEY, b"x", lease)
                await seen.until(lambda: bool(seen.view))
                await registry.revoke(lease)

    async def main():
        async with running_etcd() as etcd:
            addresses = [*etcd.addresses, "127.0.0.1:1"]
            await live(addresses)  # what gRPC makes once
            num_before = num_sockets()
            for _ in range(20):
                await live(addresses)
            gc.collect()  # gRPC's tracebacks refer to their calls in circles
            await until(lambda: len(asyncio.all_tasks()) == 1 and num_sockets() <= num_before)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())
