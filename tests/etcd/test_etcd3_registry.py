"""The registry on somebody's own etcd3.Client. Runs where `pip install '.[etcd3]'` was."""

import asyncio
import contextlib

import pytest
from etcd_kit import running_etcd
from watching import Watching, until

from neuron_di.errors import PeerError, PeerGone, PeerRefused, PeerTimeout
from neuron_di.etcd.etcd3_registry import Etcd3Registry

KEY = "/workers/decode/127.0.0.1/4000"

try:
    import etcd3
except (ImportError, TypeError) as missing:  # TypeError: with a protobuf that is too new for it
    etcd3 = None
    REASON = f"etcd3 cannot be imported: {missing}"
else:
    REASON = ""

pytestmark = pytest.mark.skipif(etcd3 is None, reason=REASON)


@pytest.fixture
async def etcd():
    async with running_etcd() as running:
        yield running


@pytest.fixture
async def registry(etcd):
    with etcd3.client(host="127.0.0.1", port=etcd.members[0].port, timeout=1) as client:
        async with Etcd3Registry(client, "/neuron-di") as registry:
            yield registry


async def test_keys_live_as_long_as_their_lease(registry):
    async with Watching(registry) as seen:
        lease = await registry.grant(1.5)
        await registry.put(KEY, b"one", lease)
        await seen.until(lambda: seen.view == {KEY: b"one"})
        assert await registry.keep_alive(lease) == 2
        await registry.revoke(lease)
        await registry.revoke(lease)
        await seen.until(lambda: not seen.view)
        assert await registry.keep_alive(lease) == 0
        with pytest.raises(PeerRefused, match="lease"):
            await registry.put(KEY, b"two", lease)


async def test_an_etcd_that_was_killed_or_wiped_is_followed_again(etcd, registry):
    async with Watching(registry) as seen:
        lease = await registry.grant(10)
        await registry.put(KEY, b"one", lease)
        await seen.until(lambda: bool(seen.view))
        etcd.members[0].kill()
        with pytest.raises((PeerGone, PeerTimeout)):
            await registry.keep_alive(lease)
        await until(lambda: bool(registry.trouble()))
        assert seen.view == {KEY: b"one"}
        await etcd.restart(wiped=True)
        await seen.until(lambda: not seen.view)
        async with asyncio.timeout(30):
            while KEY not in seen.view:
                with contextlib.suppress(PeerError):
                    await registry.put(KEY, b"two", await registry.grant(10))
                await asyncio.sleep(0.1)
        assert registry.trouble() == ""


async def test_garbage_is_dropped_and_counted(etcd, registry):
    etcd.ctl("put", "/neuron-di/workers/large", "v" * 70_000)
    etcd.ctl("put", "/neuron-di/workers/a", "{]")
    async with Watching(registry) as seen:
        assert (seen.view, registry.num_dropped) == ({"/workers/a": b"{]"}, 1)
