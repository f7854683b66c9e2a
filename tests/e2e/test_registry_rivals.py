"""Who is not who they say, or not ours: shown by name, and the cluster serves on.

Two workers with one address, one key or one name, the wrong model, the wrong cluster, clocks that
jump, and 100,000 keys, in a real etcd with a real proxy.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from openai_kit import Client, Refused, eventually
from process_kit import command, part, said, session_of_many
from registry_scene import (
    PUTS_PER_TXN,
    WORKERS,
    Scene,
    changed,
    key_of,
    running_scene,
    worker,
)

from neuron_di.clock import unix_s
from neuron_di.etcd.key_value import KeyRange, KeyValue
from neuron_di.etcd.messages import PutRequest, RequestOp
from neuron_di.registry.directory import DROPPED_MAX
from neuron_di.registry.record_reader import REFUSED_MAX
from neuron_di.wire import encode_json, record_decoder

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

NUM_FLOOD = 100_000
YEAR_S = 365 * 86_400.0

# Whoever asks what time it is hears now, tomorrow, last year, in turn.
JUMPING = """
import itertools, time
true, jumps = time.time, itertools.cycle((0.0, 86400.0, -31536000.0))
time.time = lambda: true() + next(jumps)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(llama: Path) -> AsyncIterator[Scene]:
    async with running_scene(llama) as scene:
        yield scene


def reports(status: dict) -> dict[str, dict]:
    return {each["record"]["worker_id"]: each for each in status["workers"]}


async def test_two_workers_that_say_one_address(scene: Scene) -> None:
    good = await scene.record()
    rival = changed(good, worker_id="rival", incarnation="f" * 32, role="decode")
    async with scene.stored({key_of(rival): encode_json(rival)}):
        status = await scene.until(
            lambda status: reports(status).get("rival", {}).get("health") == "down"
        )
        assert reports(status)["good"]["health"] == "up"
        words = f"rival is not at 127.0.0.1:{good.api_port}: another process is, good"
        assert reports(status)["rival"]["health_reason"] == words
        await scene.serves()
        assert f"rival gets no requests: {words}" in await scene.shown()
    await scene.until(lambda status: set(reports(status)) == {"good"})


async def test_two_workers_with_one_key(scene: Scene, llama: Path) -> None:
    """The later one has it. Where it is not the one that answers there, that shows."""
    there = (f"--etcd={scene.etcd.addresses[0]}", "--etcd-prefix=/one-key")
    async with (
        part("proxy", "--port=0", *there) as proxy,
        worker(llama, "first", *there),
        session_of_many() as session,
    ):
        client = Client(session, proxy.url, "m")
        item = await _only_key(scene, b"/one-key/")
        later = changed(record_decoder.decode(item.value), worker_id="later", incarnation="f" * 32)
        await scene.store.put(item.key, encode_json(later))

        async def is_found_out() -> str | None:
            found = reports(await client.get("/status")).get("later", {})
            return found["health_reason"] if found.get("health") == "down" else None

        assert (await eventually(is_found_out)).endswith(": another process is, first")
        assert proxy.process.returncode is None
        await scene.store.delete(KeyRange(item.key))


async def test_a_worker_whose_key_was_deleted_announces_itself_again(
    scene: Scene, llama: Path
) -> None:
    """By an operator's mistake, say: its lease is as good as before."""
    there = (f"--etcd={scene.etcd.addresses[0]}", "--etcd-prefix=/robbed", "--etcd-ttl-s=2")
    async with worker(llama, "robbed", *there):
        item = await _only_key(scene, b"/robbed/")
        await scene.store.delete(KeyRange(item.key))
        assert (await _only_key(scene, b"/robbed/")).key == item.key


async def test_two_real_workers_with_one_name(scene: Scene, llama: Path) -> None:
    there = f"--etcd={scene.etcd.addresses[0]}"
    async with worker(llama, "good", there):
        status = await scene.until(
            lambda status: [each["health"] for each in status["workers"]] == ["up", "up"]
        )
        (remark,) = status["remarks"]
        assert remark.startswith("2 workers have the name good: at 127.0.0.1:")
        await scene.serves()
        assert remark in await scene.shown()


async def test_workers_with_other_weights(scene: Scene, checkpoint: Callable[[str], Path]) -> None:
    """Under the same model's name: no pair is made of them, and both hear why."""
    there = f"--etcd={scene.etcd.addresses[0]}"
    async with (
        worker(checkpoint("llama"), "p", there, role="prefill"),
        worker(checkpoint("mistral"), "d", there, role="decode"),
    ):
        status = await scene.until(
            lambda status: (
                {"p", "d"} <= set(reports(status))
                and all(reports(status)[name]["why_alone"] for name in ("p", "d"))
            )
        )
        assert "differ from d's" in reports(status)["p"]["why_alone"]
        for _ in range(3):
            await scene.serves()
        shown = await scene.shown()
        assert "p gets no requests: weights " in shown
        assert "d gets no requests: weights " in shown


async def test_a_model_that_nobody_has(scene: Scene) -> None:
    asked = Client(scene.client.session, scene.client.url, "another")
    with pytest.raises(Refused) as refused:
        await asked.ask("hello")
    assert refused.value.status == 404
    await scene.serves()


async def test_another_clusters_proxy_and_worker(scene: Scene, llama: Path) -> None:
    """At the same etcd, under another prefix: each sees its own, and nothing of the other's."""
    other = (f"--etcd={scene.etcd.addresses[0]}", "--etcd-prefix=/neuron-di-2")
    async with part("proxy", "--port=0", *other) as proxy, session_of_many() as session:
        client = Client(session, proxy.url, "m")
        assert (await client.get("/status"))["workers"] == []
        assert (await client.get("/health"))["status"] == "unavailable"
        async with worker(llama, "theirs", *other):

            async def is_there() -> bool | None:
                return True if (await client.get("/health"))["status"] == "ok" else None

            await eventually(is_there)
            assert set(reports(await client.get("/status"))) == {"theirs"}
            assert (await client.ask("hello", max_tokens=2)).usage["completion_tokens"] == 2
            status = await scene.status()
            assert "theirs" not in reports(status)
            assert "theirs" not in {each["worker_id"] for each in status["refused"]}
            await scene.serves()


@pytest.mark.parametrize("ahead_s", [20 * YEAR_S, -20 * YEAR_S], ids=["ahead", "behind"])
async def test_a_worker_whose_clock_is_years_off(scene: Scene, ahead_s: float) -> None:
    odd = changed(
        await scene.record(),
        worker_id="odd",
        incarnation="e" * 32,
        api_port=29_020,
        started_unix_s=unix_s() + ahead_s,
    )
    async with scene.stored({key_of(odd): encode_json(odd)}):
        status = await scene.until(
            lambda status: reports(status).get("odd", {}).get("health") == "down"
        )
        age_s = reports(status)["odd"]["age_s"]
        assert age_s == 0 if ahead_s > 0 else age_s > 19 * YEAR_S
        await scene.serves()
        assert "odd" in await scene.shown()
    await scene.until(lambda status: set(reports(status)) == {"good"})


async def test_wall_clocks_that_jump_at_every_look(
    scene: Scene, llama: Path, tmp_path: Path
) -> None:
    """Leases, probes and deadlines go by the monotonic clock, in the proxy and in the worker."""
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    environ = {"PYTHONPATH": str(tmp_path)}
    there = (f"--etcd={scene.etcd.addresses[0]}", "--etcd-prefix=/jumping", "--etcd-ttl-s=4")
    names = ("--role=both", "--worker-id=jumpy", "--model-name=m", "--threads=1")
    async with (
        ready("proxy", "--port=0", *there, environ=environ) as url,
        ready("worker", str(llama), *names, *there, environ=environ),
        session_of_many() as session,
    ):
        client = Client(session, url, "m")

        async def is_up() -> bool | None:
            states = [each["health"] for each in (await client.get("/status"))["workers"]]
            return True if states == ["up"] else None

        await eventually(is_up)
        made = (await _only_key(scene, b"/jumping/")).create_revision
        for _ in range(30):
            answer = await client.ask("hello", max_tokens=8, ignore_eos=True)
            assert answer.usage["completion_tokens"] == 8
            (report,) = (await client.get("/status"))["workers"]
            assert (report["health"], report["vanished_s"]) == ("up", None)
            await asyncio.sleep(0.2)  # longer in all than a lease without its beats lasts
        assert (await _only_key(scene, b"/jumping/")).create_revision == made, "no lease was lost"


async def _only_key(scene: Scene, prefix: bytes) -> KeyValue:
    """The key below a prefix, once there is one."""

    async def look() -> KeyValue | None:
        items = (await scene.store.list_keys(KeyRange.prefix(prefix))).items
        return items[0] if items else None

    return await eventually(look)


@asynccontextmanager
async def ready(*arguments: str, environ: dict[str, str]) -> AsyncIterator[str]:
    async with command(*arguments, environ=environ) as process:
        yield (await said(process, r"event=ready .*url=(\S+)"))[1]


async def flood(scene: Scene) -> None:
    """Junk at keys that could be workers' and sort before all others, and at impossible ones."""
    keys = [WORKERS + b"both/10.%d.0.1/%d" % divmod(i, 60_000) for i in range(60_000)]
    keys += [WORKERS + b"%d/../x" % number for number in range(NUM_FLOOD - len(keys))]
    for start in range(0, len(keys), PUTS_PER_TXN):
        puts = [
            RequestOp(request_put=PutRequest(key=key, value=b"junk"))
            for key in keys[start : start + PUTS_PER_TXN]
        ]
        await scene.store.txn([], puts)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def flooded(scene: Scene) -> None:
    """The keys are there, and requests were served while they came."""
    flooding = asyncio.create_task(flood(scene))
    while not flooding.done():
        await scene.serves()
    await flooding


async def test_100_000_keys(scene: Scene, flooded: None) -> None:
    """They are bounded, counted and named, also when everything is listed anew."""
    await scene.serves()
    scene.etcd.members[0].kill()
    scene.etcd.members[0].launch()
    await scene.etcd.answers()
    status = await scene.until(lambda status: sum(status["ignored"].values()) > 10_000)
    assert len(status["refused"]) <= REFUSED_MAX + DROPPED_MAX
    assert "keys of the registry were left out since the start" in await scene.shown()
    for _ in range(20):
        await scene.serves()
        await asyncio.sleep(0.1)
    assert set(reports(await scene.status())) == {"good"}


async def test_a_proxy_that_starts_among_100_000_keys(scene: Scene, flooded: None) -> None:
    there = f"--etcd={scene.etcd.addresses[0]}"
    async with part("proxy", "--port=0", there) as proxy, session_of_many() as session:
        client = Client(session, proxy.url, "m")

        async def has_read() -> dict | None:
            """It reads page by page, and `good` may be late with a beat at an etcd so flooded."""
            status = await client.get("/status")
            is_all = reports(status) and sum(status["ignored"].values()) > 1000
            return status if is_all else None

        assert set(reports(await eventually(has_read))) == {"good"}


async def test_100_000_keys_that_are_gone_leave_nothing(scene: Scene, flooded: None) -> None:
    """The last test here: it takes away what `flooded` stored."""
    for first in (b"both/10.", *(b"%d" % digit for digit in range(10))):
        await scene.store.delete(KeyRange.prefix(WORKERS + first))
    await scene.until(lambda status: reports(status)["good"]["vanished_s"] is None)
    await scene.until(lambda status: len(status["refused"]) <= DROPPED_MAX)
    await scene.serves()
