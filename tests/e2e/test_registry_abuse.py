"""Whatever stands in etcd, a proxy serves on: it is refused by name, counted, and shown (B42-B45).

Each test writes to a real etcd what no worker of this version would write, and takes it back.
"""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from registry_scene import WORKERS, Scene, changed, key_of, refusal, running_scene

from neuron_di.wire import PROTOCOL_VERSION, encode_json

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(llama: Path) -> AsyncIterator[Scene]:
    async with running_scene(llama) as scene:
        yield scene


@pytest.mark.parametrize(
    ("value", "fault", "words"),
    [
        pytest.param(b"", "value", "", id="empty"),
        pytest.param(b"{", "value", "", id="no-json"),
        pytest.param(b"\xff\xfe\x00", "value", "", id="no-text"),
        pytest.param(b"null", "value", "", id="null"),
        pytest.param(b'["a"]', "value", "", id="list"),
        pytest.param(b"[" * 60_000, "value", "", id="deep"),
        pytest.param(b'{"worker_id": 7, "pid": "x"}', "value", "", id="wrong-types"),
        pytest.param(b'{"connections": []}', "value", "", id="as-the-seed"),
        pytest.param(
            b'{"protocol_version": 99, "worker_id": "future"}',
            "version",
            f"it speaks protocol version 99, not {PROTOCOL_VERSION}",
            id="version",
        ),
    ],
)
async def test_a_value_that_is_no_record(
    scene: Scene, value: bytes, fault: str, words: str
) -> None:
    key = WORKERS + b"decode/127.0.0.1/29001"
    before = (await scene.status())["ignored"].get(fault, 0)
    async with scene.stored({key: value}):
        status = await scene.until(lambda status: refusal(status, key) is not None)
        assert status["ignored"][fault] > before
        refused = refusal(status, key)
        assert refused["reason"]
        assert words in refused["reason"]
        await scene.serves()
        shown = await scene.shown()
        name = refused["worker_id"] or refused["key"]
        assert f"{name} is not used: {refused['reason']}" in shown
    await scene.until(lambda status: refusal(status, key) is None)


async def test_fields_of_the_wrong_type_each(scene: Scene) -> None:
    """Every field of a good record, spoilt: none is taken, all are counted."""
    record = await scene.record()
    good = {name: getattr(record, name) for name in record.__struct_fields__}
    required = [
        *("protocol_version", "worker_id", "incarnation", "role", "state", "pid", "model"),
        *("model_digest", "layout_digest", "context_tokens", "host", "api_port", "signal_host"),
        *("signal_port", "started_unix_s"),
    ]
    pairs = {}
    for number, name in enumerate(required):
        spoilt = good | {"worker_id": "spoilt", "api_port": 29_100 + number, name: {"no": [None]}}
        pairs[WORKERS + b"both/127.0.0.1/%d" % (29_100 + number)] = encode_json(spoilt)
    before = sum((await scene.status())["ignored"].values())
    async with scene.stored(pairs):
        status = await scene.until(lambda status: all(refusal(status, key) for key in pairs))
        assert sum(status["ignored"].values()) >= before + len(pairs)
        assert [each["record"]["worker_id"] for each in status["workers"]] == ["good"]
        await scene.serves()


@pytest.mark.parametrize(
    "name", ["../x", "both", "both/127.0.0.1", "king/127.0.0.1/1", "both/a b/1", "both/x/80/more"]
)
async def test_a_key_that_is_no_workers(scene: Scene, name: str) -> None:
    key = WORKERS + name.encode()
    async with scene.stored({key: encode_json(await scene.record())}):
        status = await scene.until(lambda status: refusal(status, key) is not None)
        assert refusal(status, key)["reason"] == "this is no worker's key"
        assert status["ignored"]["key"] > 0
        await scene.serves()
        assert "is not used: this is no worker's key" in await scene.shown()


async def test_names_that_are_no_text_and_values_that_are_too_large(scene: Scene) -> None:
    """They are left out before they are read; what comes after them is seen."""
    after = WORKERS + b"both/127.0.0.1/29002"
    pairs = {
        WORKERS + b"both/\xff\xfe/1": b"{}",
        WORKERS + b"both/" + b"k" * 10_000: b"{}",
        WORKERS + b"decode/127.0.0.1/29003": b"v" * (1 << 20),
        after: b"{}",
    }
    async with scene.stored(pairs):
        await scene.until(lambda status: refusal(status, after) is not None)
        await scene.serves()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"host": "169.254.169.254"}, "not the address of one machine", id="metadata"),
        pytest.param({"host": "0.0.0.0"}, "not the address of one machine", id="any"),
        pytest.param({"host": "db.example.org"}, "is no IP address", id="name"),
        pytest.param({"host": "10.0.0.8"}, "is in none of --worker-networks", id="elsewhere"),
        pytest.param({"api_port": 22}, "port 22 is not among --worker-ports", id="port"),
        pytest.param(
            {"signal_host": "169.254.169.254", "signal_port": 29_000},
            "not the address of one machine",
            id="signal",
        ),
    ],
)
async def test_an_address_where_no_worker_may_be(scene: Scene, changes: dict, words: str) -> None:
    evil = changed(await scene.record(), **({"worker_id": "evil", "api_port": 29_004} | changes))
    async with scene.stored({key_of(evil): encode_json(evil)}):
        status = await scene.until(lambda status: refusal(status, key_of(evil)) is not None)
        assert words in refusal(status, key_of(evil))["reason"]
        assert status["ignored"]["address"] > 0
        await scene.serves()
        assert re.search(f"^evil is not used: .*{re.escape(words)}", await scene.shown(), re.M)


async def test_a_record_at_anothers_key(scene: Scene) -> None:
    record = await scene.record()
    key = WORKERS + b"both/127.0.0.1/29005"
    async with scene.stored({key: encode_json(record)}):
        status = await scene.until(lambda status: refusal(status, key) is not None)
        assert refusal(status, key)["reason"] == f"the record belongs at {record.key()}"
        assert status["ignored"]["place"] > 0
        await scene.serves()


async def test_keys_of_others_are_none_of_ours(scene: Scene) -> None:
    """Other programs' keys, and another cluster's whose prefix begins as ours."""
    record = encode_json(await scene.record())
    before = await scene.status()
    pairs = {
        b"/registry/services/default": b"someone else's",
        b"/workers/both/127.0.0.1/29006": record,
        b"/neuron-di-2/workers/both/127.0.0.1/29006": record,
        b"/neuron-di/other/both/127.0.0.1/29006": record,
    }
    seen = WORKERS + b"both/127.0.0.1/29007"
    async with scene.stored(pairs | {seen: b"{}"}):
        status = await scene.until(lambda status: refusal(status, seen) is not None)
        assert [each["record"]["worker_id"] for each in status["workers"]] == ["good"]
        num = sum(status["ignored"].values()) - sum(before["ignored"].values())
        assert num == 1
        await scene.serves()
